"""Images and video."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adamw,
    attend,
    bf16,
    convolution,
    cross_entropy,
    f32,
    half,
    heads_of,
    integers,
    layer_norm,
    momentum,
    normal,
    trained,
    trained_with_statistics,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def efficientnet(rows: int, *, size: int = 224, width: int = 32) -> ZooStep:
    """Inverted bottlenecks of depthwise convolutions, squeezed and excited, with batch norm."""
    stages = ((16, 1, 1, 3), (24, 6, 2, 3), (40, 6, 2, 5), (80, 6, 2, 3), (112, 6, 1, 5))
    sizes: Sizes = {"stem": (3, 3, 3, width)}
    norms, wide = {"stem": width}, width
    for n, (out, times, _, window) in enumerate(stages):
        inner = wide * times
        sizes[f"expand_{n}"] = (1, 1, wide, inner)
        sizes[f"depth_{n}"] = (window, window, 1, inner)
        sizes[f"squeeze_{n}"] = (inner, max(wide // 4, 1))
        sizes[f"excite_{n}"] = (max(wide // 4, 1), inner)
        sizes[f"project_{n}"] = (1, 1, inner, out)
        norms |= {f"expand_{n}": inner, f"depth_{n}": inner, f"project_{n}": out}
        wide = out
    sizes |= {"head": (1, 1, wide, 1280), "classes": (1280, 1000)}
    norms["head"] = 1280
    sizes |= {f"{name}_scale": (channels,) for name, channels in norms.items()}
    sizes |= {f"{name}_bias": (channels,) for name, channels in norms.items()}

    def init() -> tuple[Any, Any]:
        return weights(sizes), {name: jnp.zeros((2, count)) for name, count in norms.items()}

    def loss(params: Any, stats: Any, images: jax.Array, labels: jax.Array) -> Any:
        w, new = half(params), {}

        def norm(x: jax.Array, name: str) -> jax.Array:
            wide = x.astype(f32)
            mean, square = wide.mean((0, 1, 2)), (wide**2).mean((0, 1, 2))
            var = square - mean**2
            new[name] = 0.99 * stats[name] + 0.01 * jnp.stack([mean, var])
            scale = (1 + params[f"{name}_scale"]) * jax.lax.rsqrt(var + 1e-3)
            return ((wide - mean) * scale + params[f"{name}_bias"]).astype(bf16)

        x = jax.nn.silu(norm(convolution(images.astype(bf16), w["stem"], 2), "stem"))
        for n, (out, _, stride, _) in enumerate(stages):
            y = jax.nn.silu(norm(convolution(x, w[f"expand_{n}"]), f"expand_{n}"))
            y = convolution(y, w[f"depth_{n}"], stride, groups=y.shape[-1])
            y = jax.nn.silu(norm(y, f"depth_{n}"))
            gate = jax.nn.silu(y.mean((1, 2)) @ w[f"squeeze_{n}"]) @ w[f"excite_{n}"]
            y = y * jax.nn.sigmoid(gate)[:, None, None]
            y = norm(convolution(y, w[f"project_{n}"]), f"project_{n}")
            x = x + y if stride == 1 and x.shape[-1] == out else y
        x = jax.nn.silu(norm(convolution(x, w["head"]), "head")).mean((1, 2))
        return cross_entropy(x @ w["classes"], labels), new

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, size, size, 3), integers(i, 1000, rows)

    return trained_with_statistics(init, loss, batch, momentum())


def style_generator(rows: int, *, top: int = 512, size: int = 128) -> ZooStep:
    """Convolutions whose channels a style scales, against a residual critic; both learn in one
    step, in float32."""
    levels = [4 * 2**n for n in range((size // 4).bit_length())]
    wide = {level: min(top, top * 32 // level) for level in levels}
    made: Sizes = {}
    judged: Sizes = {}
    made |= {f"map_{n}": (top, top) for n in range(4)} | {"first": (4, 4, wide[4])}
    judged |= {"from": (1, 1, 3, wide[size]), "dense": (16 * wide[4], top), "out": (top, 1)}
    for level in levels:
        below = wide[max(level // 2, 4)]
        for part, channels in ((1, below), (2, wide[level])):
            made[f"conv_{level}_{part}"] = (3, 3, channels, wide[level])
            made[f"style_{level}_{part}"] = (top, channels)
            made[f"noise_{level}_{part}"] = (wide[level],)
        made[f"rgb_{level}"] = (1, 1, wide[level], 3)
        if level > 4:
            judged[f"one_{level}"] = (3, 3, wide[level], wide[level])
            judged[f"two_{level}"] = (3, 3, wide[level], below)
            judged[f"skip_{level}"] = (1, 1, wide[level], below)

    def doubled(x: jax.Array) -> jax.Array:
        shape = (x.shape[0], 2 * x.shape[1], 2 * x.shape[2], x.shape[3])
        return jax.image.resize(x, shape, "bilinear")

    def halved(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, -1)
        return x.mean((2, 4))

    def generated(w: Any, z: jax.Array, key: jax.Array) -> jax.Array:
        style = z * jax.lax.rsqrt((z**2).mean(-1, keepdims=True) + 1e-8)
        for n in range(4):
            style = jax.nn.leaky_relu(style @ w[f"map_{n}"], 0.2)

        def layer(x: jax.Array, name: str, key: jax.Array) -> jax.Array:
            kernel, scale = w[f"conv_{name}"], 1 + style @ w[f"style_{name}"]
            power = jnp.einsum("hwio,bi->bo", kernel**2, scale**2)
            x = convolution(x * scale[:, None, None], kernel)
            x = x * jax.lax.rsqrt(power + 1e-8)[:, None, None]
            x = x + jax.random.normal(key, (*x.shape[:3], 1)) * w[f"noise_{name}"]
            return jax.nn.leaky_relu(x, 0.2)

        image: Any = 0.0
        x = jnp.broadcast_to(w["first"], (z.shape[0], *w["first"].shape))
        for level, own in zip(levels, jax.random.split(key, len(levels)), strict=True):
            one, two = jax.random.split(own)
            if level > 4:
                x, image = doubled(x), doubled(image)
            x = layer(layer(x, f"{level}_1", one), f"{level}_2", two)
            image = image + convolution(x, w[f"rgb_{level}"])
        return image

    def score(w: Any, images: jax.Array) -> jax.Array:
        x = jax.nn.leaky_relu(convolution(images, w["from"]), 0.2)
        for level in reversed(levels[1:]):
            y = jax.nn.leaky_relu(convolution(x, w[f"one_{level}"]), 0.2)
            y = jax.nn.leaky_relu(convolution(halved(y), w[f"two_{level}"]), 0.2)
            x = (y + convolution(halved(x), w[f"skip_{level}"])) * 0.5**0.5
        x = jax.nn.leaky_relu(x.reshape(x.shape[0], -1) @ w["dense"], 0.2)
        return (x @ w["out"])[:, 0]

    adam = adamw(2e-3, 0.0)

    def make_state() -> Any:
        g, d = weights(made), weights(judged)
        return {"g": (g, adam.init(g)), "d": (d, adam.init(d)), "key": jax.random.key(3)}

    def step(state: Any, images: jax.Array) -> Any:
        key, sample, noise = jax.random.split(state["key"], 3)
        z = jax.random.normal(sample, (rows, top))
        (g, g_opt), (d, d_opt) = state["g"], state["d"]

        def of_generator(g: Any) -> tuple[jax.Array, jax.Array]:
            fake = generated(g, z, noise)
            return jax.nn.softplus(-score(d, fake)).mean(), fake

        def of_critic(d: Any, fake: jax.Array) -> jax.Array:
            both = score(d, jnp.concatenate([images, fake]))
            return (jax.nn.softplus(-both[:rows]) + jax.nn.softplus(both[rows:])).mean()

        (g_loss, fake), g_grads = jax.value_and_grad(of_generator, has_aux=True)(g)
        d_loss, d_grads = jax.value_and_grad(of_critic)(d, jax.lax.stop_gradient(fake))
        new = {"g": adam.update(g_grads, g_opt, g), "d": adam.update(d_grads, d_opt, d)}
        return new | {"key": key}, (g_loss, d_loss)

    return ZooStep(step, make_state, lambda i: (normal(i, rows, size, size, 3),))


def exact_vit(rows: int, *, width: int = 512, heads: int = 8, depth: int = 4) -> ZooStep:
    """A vision transformer in float32, whose products are not rounded to 19 bits."""
    sizes: Sizes = {"patches": (768, width), "token": (1, width), "places": (197, width)}
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"up_{n}": (width, 4 * width), f"down_{n}": (4 * width, width)}
    sizes["classes"] = (width, 1000)

    def loss(w: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):
            x = images.reshape(rows, 14, 16, 14, 16, 3).transpose(0, 1, 3, 2, 4, 5)
            x = x.reshape(rows, 196, 768) @ w["patches"]
            x = jnp.concatenate([jnp.broadcast_to(w["token"], (rows, 1, width)), x], 1)
            x = x + w["places"]
            for n in range(depth):
                qkv = jnp.split(layer_norm(x) @ w[f"qkv_{n}"], 3, -1)
                x = x + attend(*(heads_of(y, heads) for y in qkv)) @ w[f"o_{n}"]
                x = x + jax.nn.gelu(layer_norm(x) @ w[f"up_{n}"]) @ w[f"down_{n}"]
            return cross_entropy(layer_norm(x[:, 0]) @ w["classes"], labels)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, 224, 224, 3), integers(i, 1000, rows)

    return trained(lambda: weights(sizes), loss, batch)


def video_attention(
    rows: int,
    *,
    width: int = 768,
    heads: int = 12,
    size: int = 224,
    frames: int = 8,
    depth: int = 3,
) -> ZooStep:
    """Attention over the frames of a place, then over the places of a frame."""
    side, patch = size // 16, 16
    sizes: Sizes = {"patches": (3 * patch**2, width), "places": (side**2, width)}
    sizes |= {"times": (frames, 1, width), "classes": (width, 400)}
    for n in range(depth):
        for kind in ("time", "space"):
            sizes |= {f"{kind}_qkv_{n}": (width, 3 * width), f"{kind}_o_{n}": (width, width)}
        sizes |= {f"up_{n}": (width, 4 * width), f"down_{n}": (4 * width, width)}

    def loss(params: Any, video: jax.Array, labels: jax.Array) -> jax.Array:
        w = half(params)

        def attention(x: jax.Array, kind: str, n: int) -> jax.Array:
            qkv = jnp.split(layer_norm(x) @ w[f"{kind}_qkv_{n}"], 3, -1)
            return x + attend(*(heads_of(y, heads) for y in qkv)) @ w[f"{kind}_o_{n}"]

        x = video.astype(bf16).reshape(rows * frames, side, patch, side, patch, 3)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(rows, frames, side**2, -1) @ w["patches"]
        x = x + w["places"] + w["times"]
        for n in range(depth):
            x = x.swapaxes(1, 2).reshape(rows * side**2, frames, width)
            x = attention(x, "time", n)
            x = x.reshape(rows, side**2, frames, width).swapaxes(1, 2)
            x = attention(x.reshape(rows * frames, side**2, width), "space", n)
            x = x + jax.nn.gelu(layer_norm(x) @ w[f"up_{n}"]) @ w[f"down_{n}"]
            x = x.reshape(rows, frames, side**2, width)
        return cross_entropy(layer_norm(x).mean((1, 2)) @ w["classes"], labels)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, frames, size, size, 3, dtype=bf16), integers(i, 400, rows)

    return trained(lambda: weights(sizes), loss, batch)


def super_resolution(rows: int, *, channels: int = 256, blocks: int = 6, size: int = 96) -> ZooStep:
    """Residual convolutions on small images, whose channels become the places between pixels."""
    sizes: Sizes = {"first": (3, 3, 3, channels), "spread": (3, 3, channels, 4 * channels)}
    for n in range(blocks):
        sizes |= {f"one_{n}": (3, 3, channels, channels), f"two_{n}": (3, 3, channels, channels)}
        sizes |= {f"one_bias_{n}": (channels,), f"two_bias_{n}": (channels,)}
    sizes |= {"join": (3, 3, channels, channels), "last": (3, 3, channels, 3)}

    def loss(w: Any, small: jax.Array, large: jax.Array) -> jax.Array:
        first = x = convolution(small, w["first"])
        for n in range(blocks):
            y = jax.nn.relu(convolution(x, w[f"one_{n}"]) + w[f"one_bias_{n}"])
            x = x + 0.1 * (convolution(y, w[f"two_{n}"]) + w[f"two_bias_{n}"])
        x = convolution(convolution(x, w["join"]) + first, w["spread"])
        x = x.reshape(rows, size, size, 2, 2, channels).transpose(0, 1, 3, 2, 4, 5)
        made = convolution(x.reshape(rows, 2 * size, 2 * size, channels), w["last"])
        return jnp.abs(made - large).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, size, size, 3), normal(i + 1, rows, 2 * size, 2 * size, 3)

    return trained(lambda: weights(sizes), loss, batch, adamw(1e-4, 0.0))
