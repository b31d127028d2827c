"""Models with Fourier transforms: FNet, a Fourier neural operator, long convolutions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.language import LMSize, embedding_init, next_token_loss, rms_norm
from tests.zoo.written.training import (
    cross_entropy,
    dense_init,
    integers,
    mlp,
    mlp_init,
    normal,
    pick,
    trained,
)


@zoo_program("fnet", source="written", layers=True)
def fnet(size: Size) -> ZooStep:
    """Tokens are mixed by a Fourier transform over length and features."""
    s = pick(
        size,
        LMSize(16, 9, 61, 24, 1, 2),
        LMSize(512, 512, 32000, 1024, 1, 24),
        LMSize(32, 512, 32000, 1024, 1, 4),
    )

    def init() -> Any:
        a, b, *keys = jax.random.split(jax.random.key(0), s.depth + 2)
        return {
            "embedding": embedding_init(a, s.vocabulary, s.dim),
            "layers": [mlp_init(k, s.dim, 4 * s.dim, s.dim) for k in keys],
            "norms": jnp.ones((s.depth, 2, s.dim)),
            "head": dense_init(b, s.dim, s.vocabulary),
        }

    def loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
        x = params["embedding"][tokens]
        for layer, norms in zip(params["layers"], params["norms"], strict=True):
            x = rms_norm(x + jnp.fft.fft2(x).real, norms[0])
            x = rms_norm(x + mlp(layer, x), norms[1])
        return cross_entropy(x @ params["head"], labels)

    def make_batch(i: int) -> tuple:
        shape = (s.rows, s.length)
        return integers(2 * i, s.vocabulary, *shape), integers(2 * i + 1, s.vocabulary, *shape)

    return trained(init, loss, make_batch)


@zoo_program("fno", source="written", layers=True)
def fno(size: Size) -> ZooStep:
    """A Fourier neural operator in two dimensions; its complex weights are kept as two reals."""
    rows, side, dim, modes, depth = pick(
        size, (16, 9, 8, 3, 2), (256, 256, 128, 32, 4), (16, 256, 128, 32, 2)
    )

    def layer_init(key: jax.Array) -> Any:
        a, b = jax.random.split(key)
        shape = (2, 2, dim, dim, modes, modes)
        return {"spectrum": jax.random.normal(a, shape) / dim, "w": dense_init(b, dim, dim)}

    def init() -> Any:
        a, b, *keys = jax.random.split(jax.random.key(0), depth + 2)
        return {
            "lift": dense_init(a, 3, dim),
            "layers": [layer_init(k) for k in keys],
            "out": mlp_init(b, dim, 4 * dim, 1),
        }

    def convolve(spectrum: jax.Array, x: jax.Array) -> jax.Array:
        weight = jax.lax.complex(spectrum[0], spectrum[1])
        f = jnp.fft.rfft2(x, axes=(1, 2))
        low = jnp.einsum("bxyi,ioxy->bxyo", f[:, :modes, :modes], weight[0])
        high = jnp.einsum("bxyi,ioxy->bxyo", f[:, -modes:, :modes], weight[1])
        g = jnp.zeros_like(f).at[:, :modes, :modes].set(low).at[:, -modes:, :modes].set(high)
        return jnp.fft.irfft2(g, s=x.shape[1:3], axes=(1, 2))

    def loss(params: Any, a: jax.Array, u: jax.Array) -> jax.Array:
        grid = jnp.stack(jnp.meshgrid(*[jnp.linspace(0, 1, side)] * 2), axis=-1)
        grid = jnp.broadcast_to(grid, (*a.shape, 2))
        x = jnp.concatenate([a[..., None], grid], axis=-1) @ params["lift"]
        for w in params["layers"]:
            x = jax.nn.gelu(convolve(w["spectrum"], x) + x @ w["w"])
        error = jnp.sum((mlp(params["out"], x)[..., 0] - u) ** 2, axis=(1, 2))
        return jnp.mean(jnp.sqrt(error / jnp.sum(u**2, axis=(1, 2))))

    return trained(
        init, loss, lambda i: (normal(2 * i, rows, side, side), normal(2 * i + 1, rows, side, side))
    )


@zoo_program("long-convolution", source="written", layers=True)
def long_convolution(size: Size) -> ZooStep:
    """Hyena: gated convolutions as long as the sequence, by FFT, with implicit filters."""
    s = pick(
        size,
        LMSize(16, 9, 61, 24, 1, 2),
        LMSize(64, 8192, 50304, 1024, 1, 24),
        LMSize(2, 8192, 50304, 1024, 1, 2),
    )
    order = 8

    def layer_init(key: jax.Array) -> Any:
        a, b, c = jax.random.split(key, 3)
        return {
            "in": dense_init(a, s.dim, 3 * s.dim),
            "filter": mlp_init(b, 2 * order, 2 * order, s.dim),
            "decay": jnp.linspace(0.5, 4.0, s.dim),
            "out": dense_init(c, s.dim, s.dim),
            "norm": jnp.ones(s.dim),
        }

    def init() -> Any:
        a, *keys = jax.random.split(jax.random.key(0), s.depth + 1)
        embedding = embedding_init(a, s.vocabulary, s.dim)
        return {"embedding": embedding, "layers": [layer_init(k) for k in keys]}

    def convolve(x: jax.Array, taps: jax.Array) -> jax.Array:
        n = 2 * s.length
        spectrum = jnp.fft.rfft(x, n, axis=1) * jnp.fft.rfft(taps, n, axis=0)
        return jnp.fft.irfft(spectrum, n, axis=1)[:, : s.length]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        t = jnp.linspace(0, 1, s.length)[:, None]
        angles = t * jnp.arange(1, order + 1) * jnp.pi
        features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        x = params["embedding"][tokens]
        for w in params["layers"]:
            taps = mlp(w["filter"], features, jnp.sin) * jnp.exp(-t * w["decay"])
            a, b, v = jnp.split(rms_norm(x, w["norm"]) @ w["in"], 3, axis=-1)
            x = x + (a * convolve(b * v, taps)) @ w["out"]
        return next_token_loss(x @ params["embedding"].T, tokens)

    return trained(init, loss, lambda i: (integers(i, s.vocabulary, s.rows, s.length),))
