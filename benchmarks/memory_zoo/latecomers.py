"""Models written to try the finished memory model, in plain JAX: numbers of rows → `ZooStep`s."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.memory_zoo.newcomers import _norm, _weights, bf16
from tests.zoo.program import ZooStep
from tests.zoo.written.training import integers, normal, trained, trained_with_key

Weights = dict[str, jax.Array]


def _as_bf16(params: Any) -> Weights:
    return jax.tree.map(lambda p: p.astype(bf16), params)


def _next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    logits = logits[:, :-1].astype(jnp.float32)
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def _attention(x: jax.Array, qkv: jax.Array, out: jax.Array, heads: int) -> jax.Array:
    q, k, v = jnp.split((_norm(x) @ qkv).reshape(*x.shape[:2], heads, -1), 3, -1)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(x.shape) @ out


def mamba_hybrid(
    rows: int, *, width: int = 1024, length: int = 1024, states: int = 8, vocabulary: int = 16384
) -> ZooStep:
    """Selective state spaces by an associative scan, with one attention layer between them."""
    inner, rank = 2 * width, width // 16
    sizes: dict[str, tuple[int, ...]] = {
        "tokens": (vocabulary, width),
        "qkv": (width, 3 * width),
        "out": (width, width),
    }
    for layer in range(2):
        sizes[f"in_{layer}"] = (width, 2 * inner)
        sizes[f"conv_{layer}"] = (4, inner)
        sizes[f"select_{layer}"] = (inner, rank + 2 * states)
        sizes[f"step_{layer}"] = (rank, inner)
        sizes[f"decay_{layer}"] = (inner, states)
        sizes[f"back_{layer}"] = (inner, width)

    def scanned(decay: jax.Array, value: jax.Array) -> jax.Array:
        def join(left: Any, right: Any) -> Any:
            return left[0] * right[0], left[1] * right[0] + right[1]

        return jax.lax.associative_scan(join, (decay, value), axis=1)[1]

    def selective(x: jax.Array, w: Weights, layer: int) -> jax.Array:
        value, gate = jnp.split(_norm(x) @ w[f"in_{layer}"], 2, -1)
        padded = jnp.pad(value, ((0, 0), (3, 0), (0, 0)))
        kernel = w[f"conv_{layer}"]
        value = jax.nn.silu(sum(padded[:, k : k + length] * kernel[k] for k in range(4)))
        step, enter, leave = jnp.split(value @ w[f"select_{layer}"], (rank, rank + states), -1)
        step = jax.nn.softplus((step @ w[f"step_{layer}"]).astype(jnp.float32))
        decay = jnp.exp(-step[..., None] * jnp.exp(w[f"decay_{layer}"].astype(jnp.float32)))
        entered = (step * value)[..., None] * enter[:, :, None].astype(jnp.float32)
        state = scanned(decay, entered)
        said = jnp.einsum("blis,bls->bli", state, leave.astype(jnp.float32)).astype(bf16)
        return x + ((said + value) * jax.nn.silu(gate)) @ w[f"back_{layer}"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        w = _as_bf16(params)
        x = selective(w["tokens"][tokens], w, 0)
        x = x + _attention(x, w["qkv"], w["out"], 16)
        return _next_token_loss(_norm(selective(x, w, 1)) @ w["tokens"].T, tokens)

    return trained(
        lambda: _weights(sizes), loss, lambda i: (integers(i, vocabulary, rows, length),)
    )


def graph_transformer(
    rows: int, *, nodes: int = 128, width: int = 512, wide: int = 64, depth: int = 3
) -> ZooStep:
    """Attention over all pairs of nodes, with biases from edges that the scores change in turn."""
    heads = 16
    sizes: dict[str, tuple[int, ...]] = {"node": (32, width), "edge": (8, wide), "say": (width, 1)}
    for layer in range(depth):
        sizes |= {
            f"qkv_{layer}": (width, 3 * width),
            f"bias_{layer}": (wide, 2 * heads),
            f"out_{layer}": (width, width),
            f"back_{layer}": (heads, wide),
            f"up_{layer}": (width, 2 * width),
            f"down_{layer}": (2 * width, width),
            f"edge_up_{layer}": (wide, 2 * wide),
            f"edge_down_{layer}": (2 * wide, wide),
        }

    def loss(params: Any, atoms: jax.Array, bonds: jax.Array, wanted: jax.Array) -> jax.Array:
        w = _as_bf16(params)
        x, e = atoms.astype(bf16) @ w["node"], bonds.astype(bf16) @ w["edge"]
        for layer in range(depth):
            qkv = (_norm(x) @ w[f"qkv_{layer}"]).reshape(*x.shape[:2], 3, heads, -1)
            bias, gate = jnp.split(_norm(e) @ w[f"bias_{layer}"], 2, -1)
            scores = jnp.einsum("bqhd,bkhd->bqkh", qkv[:, :, 0], qkv[:, :, 1])
            scores = jnp.clip(scores / (width // heads) ** 0.5, -5, 5) + bias
            weights = jax.nn.softmax(scores.astype(jnp.float32), 2).astype(bf16)
            weights = weights * jax.nn.sigmoid(gate)
            mixed = jnp.einsum("bqkh,bkhd->bqhd", weights, qkv[:, :, 2]).reshape(x.shape)
            x = x + mixed @ w[f"out_{layer}"]
            x = x + jax.nn.elu(_norm(x) @ w[f"up_{layer}"]) @ w[f"down_{layer}"]
            e = e + scores @ w[f"back_{layer}"]
            e = e + jax.nn.elu(_norm(e) @ w[f"edge_up_{layer}"]) @ w[f"edge_down_{layer}"]
        said = (x.mean(1) @ w["say"])[:, 0].astype(jnp.float32)
        return jnp.mean(jnp.abs(said - wanted))

    def batch(index: int) -> tuple[jax.Array, ...]:
        atoms, bonds = (rows, nodes, 32), (rows, nodes, nodes, 8)
        return normal(index, *atoms), normal(index + 1, *bonds), normal(index + 2, rows)

    return trained(lambda: _weights(sizes), loss, batch)


def _convolved(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _doubled(x: jax.Array) -> jax.Array:
    return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)


def image_codec(rows: int, *, size: int = 128, channels: int = 128) -> ZooStep:
    """A convolutional autoencoder with group norms, and attention where the image is smallest."""
    widths = (channels, 2 * channels, 4 * channels)
    sizes: dict[str, tuple[int, ...]] = {
        "first": (3, 3, 3, channels),
        "code": (widths[-1], 8),
        "decode": (8, widths[-1]),
        "last": (3, 3, channels, 3),
        "qkv": (widths[-1], 3 * widths[-1]),
        "out": (widths[-1], widths[-1]),
    }
    for level, wide in enumerate(widths):
        before, after = widths[max(level - 1, 0)], widths[max(level - 1, 0)]
        sizes |= {
            f"down_{level}": (3, 3, before, wide),
            f"enter_{level}": (3, 3, wide, wide),
            f"leave_{level}": (3, 3, wide, wide),
            f"up_{level}": (3, 3, wide, after),
        }

    def normed(x: jax.Array) -> jax.Array:
        groups = x.astype(jnp.float32).reshape(x.shape[0], -1, 32, x.shape[-1] // 32)
        mean = groups.mean((1, 3), keepdims=True)
        variance = groups.var((1, 3), keepdims=True)
        return ((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape).astype(bf16)

    def loss(params: Any, images: jax.Array) -> jax.Array:
        w = _as_bf16(params)
        x = _convolved(images.astype(bf16), w["first"])
        for level in range(3):
            x = _convolved(x, w[f"down_{level}"], 2 if level else 1)
            x = x + _convolved(jax.nn.swish(normed(x)), w[f"enter_{level}"])
        places = normed(x).reshape(rows, -1, widths[-1])
        q, k, v = jnp.split((places @ w["qkv"])[:, :, None], 3, -1)
        mixed = jax.nn.dot_product_attention(q, k, v)[:, :, 0] @ w["out"]
        x = x + mixed.reshape(x.shape)
        code = jnp.tanh(x @ w["code"])
        x = code @ w["decode"]
        for level in reversed(range(3)):
            x = x + _convolved(jax.nn.swish(normed(x)), w[f"leave_{level}"])
            x = _convolved(_doubled(x) if level else x, w[f"up_{level}"])
        said = _convolved(jax.nn.swish(normed(x)), w["last"]).astype(jnp.float32)
        return jnp.mean(jnp.abs(said - images))

    return trained(lambda: _weights(sizes), loss, lambda i: (normal(i, rows, size, size, 3),))


def style_network(rows: int, *, channels: int = 512, size: int = 128) -> ZooStep:
    """Images made from noise: every convolution's input is scaled by a style and its output by what
    that makes of the kernel, then noise is added, and colours add up over resolutions."""
    widths = tuple(max(64, channels * 16 // side) for side in (8, 16, 32, 64, 128) if side <= size)
    sizes: dict[str, tuple[int, ...]] = {"start": (4, 4, channels)}
    sizes |= {f"map_{layer}": (512, 512) for layer in range(4)}
    for level, wide in enumerate(widths):
        before = (channels, *widths)[level]
        sizes |= {
            f"style_{level}": (512, before),
            f"kernel_{level}": (3, 3, before, wide),
            f"again_style_{level}": (512, wide),
            f"again_{level}": (3, 3, wide, wide),
            f"colour_{level}": (wide, 3),
        }

    def styled(x: jax.Array, kernel: jax.Array, style: jax.Array, key: jax.Array) -> jax.Array:
        scales = 1 + style
        squares = jnp.einsum("hwio,bi->bo", kernel**2, scales**2)
        x = _convolved(x * scales[:, None, None], kernel)
        x = x * jax.lax.rsqrt(squares + 1e-6)[:, None, None]
        noise = jax.random.normal(key, (*x.shape[:3], 1), bf16)
        return jax.nn.leaky_relu(x + 0.1 * noise, 0.2)

    def loss(params: Any, key: jax.Array, images: jax.Array) -> jax.Array:
        w = _as_bf16(params)
        keys = jax.random.split(key, 2 * len(widths) + 1)
        style = jax.random.normal(keys[-1], (rows, 512), bf16)
        for layer in range(4):
            style = jax.nn.leaky_relu(style @ w[f"map_{layer}"], 0.2)
        x = jnp.broadcast_to(w["start"], (rows, *w["start"].shape))
        picture = jnp.zeros((rows, 4, 4, 3), bf16)
        for level in range(len(widths)):
            first, again = style @ w[f"style_{level}"], style @ w[f"again_style_{level}"]
            x = styled(_doubled(x), w[f"kernel_{level}"], first, keys[2 * level])
            x = styled(x, w[f"again_{level}"], again, keys[2 * level + 1])
            picture = jax.image.resize(picture, (*x.shape[:3], 3), "linear")
            picture = picture + x @ w[f"colour_{level}"]
        return jnp.mean((picture.astype(jnp.float32) - images) ** 2)

    side = 4 * 2 ** len(widths)
    return trained_with_key(
        lambda: _weights(sizes), loss, lambda i: (normal(i, rows, side, side, 3),)
    )


def perceiver_io(
    rows: int, *, width: int = 1280, latents: int = 256, places: int = 2048, depth: int = 2
) -> ZooStep:
    """Bytes into a few latents and out again, one class for each place."""
    heads, narrow = 8, 768
    sizes: dict[str, tuple[int, ...]] = {
        "bytes": (256, narrow),
        "places": (places, narrow),
        "latents": (latents, width),
        "read_q": (width, 256),
        "read_kv": (narrow, 256 + width),
        "read_out": (width, width),
        "write_q": (narrow, 256),
        "write_kv": (width, 256 + narrow),
        "write_out": (narrow, narrow),
    }
    for layer in range(depth):
        sizes |= {
            f"qkv_{layer}": (width, 512 + width),
            f"out_{layer}": (width, width),
            f"up_{layer}": (width, 4 * width),
            f"down_{layer}": (4 * width, width),
        }

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], heads, -1)

    def attend(q: jax.Array, kv: jax.Array) -> jax.Array:
        k, v = split(kv[..., :256]), split(kv[..., 256:])
        scores = jnp.einsum("bqhd,bkhd->bhqk", split(q), k).astype(jnp.float32)
        weights = jax.nn.softmax(scores / k.shape[-1] ** 0.5).astype(bf16)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return mixed.reshape(*mixed.shape[:2], -1)

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = _as_bf16(params)
        read = w["bytes"][text] + w["places"]
        z = jnp.broadcast_to(w["latents"], (rows, latents, width))
        z = z + attend(_norm(z) @ w["read_q"], _norm(read) @ w["read_kv"]) @ w["read_out"]
        for layer in range(depth):
            qkv = _norm(z) @ w[f"qkv_{layer}"]
            z = z + attend(qkv[..., :256], qkv[..., 256:]) @ w[f"out_{layer}"]
            z = z + jax.nn.gelu(_norm(z) @ w[f"up_{layer}"]) @ w[f"down_{layer}"]
        asked = jnp.broadcast_to(w["places"] @ w["write_q"], (rows, places, 256))
        said = attend(asked, _norm(z) @ w["write_kv"]) @ w["write_out"]
        return _next_token_loss(said @ w["bytes"].T, text)

    return trained(lambda: _weights(sizes), loss, lambda i: (integers(i, 256, rows, places),))


def sorted_experts(
    rows: int, *, width: int = 1024, length: int = 1024, experts: int = 8, vocabulary: int = 16384
) -> ZooStep:
    """Two layers of attention and experts: tokens sorted by expert, products of ragged groups."""
    sizes: dict[str, tuple[int, ...]] = {"tokens": (vocabulary, width)}
    for layer in range(2):
        sizes |= {
            f"qkv_{layer}": (width, 3 * width),
            f"out_{layer}": (width, width),
            f"route_{layer}": (width, experts),
            f"gate_{layer}": (experts, width, 2 * width),
            f"up_{layer}": (experts, width, 2 * width),
            f"down_{layer}": (experts, 2 * width, width),
        }

    def mixture(x: jax.Array, w: Weights, layer: int) -> jax.Array:
        flat = x.reshape(-1, width)
        shares = jax.nn.softmax((flat @ w[f"route_{layer}"]).astype(jnp.float32))
        shares, chosen = jax.lax.top_k(shares, 2)
        order = jnp.argsort(chosen.reshape(-1))
        counts = jnp.bincount(chosen.reshape(-1), length=experts)
        sent = flat[order // 2]
        gate = jax.nn.silu(jax.lax.ragged_dot(sent, w[f"gate_{layer}"], counts))
        inner = gate * jax.lax.ragged_dot(sent, w[f"up_{layer}"], counts)
        made = jax.lax.ragged_dot(inner, w[f"down_{layer}"], counts)
        made = made * shares.reshape(-1)[order, None].astype(bf16)
        return jnp.zeros_like(flat).at[order // 2].add(made).reshape(x.shape)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        w = _as_bf16(params)
        x = w["tokens"][tokens]
        for layer in range(2):
            x = x + _attention(x, w[f"qkv_{layer}"], w[f"out_{layer}"], 16)
            x = x + mixture(_norm(x), w, layer)
        return _next_token_loss(_norm(x) @ w["tokens"].T, tokens)

    return trained(
        lambda: _weights(sizes), loss, lambda i: (integers(i, vocabulary, rows, length),)
    )
