"""Vision: classifiers, generators and two towers, at sizes that no other step here has."""

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
    dropout,
    f32,
    half,
    heads_of,
    integers,
    layer_norm,
    momentum,
    normal,
    rms_norm,
    trained,
    trained_with_key,
    trained_with_statistics,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def _encoder_sizes(name: str, width: int, depth: int) -> Sizes:
    sizes: Sizes = {}
    for n in range(depth):
        sizes |= {f"{name}_qkv_{n}": (width, 3 * width), f"{name}_o_{n}": (width, width)}
        sizes |= {f"{name}_up_{n}": (width, 4 * width), f"{name}_down_{n}": (4 * width, width)}
        sizes |= {f"{name}_up_bias_{n}": (4 * width,)}
        sizes |= {f"{name}_norm_{n}_{part}": (width,) for part in range(2)}
    return sizes


def _encoded(w: Any, name: str, x: jax.Array, heads: int, depth: int) -> jax.Array:
    for n in range(depth):
        y = layer_norm(x, w[f"{name}_norm_{n}_0"]) @ w[f"{name}_qkv_{n}"]
        q, k, v = (heads_of(z, heads) for z in jnp.split(y, 3, -1))
        x = x + attend(q, k, v) @ w[f"{name}_o_{n}"]
        y = layer_norm(x, w[f"{name}_norm_{n}_1"]) @ w[f"{name}_up_{n}"]
        x = x + jax.nn.gelu(y + w[f"{name}_up_bias_{n}"]) @ w[f"{name}_down_{n}"]
    return layer_norm(x)


def _patches(images: jax.Array, size: int) -> jax.Array:
    rows, height, wide, channels = images.shape
    x = images.reshape(rows, height // size, size, wide // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(rows, -1, size * size * channels)


def registers(
    rows: int,
    *,
    width: int = 384,
    heads: int = 6,
    size: int = 224,
    patch: int = 14,
    depth: int = 4,
) -> ZooStep:
    """ViT-S/14 with registers, scaled branches, some of which are left out for a row."""
    places = (size // patch) ** 2
    sizes: Sizes = {"embed": (patch * patch * 3, width), "places": (places, width)}
    sizes |= {"extra": (5, width), "classes": (width, 1000)}
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"up_{n}": (width, 4 * width), f"down_{n}": (4 * width, width)}
        sizes |= {f"scale_{n}_{part}": (width,) for part in range(2)}

    def loss(params: Any, key: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
        w = half(params)
        x = _patches(images.astype(bf16), patch) @ w["embed"] + w["places"]
        extra = jnp.broadcast_to(w["extra"], (rows, 5, width))
        x = jnp.concatenate([extra, x], 1)
        keys = iter(jax.random.split(key, 2 * depth))

        def kept(y: jax.Array, scale: jax.Array) -> jax.Array:
            return dropout(next(keys), jnp.ones((rows, 1, 1), bf16)) * y * (1 + scale)

        for n in range(depth):
            q, k, v = (heads_of(z, heads) for z in jnp.split(layer_norm(x) @ w[f"qkv_{n}"], 3, -1))
            x = x + kept(attend(q, k, v) @ w[f"o_{n}"], w[f"scale_{n}_0"])
            y = jax.nn.gelu(layer_norm(x) @ w[f"up_{n}"]) @ w[f"down_{n}"]
            x = x + kept(y, w[f"scale_{n}_1"])
        return cross_entropy(layer_norm(x)[:, 0] @ w["classes"], labels)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, size, size, 3), integers(i, 1000, rows)

    return trained_with_key(lambda: weights(sizes), loss, batch)


def masked_patches(
    rows: int,
    *,
    width: int = 1024,
    heads: int = 16,
    narrow: int = 512,
    size: int = 224,
    depth: int = 2,
) -> ZooStep:
    """A masked autoencoder: a quarter of the patches, drawn anew for every image, is encoded; a
    narrow decoder paints the others."""
    patch, places = 16, (size // 16) ** 2
    kept = places // 4
    sizes: Sizes = {"embed": (768, width), "places": (places, width), "mask": (narrow,)}
    sizes |= {"between": (width, narrow), "out": (narrow, 768), "decoded": (places, narrow)}
    sizes |= _encoder_sizes("wide", width, depth) | _encoder_sizes("narrow", narrow, 2)

    def loss(params: Any, key: jax.Array, images: jax.Array) -> jax.Array:
        w = half(params)
        patches = _patches(images.astype(bf16), patch)
        order = jnp.argsort(jax.random.uniform(key, (rows, places)), -1)
        back = jnp.argsort(order, -1)
        x = patches @ w["embed"] + w["places"]
        x = jnp.take_along_axis(x, order[:, :kept, None], 1)
        x = _encoded(w, "wide", x, heads, depth) @ w["between"]
        masks = jnp.broadcast_to(w["mask"], (rows, places - kept, narrow))
        x = jnp.take_along_axis(jnp.concatenate([x, masks], 1), back[..., None], 1)
        x = _encoded(w, "narrow", x + w["decoded"], heads, 2) @ w["out"]
        error = ((x.astype(f32) - layer_norm(patches).astype(f32)) ** 2).mean(-1)
        is_masked = back >= kept
        return (error * is_masked).sum() / is_masked.sum()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return (normal(i, rows, size, size, 3),)

    return trained_with_key(lambda: weights(sizes), loss, batch)


def joint_diffusion(
    rows: int,
    *,
    width: int = 1536,
    heads: int = 24,
    size: int = 64,
    words: int = 154,
    depth: int = 2,
) -> ZooStep:
    """Pictures and words attend to each other, each with weights of their own, both scaled by the
    time (SD 3); the velocity of a straight flow is learned."""
    sizes: Sizes = {"image": (64, width), "text": (1024, width), "time": (256, width)}
    sizes |= {"time_out": (width, width), "out": (width, 64), "places": (size * size // 4, width)}
    for n in range(depth):
        for side in ("image", "text"):
            sizes |= {f"{side}_mod_{n}": (width, 6 * width), f"{side}_qkv_{n}": (width, 3 * width)}
            sizes |= {f"{side}_o_{n}": (width, width), f"{side}_up_{n}": (width, 4 * width)}
            sizes |= {f"{side}_down_{n}": (4 * width, width)}
            sizes |= {f"{side}_{part}_norm_{n}": (width // heads,) for part in "qk"}

    def loss(params: Any, key: jax.Array, latents: jax.Array, words: jax.Array) -> jax.Array:
        w = half(params)
        one, two = jax.random.split(key)
        time = jax.nn.sigmoid(jax.random.normal(one, (rows, 1, 1)))
        clean = _patches(latents, 2)
        noise = jax.random.normal(two, clean.shape)
        x = {"image": ((1 - time) * clean + time * noise).astype(bf16) @ w["image"] + w["places"]}
        x["text"] = words.astype(bf16) @ w["text"]
        waves = time[:, 0] * jnp.exp(-jnp.arange(128) / 128 * 9.2) * 1000
        waves = jnp.concatenate([jnp.cos(waves), jnp.sin(waves)], -1).astype(bf16)
        state = jax.nn.silu(jax.nn.silu(waves @ w["time"]) @ w["time_out"])
        for n in range(depth):
            mods, parts = {}, {"q": [], "k": [], "v": []}
            for side in ("text", "image"):
                mods[side] = jnp.split((state @ w[f"{side}_mod_{n}"])[:, None], 6, -1)
                y = layer_norm(x[side]) * (1 + mods[side][0]) + mods[side][1]
                q, k, v = (heads_of(z, heads) for z in jnp.split(y @ w[f"{side}_qkv_{n}"], 3, -1))
                parts["q"].append(rms_norm(q, w[f"{side}_q_norm_{n}"]))
                parts["k"].append(rms_norm(k, w[f"{side}_k_norm_{n}"]))
                parts["v"].append(v)
            seen = attend(*(jnp.concatenate(parts[part], 1) for part in "qkv"))
            split = dict(zip(("text", "image"), jnp.split(seen, [words.shape[1]], 1), strict=True))
            for side in ("text", "image"):
                _, _, gate, scale, shift, last = mods[side]
                x[side] = x[side] + gate * (split[side] @ w[f"{side}_o_{n}"])
                y = layer_norm(x[side]) * (1 + scale) + shift
                y = jax.nn.gelu(y @ w[f"{side}_up_{n}"]) @ w[f"{side}_down_{n}"]
                x[side] = x[side] + last * y
        made = (layer_norm(x["image"]) @ w["out"]).astype(f32)
        return ((made - (noise - clean)) ** 2).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, size, size, 16), normal(i + 1, rows, words, 1024)

    return trained_with_key(lambda: weights(sizes), loss, batch)


def _group_norm(x: jax.Array, scale: jax.Array, groups: int = 32) -> jax.Array:
    rows, channels = x.shape[0], x.shape[-1]
    wide = x.astype(f32).reshape(rows, -1, groups, channels // groups)
    mean = wide.mean((1, 3), keepdims=True)
    wide = (wide - mean) * jax.lax.rsqrt(wide.var((1, 3), keepdims=True) + 1e-5)
    return (wide.reshape(x.shape) * (1 + scale.astype(f32))).astype(x.dtype)


def text_to_picture(
    rows: int, *, width: int = 320, size: int = 64, words: int = 77, told: int = 768
) -> ZooStep:
    """Latent diffusion: a small U-Net that looks at words at its two lower levels."""
    wide = (width, 2 * width)
    sizes: Sizes = {"first": (3, 3, 4, width), "last": (3, 3, width, 4), "time": (width, 4 * width)}
    blocks = {"down_0": (wide[0], wide[0]), "down_1": (wide[0], wide[1])}
    blocks |= {"middle": (wide[1], wide[1]), "up_1": (2 * wide[1], wide[1])}
    blocks |= {"up_0": (wide[1] + wide[0], wide[0])}
    for name, (below, above) in blocks.items():
        sizes |= {f"{name}_1": (3, 3, below, above), f"{name}_2": (3, 3, above, above)}
        sizes |= {f"{name}_skip": (1, 1, below, above), f"{name}_time": (4 * width, above)}
        sizes |= {f"{name}_norm_1": (below,), f"{name}_norm_2": (above,)}
        if name not in ("down_0", "up_0"):
            sizes |= {f"{name}_{p}": (above, above) for p in ("q", "k", "v", "o", "cq", "co")}
            sizes |= {f"{name}_ck": (told, above), f"{name}_cv": (told, above)}

    def block(w: Any, name: str, x: jax.Array, state: jax.Array, words: jax.Array) -> jax.Array:
        y = convolution(jax.nn.silu(_group_norm(x, w[f"{name}_norm_1"])), w[f"{name}_1"])
        y = y + (state @ w[f"{name}_time"])[:, None, None]
        y = convolution(jax.nn.silu(_group_norm(y, w[f"{name}_norm_2"])), w[f"{name}_2"])
        x = convolution(x, w[f"{name}_skip"]) + y
        if f"{name}_q" not in w:
            return x
        heads = max(x.shape[-1] // 64, 1)
        flat = x.reshape(rows, -1, x.shape[-1])
        y = layer_norm(flat)
        q, k, v = (heads_of(y @ w[f"{name}_{p}"], heads) for p in "qkv")
        flat = flat + attend(q, k, v) @ w[f"{name}_o"]
        q = heads_of(layer_norm(flat) @ w[f"{name}_cq"], heads)
        k, v = (heads_of(words @ w[f"{name}_{p}"], heads) for p in ("ck", "cv"))
        return (flat + attend(q, k, v) @ w[f"{name}_co"]).reshape(x.shape)

    def loss(params: Any, key: jax.Array, latents: jax.Array, words: jax.Array) -> jax.Array:
        w, words = half(params), words.astype(bf16)
        one, two = jax.random.split(key)
        share = jax.random.uniform(one, (rows, 1, 1, 1))
        noise = jax.random.normal(two, latents.shape)
        x = (jnp.sqrt(share) * latents + jnp.sqrt(1 - share) * noise).astype(bf16)
        waves = share.reshape(rows, 1) * jnp.exp(jnp.arange(width) / width * 7)
        state = jax.nn.silu(jnp.sin(waves).astype(bf16) @ w["time"])
        top = block(w, "down_0", convolution(x, w["first"]), state, words)
        low = block(w, "down_1", top[:, ::2, ::2], state, words)
        x = block(w, "middle", low, state, words)
        x = block(w, "up_1", jnp.concatenate([x, low], -1), state, words)
        x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
        x = block(w, "up_0", jnp.concatenate([x, top], -1), state, words)
        made = convolution(jax.nn.silu(x), w["last"]).astype(f32)
        return ((made - noise) ** 2).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, size, size, 4), normal(i + 1, rows, words, told)

    return trained_with_key(lambda: weights(sizes), loss, batch)


def small_images(rows: int, *, width: int = 64, size: int = 32) -> ZooStep:
    """ResNet-18 for images of 32 × 32, in float32, with batch norm and momentum."""
    sizes: Sizes = {"stem": (3, 3, 3, width), "classes": (8 * width, 100)}
    norms, below = {"stem": width}, width
    plan = [(f"{stage}_{n}", width * 2**stage, 1 + (stage > 0 and n == 0)) for stage in range(4)
            for n in range(2)]  # fmt: skip
    for name, wide, _ in plan:
        sizes |= {f"{name}_1": (3, 3, below, wide), f"{name}_2": (3, 3, wide, wide)}
        norms |= {f"{name}_1": wide, f"{name}_2": wide}
        if below != wide:
            sizes[f"{name}_skip"] = (1, 1, below, wide)
        below = wide
    sizes |= {f"{name}_scale": (count,) for name, count in norms.items()}

    def init() -> tuple[Any, Any]:
        return weights(sizes), {name: jnp.zeros((2, count)) for name, count in norms.items()}

    def loss(w: Any, stats: Any, images: jax.Array, labels: jax.Array) -> Any:
        new = {}

        def norm(x: jax.Array, name: str) -> jax.Array:
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
            new[name] = 0.9 * stats[name] + 0.1 * jnp.stack([mean, var])
            return (x - mean) * jax.lax.rsqrt(var + 1e-5) * (1 + w[f"{name}_scale"])

        x = jax.nn.relu(norm(convolution(images, w["stem"]), "stem"))
        for name, _, stride in plan:
            y = jax.nn.relu(norm(convolution(x, w[f"{name}_1"], stride), f"{name}_1"))
            y = norm(convolution(y, w[f"{name}_2"]), f"{name}_2")
            x = convolution(x, w[f"{name}_skip"], stride) if f"{name}_skip" in w else x
            x = jax.nn.relu(x + y)
        return cross_entropy(x.mean((1, 2)) @ w["classes"], labels), new

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, size, size, 3), integers(i, 100, rows)

    return trained_with_statistics(init, loss, batch, momentum())


def sigmoid_pairs(
    rows: int, *, width: int = 768, heads: int = 12, length: int = 64, depth: int = 2
) -> ZooStep:
    """SigLIP: pictures and texts, each pair right or wrong by itself."""
    size, patch, vocabulary = 16 * (width // 48), 16, 32000
    places = (size // patch) ** 2
    sizes: Sizes = {"embed": (768, width), "places": (places, width), "words": (vocabulary, width)}
    sizes |= {"text_places": (length, width), "probe": (width,), "scale": (2,)}
    sizes |= _encoder_sizes("image", width, depth) | _encoder_sizes("text", width, depth)

    def unit(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x.astype(f32) ** 2).sum(-1, keepdims=True) + 1e-6)

    def loss(params: Any, images: jax.Array, text: jax.Array) -> jax.Array:
        w = half(params)
        x = _patches(images.astype(bf16), patch) @ w["embed"] + w["places"]
        x = _encoded(w, "image", x, heads, depth)
        share = jax.nn.softmax((x @ (w["probe"] + 1)).astype(f32))
        seen = unit(jnp.einsum("bl,bld->bd", share, x.astype(f32)))
        x = _encoded(w, "text", w["words"][text] + w["text_places"], heads, depth)
        scores = 10 * jnp.exp(params["scale"][0]) * seen @ unit(x[:, -1].astype(f32)).T
        signs = 2 * jnp.eye(rows) - 1
        return jax.nn.softplus(-signs * (scores + params["scale"][1] - 10)).sum() / rows

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, size, size, 3), integers(i, vocabulary, rows, length)

    return trained(lambda: weights(sizes), loss, batch, adamw(1e-3, 1e-4))


def codes_of_pictures(rows: int, *, channels: int = 128, size: int = 128) -> ZooStep:
    """A tokenizer of pictures: residual convolutions down to vectors, the nearest of 1,024 codes
    for each, and back."""
    sizes: Sizes = {"first": (3, 3, 3, channels), "last": (3, 3, channels, 3)}
    sizes |= {"codes": (1024, 2 * channels)}
    wide = (channels, channels, 2 * channels)
    for n in range(3):
        below = wide[max(n - 1, 0)]
        sizes |= {f"in_{n}": (3, 3, below, wide[n]), f"in_more_{n}": (3, 3, wide[n], wide[n])}
        sizes |= {f"out_{n}": (3, 3, wide[n], below), f"out_more_{n}": (3, 3, wide[n], wide[n])}
        sizes |= {f"in_norm_{n}": (wide[n],), f"out_norm_{n}": (wide[n],)}

    def loss(params: Any, images: jax.Array) -> jax.Array:
        w = half(params)
        x = convolution(images.astype(bf16), w["first"])
        for n in range(3):
            x = convolution(x, w[f"in_{n}"], 2)
            y = jax.nn.silu(_group_norm(x, w[f"in_norm_{n}"], 8))
            x = x + convolution(y, w[f"in_more_{n}"])
        z = x.astype(f32)
        flat = z.reshape(-1, z.shape[-1])
        far = (params["codes"] ** 2).sum(-1) - 2 * flat @ params["codes"].T
        near = params["codes"][jnp.argmin(far, -1)].reshape(z.shape)
        held = jax.lax.stop_gradient
        extra = ((near - held(z)) ** 2).mean() + 0.25 * ((z - held(near)) ** 2).mean()
        x = (z + held(near - z)).astype(bf16)
        for n in reversed(range(3)):
            y = jax.nn.silu(_group_norm(x, w[f"out_norm_{n}"], 8))
            x = x + convolution(y, w[f"out_more_{n}"])
            x = convolution(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), w[f"out_{n}"])
        made = convolution(jax.nn.silu(x), w["last"]).astype(f32)
        return jnp.abs(made - images).mean() + extra

    def batch(i: int) -> tuple[jax.Array, ...]:
        return (normal(i, rows, size, size, 3),)

    return trained(lambda: weights(sizes), loss, batch)
