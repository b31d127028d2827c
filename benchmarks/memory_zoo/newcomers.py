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
