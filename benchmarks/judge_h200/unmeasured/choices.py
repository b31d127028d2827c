"""Recommenders, tables and series of numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adagrad,
    adamw,
    attend,
    cross_entropy,
    dropout,
    f32,
    half,
    heads_of,
    integers,
    layer_norm,
    normal,
    trained,
    trained_with_key,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def factors(
    rows: int, *, fields: int = 39, ids: int = 2000000, width: int = 16, deep: int = 400
) -> ZooStep:
    """DeepFM: one table of hashed ids, products of all pairs of fields, and a deep network; in
    float32 with Adam."""
    sizes: Sizes = {"ids": (ids, width), "first": (ids, 1), "out": (deep, 1)}
    for n in range(3):
        sizes |= {f"deep_{n}": (deep if n else fields * width, deep), f"bias_{n}": (deep,)}

    def loss(w: Any, key: jax.Array, chosen: jax.Array, clicked: jax.Array) -> jax.Array:
        found = w["ids"][chosen]
        pairs = (found.sum(1) ** 2 - (found**2).sum(1)).sum(-1) / 2
        x = found.reshape(rows, -1)
        for n, own in enumerate(jax.random.split(key, 3)):
            x = dropout(own, jax.nn.relu(x @ w[f"deep_{n}"] + w[f"bias_{n}"]), 0.5)
        logit = pairs + w["first"][chosen].sum((1, 2)) + (x @ w["out"])[:, 0]
        return (jax.nn.softplus(logit) - clicked * logit).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return integers(i, ids, rows, fields), integers(i + 1, 2, rows).astype(f32)

    return trained_with_key(lambda: weights(sizes), loss, batch, adamw(1e-3, 0.0))


def interests(
    rows: int, *, items: int = 600000, length: int = 100, width: int = 64, deep: int = 80
) -> ZooStep:
    """What a user looked at, weighed by a small network that sees it beside the candidate (DIN),
    in float32."""
    sizes: Sizes = {"items": (items, width), "weigh_0": (4 * width, deep), "weigh_1": (deep, 40)}
    sizes |= {"weigh_2": (40, 1), "deep_0": (3 * width, 200), "deep_1": (200, deep)}
    sizes |= {"deep_2": (deep, 1), "bias_0": (200,), "bias_1": (deep,)}

    def loss(w: Any, seen: jax.Array, candidate: jax.Array, clicked: jax.Array) -> jax.Array:
        before, now = w["items"][seen], w["items"][candidate]
        beside = jnp.broadcast_to(now[:, None], before.shape)
        y = jnp.concatenate([before, beside, before - beside, before * beside], -1)
        y = jax.nn.sigmoid(y @ w["weigh_0"])
        y = jax.nn.sigmoid(y @ w["weigh_1"]) @ w["weigh_2"]
        weight = jnp.where(seen[..., None] > 0, y, 0)
        liked = (weight * before).sum(1)
        x = jnp.concatenate([liked, now, liked * now], -1)
        for n in range(2):
            x = jax.nn.relu(x @ w[f"deep_{n}"] + w[f"bias_{n}"])
        logit = (x @ w["deep_2"])[:, 0]
        return (jax.nn.softplus(logit) - clicked * logit).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        seen, now = integers(i, items, rows, length), integers(i + 1, items, rows)
        return seen, now, integers(i + 2, 2, rows).astype(f32)

    return trained(lambda: weights(sizes), loss, batch, adagrad(0.05))


def columns(
    rows: int, *, features: int = 100, width: int = 192, heads: int = 8, depth: int = 2
) -> ZooStep:
    """A table's columns as words of a transformer (FT-Transformer), in float32."""
    inner = width * 4 // 3
    sizes: Sizes = {"scale": (features, width), "shift": (features, width), "first": (1, width)}
    sizes |= {"out": (width, 1)}
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"up_{n}": (width, 2 * inner), f"down_{n}": (inner, width)}
        sizes |= {f"norm_{n}_{part}": (width,) for part in range(2)}

    def loss(w: Any, key: jax.Array, x: jax.Array, wanted: jax.Array) -> jax.Array:
        x = x[..., None] * w["scale"] + w["shift"]
        x = jnp.concatenate([jnp.broadcast_to(w["first"], (rows, 1, width)), x], 1)
        for n, own in enumerate(jax.random.split(key, depth)):
            y = layer_norm(x, w[f"norm_{n}_0"]) @ w[f"qkv_{n}"]
            x = x + attend(*(heads_of(z, heads) for z in jnp.split(y, 3, -1))) @ w[f"o_{n}"]
            y = layer_norm(x, w[f"norm_{n}_1"]) @ w[f"up_{n}"]
            gate, value = jnp.split(y, 2, -1)
            x = x + dropout(own, jax.nn.relu(gate) * value) @ w[f"down_{n}"]
        made = (jax.nn.relu(layer_norm(x[:, 0])) @ w["out"])[:, 0]
        return ((made - wanted) ** 2).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, features), normal(i + 1, rows)

    return trained_with_key(lambda: weights(sizes), loss, batch, adamw(1e-4, 1e-5))


def series(
    rows: int, *, length: int = 512, width: int = 256, heads: int = 16, depth: int = 2
) -> ZooStep:
    """Series of numbers in patches, each variable by itself (PatchTST), normed over the batch."""
    patch, step, ahead = 16, 8, 96
    places = (length - patch) // step + 1
    sizes: Sizes = {"embed": (patch, width), "places": (places, width)}
    sizes["out"] = (places * width, ahead)
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"up_{n}": (width, 2 * width), f"down_{n}": (2 * width, width)}

    def norm(x: jax.Array) -> jax.Array:
        wide = x.astype(f32)
        wide = (wide - wide.mean((0, 1))) * jax.lax.rsqrt(wide.var((0, 1)) + 1e-5)
        return wide.astype(x.dtype)

    def loss(params: Any, past: jax.Array, future: jax.Array) -> jax.Array:
        w = half(params)
        mean, scale = past.mean(1, keepdims=True), past.std(1, keepdims=True) + 1e-5
        x = ((past - mean) / scale)[:, jnp.arange(places)[:, None] * step + jnp.arange(patch)]
        x = x.astype(w["embed"].dtype) @ w["embed"] + w["places"]
        for n in range(depth):
            q, k, v = (heads_of(z, heads) for z in jnp.split(x @ w[f"qkv_{n}"], 3, -1))
            x = norm(x + attend(q, k, v) @ w[f"o_{n}"])
            x = norm(x + jax.nn.gelu(x @ w[f"up_{n}"]) @ w[f"down_{n}"])
        made = (x.reshape(rows, -1) @ w["out"]).astype(f32) * scale + mean
        return ((made - future) ** 2).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, length), normal(i + 1, rows, ahead)

    return trained(lambda: weights(sizes), loss, batch)


def many_labels(
    rows: int, *, length: int = 256, width: int = 512, words: int = 100000, labels: int = 131073
) -> ZooStep:
    """A bag of words against very many labels, an odd number of them."""
    sizes: Sizes = {"words": (words, width), "inner": (width, width), "labels": (width, labels)}

    def loss(params: Any, text: jax.Array, label: jax.Array) -> jax.Array:
        w = half(params)
        is_there = (text > 0)[..., None]
        x = (w["words"][text] * is_there).astype(f32).sum(1) / jnp.maximum(is_there.sum(1), 1)
        x = jax.nn.relu(layer_norm(x.astype(w["inner"].dtype)) @ w["inner"])
        return cross_entropy(x @ w["labels"], label)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return integers(i, words, rows, length), integers(i + 1, labels, rows)

    return trained(lambda: weights(sizes), loss, batch)
