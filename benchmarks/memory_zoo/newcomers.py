"""Models written after the memory model, in plain JAX: numbers of rows → `ZooStep`s."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.program import ZooStep
from tests.zoo.written.training import integers, normal, trained

bf16 = jnp.bfloat16


def _weights(sizes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return {
        name: 0.02 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, sizes.items(), strict=True)
    }


def _norm(x: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def perceiver(rows: int, *, width: int = 1024, num_latents: int = 512, depth: int = 4) -> ZooStep:
    """Latents that read 50,176 pixels, then each other, with the same weights every time."""
    heads, pixels = 8, (224, 224, 3)
    sizes = {
        "latents": (num_latents, width),
        "pixels": (3 + 2, 256),
        "read_q": (width, 256),
        "read_kv": (256, 2 * 256),
        "read_out": (256, width),
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "classes": (width, 1000),
    }

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(bf16)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return out.reshape(*out.shape[:2], -1)

    def split(x: jax.Array, parts: int) -> list[jax.Array]:
        x = x.reshape(*x.shape[:2], parts, heads, -1)
        return [x[:, :, n] for n in range(parts)]

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda p: p.astype(bf16), params)
        where = jnp.stack(jnp.meshgrid(*(jnp.linspace(-1, 1, n) for n in pixels[:2])), -1)
        where = jnp.broadcast_to(where, (*images.shape[:3], 2))
        x = jnp.concatenate([images, where], -1).astype(bf16)
        x = jax.nn.gelu(x.reshape(images.shape[0], -1, 5) @ w["pixels"])
        latents = jnp.broadcast_to(w["latents"], (images.shape[0], num_latents, width))
        for _ in range(depth):
            (q,) = split(_norm(latents) @ w["read_q"], 1)
            latents = latents + attend(q, *split(_norm(x) @ w["read_kv"], 2)) @ w["read_out"]
            latents = latents + attend(*split(_norm(latents) @ w["qkv"], 3)) @ w["out"]
            latents = latents + jax.nn.gelu(_norm(latents) @ w["up"]) @ w["down"]
        logits = (latents.mean(1) @ w["classes"]).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def batch(index: int) -> tuple[jax.Array, ...]:
        return normal(index, rows, *pixels), integers(index, 1000, rows)

    return trained(lambda: _weights(sizes), loss, batch)


def pixel_cnn(rows: int, *, channels: int = 256, depth: int = 8, size: int = 64) -> ZooStep:
    """Gated convolutions with masked kernels, each fed back, and 256 classes for every pixel."""
    sizes: dict[str, tuple[int, ...]] = {"first": (7, 7, 3, channels)}
    for number in range(depth):
        sizes[f"gate_{number}"] = (3, 3, channels, 2 * channels)
        sizes[f"mix_{number}"] = (1, 1, channels, channels)
    sizes["last"] = (channels, 3 * 256)

    def conv(x: jax.Array, kernel: jax.Array, strict: bool = False) -> jax.Array:
        height, width = kernel.shape[:2]
        row, column = jnp.mgrid[:height, :width]
        before = (row < height // 2) | ((row == height // 2) & (column < width // 2 + (not strict)))
        mask = before[:, :, None, None].astype(kernel.dtype)
        return jax.lax.conv_general_dilated(
            x, kernel * mask, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(params: Any, images: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda p: p.astype(bf16), params)
        x = conv((images / 127.5 - 1).astype(bf16), w["first"], strict=True)
        for number in range(depth):
            value, gate = jnp.split(conv(jax.nn.elu(x), w[f"gate_{number}"]), 2, -1)
            x = x + conv(jnp.tanh(value) * jax.nn.sigmoid(gate), w[f"mix_{number}"])
        logits = (jax.nn.elu(x) @ w["last"]).reshape(*images.shape, 256).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, images[..., None].astype(jnp.int32), -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked[..., 0])

    return trained(
        lambda: _weights(sizes), loss, lambda i: (integers(i, 256, rows, size, size, 3),)
    )


def swin(rows: int, *, width: int = 192, depth: int = 2, window: int = 8) -> ZooStep:
    """Attention inside windows that are shifted in every other layer; two resolutions."""
    size, patch, head = 256, 4, 32
    widths = (width, 2 * width)
    sizes: dict[str, tuple[int, ...]] = {"patches": (patch * patch * 3, width)}
    for stage, wide in enumerate(widths):
        for layer in range(depth):
            name = f"{stage}_{layer}"
            sizes[f"qkv_{name}"] = (wide, 3 * wide)
            sizes[f"bias_{name}"] = (wide // head, window * window, window * window)
            sizes[f"out_{name}"] = (wide, wide)
            sizes[f"up_{name}"] = (wide, 4 * wide)
            sizes[f"down_{name}"] = (4 * wide, wide)
    sizes["merge"] = (4 * width, 2 * width)
    sizes["classes"] = (2 * width, 1000)

    def tiles(x: jax.Array, side: int) -> jax.Array:
        """Squares of so many rows and columns: (tiles, positions in a tile, channels)."""
        batch, rows, columns, channels = x.shape
        x = x.reshape(batch, rows // side, side, columns // side, side, channels)
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, side * side, channels)

    def image(x: jax.Array, batch: int, positions: int, side: int) -> jax.Array:
        """The inverse of `tiles`."""
        across = positions // side
        x = x.reshape(batch, across, across, side, side, x.shape[-1])
        return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, positions, positions, -1)

    def attend(x: jax.Array, w: dict[str, jax.Array], name: str) -> jax.Array:
        qkv = (_norm(x) @ w[f"qkv_{name}"]).reshape(*x.shape[:2], 3, -1, head)
        q, k, v = (qkv[:, :, n] for n in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / head**0.5 + w[f"bias_{name}"]
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(bf16)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ w[f"out_{name}"]

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda p: p.astype(bf16), params)
        batch, positions = images.shape[0], size // patch
        x = tiles(images.astype(bf16), patch).reshape(batch, positions, positions, -1)
        x = x @ w["patches"]
        for stage in range(len(widths)):
            if stage:
                x = _norm(tiles(x, 2).reshape(batch, -1, 4 * width)) @ w["merge"]
                positions //= 2
                x = x.reshape(batch, positions, positions, -1)
            for layer in range(depth):
                shift = window // 2 if layer % 2 else 0
                shifted = jnp.roll(x, (-shift, -shift), (1, 2))
                seen = attend(tiles(shifted, window), w, f"{stage}_{layer}")
                x = x + jnp.roll(image(seen, batch, positions, window), (shift, shift), (1, 2))
                hidden = jax.nn.gelu(_norm(x) @ w[f"up_{stage}_{layer}"])
                x = x + hidden @ w[f"down_{stage}_{layer}"]
        logits = (_norm(x).mean((1, 2)) @ w["classes"]).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def batch(index: int) -> tuple[jax.Array, ...]:
        return normal(index, rows, size, size, 3), integers(index, 1000, rows)

    return trained(lambda: _weights(sizes), loss, batch)


def transducer(rows: int, *, width: int = 640, frames: int = 200, labels: int = 48) -> ZooStep:
    """Speech to text: a score of every label for every frame and prefix of the text, and the
    probability of all alignments by a recursion over frames."""
    vocabulary, features = 512, 80
    sizes: dict[str, tuple[int, ...]] = {
        "frames": (4 * features, width),
        "frame_bias": (width,),
        "mix": (width, width),
        "mix_bias": (width,),
        "embed": (vocabulary, width),
        "recur": (width, width),
        "joint": (width, vocabulary),
        "joint_bias": (vocabulary,),
    }

    def alignments(blank: jax.Array, label: jax.Array) -> jax.Array:
        """log P(text): (batch, frames, prefixes) of scores of "next frame" and "next label"."""
        before = jnp.cumsum(jnp.pad(label, ((0, 0), (0, 0), (1, 0)))[..., :-1], -1)

        def frame(alpha: jax.Array, scores: Any) -> tuple[jax.Array, None]:
            stay, written = scores
            reached = jax.lax.cumlogsumexp(alpha - written, axis=1) + written
            return reached + stay, None

        first = jnp.where(jnp.arange(blank.shape[-1]) == 0, 0.0, -1e9)
        first = jnp.broadcast_to(first, blank.shape[::2])
        scores = (blank.swapaxes(0, 1), before.swapaxes(0, 1))
        return jax.lax.scan(frame, first, scores)[0][:, -1]

    def loss(params: Any, speech: jax.Array, text: jax.Array) -> jax.Array:
        w = params
        x = jax.nn.relu(speech @ w["frames"] + w["frame_bias"])
        x = x + jax.nn.relu(_norm(x) @ w["mix"] + w["mix_bias"])
        prefix = w["embed"][jnp.pad(text, ((0, 0), (1, 0)))]
        prefix = jnp.tanh(prefix @ w["recur"])
        both = jnp.tanh(x[:, :, None] + prefix[:, None])
        logits = both @ w["joint"] + w["joint_bias"]
        log_p = jax.nn.log_softmax(logits)
        follows = jnp.pad(text, ((0, 0), (0, 1)))[:, None, :, None]
        label = jnp.take_along_axis(log_p, follows, -1)[..., 0]
        return -jnp.mean(alignments(log_p[..., 0], label))

    def batch(index: int) -> tuple[jax.Array, ...]:
        return normal(index, rows, frames, 4 * features), integers(index, vocabulary, rows, labels)

    return trained(lambda: _weights(sizes), loss, batch)


def hyena(rows: int, *, width: int = 768, length: int = 4096, depth: int = 3) -> ZooStep:
    """Bytes to bytes by convolutions as long as the text, made with Fourier transforms; a small
    network says what their kernels are."""
    waves = 64
    sizes: dict[str, tuple[int, ...]] = {"embed": (256, width), "bytes": (width, 256)}
    for layer in range(depth):
        sizes[f"in_{layer}"] = (width, 3 * width)
        sizes[f"waves_{layer}"] = (2 * waves, 64)
        sizes[f"kernel_{layer}"] = (64, width)
        sizes[f"decay_{layer}"] = (width,)
        sizes[f"out_{layer}"] = (width, width)
        sizes[f"up_{layer}"] = (width, 2 * width)
        sizes[f"down_{layer}"] = (2 * width, width)

    def kernel(w: Any, layer: int) -> jax.Array:
        """(positions, channels)"""
        where = jnp.linspace(0, 1, length)[:, None]
        phase = where * jnp.arange(1, waves + 1) * jnp.pi
        features = jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], -1)
        made = jnp.sin(features @ w[f"waves_{layer}"]) @ w[f"kernel_{layer}"]
        return made * jnp.exp(-where * jax.nn.softplus(w[f"decay_{layer}"]))

    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        spectrum = jnp.fft.rfft(x.astype(jnp.float32), 2 * length, axis=1)
        spectrum = spectrum * jnp.fft.rfft(kernel, 2 * length, axis=0)
        return jnp.fft.irfft(spectrum, 2 * length, axis=1)[:, :length].astype(x.dtype)

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda p: p.astype(bf16), params)
        x = w["embed"][text]
        for layer in range(depth):
            value, gate, other = jnp.split(_norm(x) @ w[f"in_{layer}"], 3, -1)
            mixed = gate * convolved(value * other, kernel(params, layer))
            x = x + mixed @ w[f"out_{layer}"]
            x = x + jax.nn.gelu(_norm(x) @ w[f"up_{layer}"]) @ w[f"down_{layer}"]
        logits = (_norm(x) @ w["bytes"]).astype(jnp.float32)[:, :-1]
        picked = jnp.take_along_axis(logits, text[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return trained(lambda: _weights(sizes), loss, lambda i: (integers(i, 256, rows, length),))


def linear_attention(
    rows: int, *, width: int = 1024, length: int = 2048, depth: int = 2
) -> ZooStep:
    """A language model whose attention has no softmax: a loop over chunks of the text carries the
    sum of all keys and values before."""
    heads, chunk, vocabulary = 8, 128, 16000
    sizes: dict[str, tuple[int, ...]] = {"embed": (vocabulary, width), "head": (width, vocabulary)}
    for layer in range(depth):
        sizes[f"qkv_{layer}"] = (width, 3 * width)
        sizes[f"out_{layer}"] = (width, width)
        sizes[f"gate_{layer}"] = (width, 2 * width)
        sizes[f"up_{layer}"] = (width, 2 * width)
        sizes[f"down_{layer}"] = (2 * width, width)

    def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((chunk, chunk), q.dtype))

        def part(before: jax.Array, qkv: Any) -> tuple[jax.Array, jax.Array]:
            q, k, v = qkv
            inside = jnp.einsum("bqhd,bkhd->bhqk", q, k) * mask
            seen = jnp.einsum("bhqk,bkhd->bqhd", inside, v)
            seen = seen + jnp.einsum("bqhd,bhde->bqhe", q, before.astype(q.dtype))
            added = jnp.einsum("bkhd,bkhe->bhde", k, v, preferred_element_type=jnp.float32)
            return before + added, seen

        def chunks(x: jax.Array) -> jax.Array:
            return x.reshape(rows, -1, chunk, heads, width // heads).swapaxes(0, 1)

        state = jnp.zeros((rows, heads, width // heads, width // heads))
        _, seen = jax.lax.scan(part, state, tuple(map(chunks, (q, k, v))))
        return seen.swapaxes(0, 1).reshape(rows, length, width)

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda p: p.astype(bf16), params)
        x = w["embed"][text]
        for layer in range(depth):
            q, k, v = jnp.split(_norm(x) @ w[f"qkv_{layer}"], 3, -1)
            seen = attended(jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, v)
            x = x + _norm(seen) @ w[f"out_{layer}"]
            inner = _norm(x)
            gated = jax.nn.silu(inner @ w[f"gate_{layer}"]) * (inner @ w[f"up_{layer}"])
            x = x + gated @ w[f"down_{layer}"]
        logits = (_norm(x) @ w["head"]).astype(jnp.float32)[:, :-1]
        picked = jnp.take_along_axis(logits, text[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    return trained(
        lambda: _weights(sizes), loss, lambda i: (integers(i, vocabulary, rows, length),)
    )


def conformer(rows: int, *, width: int = 512, frames: int = 1000, depth: int = 4) -> ZooStep:
    """Speech to characters: half-step feed-forwards around attention and a gated depthwise
    convolution; every frame is classified."""
    heads, kernel, features, vocabulary = 8, 31, 80, 1024
    sizes: dict[str, tuple[int, ...]] = {
        "frames": (4 * features, width),
        "places": (frames, width),
        "classes": (width, vocabulary),
    }
    for layer in range(depth):
        for half in ("first", "second"):
            sizes[f"{half}_up_{layer}"] = (width, 4 * width)
            sizes[f"{half}_down_{layer}"] = (4 * width, width)
        sizes[f"qkv_{layer}"] = (width, 3, heads, width // heads)
        sizes[f"out_{layer}"] = (heads, width // heads, width)
        sizes[f"gates_{layer}"] = (width, 2 * width)
        sizes[f"depthwise_{layer}"] = (kernel, 1, width)
        sizes[f"mix_{layer}"] = (width, width)

    def loss(params: Any, speech: jax.Array, labels: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda p: p.astype(bf16), params)

        def feed_forward(x: jax.Array, name: str, layer: int) -> jax.Array:
            inner = jax.nn.silu(_norm(x) @ w[f"{name}_up_{layer}"])
            return x + 0.5 * (inner @ w[f"{name}_down_{layer}"])

        def attention(x: jax.Array, layer: int) -> jax.Array:
            q, k, v = jnp.einsum("btd,dcnh->cbnth", _norm(x), w[f"qkv_{layer}"])
            scores = jnp.einsum("bnth,bnsh->bnts", q, k).astype(jnp.float32)
            weights = jax.nn.softmax(scores / q.shape[-1] ** 0.5).astype(bf16)
            mixed = jnp.einsum("bnts,bnsh->btnh", weights, v)
            return x + jnp.einsum("btnh,nhd->btd", mixed, w[f"out_{layer}"])

        def convolution(x: jax.Array, layer: int) -> jax.Array:
            value, gate = jnp.split(_norm(x) @ w[f"gates_{layer}"], 2, -1)
            inner = jax.lax.conv_general_dilated(
                value * jax.nn.sigmoid(gate),
                w[f"depthwise_{layer}"],
                (1,),
                "SAME",
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=width,
            )
            return x + jax.nn.silu(_norm(inner)) @ w[f"mix_{layer}"]

        x = speech.astype(bf16) @ w["frames"] + w["places"]
        for layer in range(depth):
            x = feed_forward(x, "first", layer)
            x = convolution(attention(x, layer), layer)
            x = _norm(feed_forward(x, "second", layer))
        logits = (x @ w["classes"]).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def batch(index: int) -> tuple[jax.Array, ...]:
        speech = normal(index, rows, frames, 4 * features)
        return speech, integers(index, vocabulary, rows, frames)

    return trained(lambda: _weights(sizes), loss, batch)


def diffusion_transformer(
    rows: int, *, width: int = 1024, tokens: int = 1024, depth: int = 3
) -> ZooStep:
    """Noise from noisy latents: what a small network says of the time shifts, scales and gates
    every part of a layer."""
    heads, latents = 16, 16
    sizes: dict[str, tuple[int, ...]] = {
        "patches": (latents, width),
        "places": (tokens, width),
        "time_up": (256, width),
        "time": (width, width),
        "noise": (width, latents),
    }
    for layer in range(depth):
        sizes[f"condition_{layer}"] = (width, 6 * width)
        sizes[f"qkv_{layer}"] = (width, 3 * width)
        sizes[f"out_{layer}"] = (width, width)
        sizes[f"up_{layer}"] = (width, 4 * width)
        sizes[f"down_{layer}"] = (4 * width, width)

    def loss(params: Any, images: jax.Array, noise: jax.Array, time: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda p: p.astype(bf16), params)
        level = time[:, None, None]
        noisy = jnp.sqrt(1 - level) * images + jnp.sqrt(level) * noise
        waves = time[:, None] * jnp.exp(jnp.linspace(0, 7, 128))
        waves = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1).astype(bf16)
        condition = jax.nn.silu(jax.nn.silu(waves @ w["time_up"]) @ w["time"])
        x = noisy.astype(bf16) @ w["patches"] + w["places"]
        for layer in range(depth):
            made = (condition @ w[f"condition_{layer}"])[:, None]
            shift, scale, gate, late_shift, late_scale, late_gate = jnp.split(made, 6, -1)
            inner = _norm(x) * (1 + scale) + shift
            qkv = (inner @ w[f"qkv_{layer}"]).reshape(*x.shape[:2], 3, heads, -1)
            q, k, v = (qkv[:, :, part] for part in range(3))
            x = x + gate * (
                jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w[f"out_{layer}"]
            )
            inner = _norm(x) * (1 + late_scale) + late_shift
            x = x + late_gate * (jax.nn.gelu(inner @ w[f"up_{layer}"]) @ w[f"down_{layer}"])
        said = (_norm(x) @ w["noise"]).astype(jnp.float32)
        return jnp.mean((said - noise) ** 2)

    def batch(index: int) -> tuple[jax.Array, ...]:
        shape = (rows, tokens, latents)
        return normal(index, *shape), normal(index + 1, *shape), normal(index + 2, rows) ** 2 / 9

    return trained(lambda: _weights(sizes), loss, batch)
