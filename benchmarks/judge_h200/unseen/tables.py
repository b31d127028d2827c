"""Recommenders, retrieval, words and tables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adagrad,
    adamw,
    attend,
    causal,
    cross_entropy,
    descent,
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


def cross_network(rows: int, *, ids: int = 100000, width: int = 32, deep: int = 1024) -> ZooStep:
    """26 tables of ids, products of features with features (DCN v2) and a deep network, with
    Adagrad, in float32."""
    tables, numbers = 26, 13
    whole = tables * width + numbers
    sizes: Sizes = {"tables": (tables, ids, width), "out": (whole + deep, 1)}
    for n in range(3):
        sizes |= {f"cross_{n}": (whole, whole), f"cross_bias_{n}": (whole,)}
        sizes |= {f"deep_{n}": (deep if n else whole, deep), f"deep_bias_{n}": (deep,)}

    def loss(w: Any, dense: jax.Array, chosen: jax.Array, clicked: jax.Array) -> jax.Array:
        found = jax.vmap(lambda table, i: table[i], (0, 1), 1)(w["tables"], chosen)
        first = jnp.concatenate([found.reshape(rows, -1), jnp.log1p(jnp.abs(dense))], -1)
        crossed = x = first
        for n in range(3):
            crossed = first * (crossed @ w[f"cross_{n}"] + w[f"cross_bias_{n}"]) + crossed
            x = jax.nn.relu(x @ w[f"deep_{n}"] + w[f"deep_bias_{n}"])
        logit = (jnp.concatenate([crossed, x], -1) @ w["out"])[:, 0]
        return (jax.nn.softplus(logit) - clicked * logit).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        clicked = integers(i + 1, 2, rows).astype(f32)
        return normal(i, rows, numbers), integers(i, ids, rows, tables), clicked

    return trained(lambda: weights(sizes), loss, batch, adagrad())


def dual_encoder(
    rows: int,
    *,
    width: int = 384,
    heads: int = 12,
    length: int = 64,
    vocabulary: int = 30522,
    depth: int = 3,
) -> ZooStep:
    """Questions and passages of one encoder; all passages of the batch but one are wrong."""
    sizes: Sizes = {"embed": (vocabulary, width), "places": (length, width)}
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"qkv_bias_{n}": (3 * width,), f"up_bias_{n}": (4 * width,)}
        sizes |= {f"up_{n}": (width, 4 * width), f"down_{n}": (4 * width, width)}

    def encoded(w: Any, text: jax.Array) -> jax.Array:
        is_there = text != 0
        x = layer_norm(w["embed"][text] + w["places"])
        for n in range(depth):
            qkv = jnp.split(x @ w[f"qkv_{n}"] + w[f"qkv_bias_{n}"], 3, -1)
            seen = attend(*(heads_of(y, heads) for y in qkv), is_there[:, None, None])
            x = layer_norm(x + seen @ w[f"o_{n}"])
            y = jax.nn.gelu(x @ w[f"up_{n}"] + w[f"up_bias_{n}"], approximate=False)
            x = layer_norm(x + y @ w[f"down_{n}"])
        total = (x * is_there[..., None]).astype(f32).sum(1)
        mean = total / jnp.maximum(is_there.sum(1, keepdims=True), 1)
        return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)

    def loss(params: Any, questions: jax.Array, passages: jax.Array) -> jax.Array:
        w = half(params)
        scores = encoded(w, questions) @ encoded(w, passages).T / 0.05
        return cross_entropy(scores, jnp.arange(rows))

    def batch(i: int) -> tuple[jax.Array, ...]:
        return (
            integers(i, vocabulary, rows, length),
            integers(i + 1, vocabulary, rows, length),
        )

    return trained(lambda: weights(sizes), loss, batch)


def sequential_recommender(
    rows: int,
    *,
    items: int = 57000,
    length: int = 200,
    width: int = 128,
    depth: int = 2,
    negatives: int = 64,
) -> ZooStep:
    """What a user takes next, by attention over what was taken before (SASRec), against sampled
    items; float32, with dropout."""
    sizes: Sizes = {"items": (items, width), "places": (length, width)}
    for n in range(depth):
        sizes |= {f"{part}_{n}": (width, width) for part in ("q", "k", "v", "up", "down")}
        sizes |= {f"norm_{n}_{part}": (width,) for part in range(2)}

    def loss(w: Any, key: jax.Array, taken: jax.Array, following: jax.Array) -> jax.Array:
        sampling, key = jax.random.split(key)
        is_there = (taken > 0)[..., None]
        x = dropout(key, w["items"][taken] * width**0.5 + w["places"], 0.2) * is_there
        for n in range(depth):
            key, one, two = jax.random.split(key, 3)
            y = layer_norm(x, w[f"norm_{n}_0"])
            q, k, v = y @ w[f"q_{n}"], x @ w[f"k_{n}"], x @ w[f"v_{n}"]
            x = y + attend(*(heads_of(z, 2) for z in (q, k, v)), causal(length))
            y = layer_norm(x, w[f"norm_{n}_1"])
            inner = dropout(one, jax.nn.relu(y @ w[f"up_{n}"]), 0.2) @ w[f"down_{n}"]
            x = (y + dropout(two, inner, 0.2)) * is_there
        x = layer_norm(x)
        others = jax.random.randint(sampling, (rows, negatives), 1, items)
        near = (x * w["items"][following]).sum(-1)
        far = jnp.einsum("bld,bnd->bln", x, w["items"][others])
        each = jax.nn.softplus(-near) + jax.nn.softplus(far).mean(-1)
        return (each * is_there[..., 0]).sum() / jnp.maximum(is_there.sum(), 1)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return integers(i, items, rows, length), integers(i + 1, items, rows, length)

    return trained_with_key(lambda: weights(sizes), loss, batch, adamw(1e-3, 0.0))


def skip_gram(rows: int, *, words: int = 400000, width: int = 300, negatives: int = 8) -> ZooStep:
    """Words beside words, against words drawn at random, by plain descent."""
    sizes: Sizes = {"words": (words, width), "contexts": (words, width)}

    def loss(w: Any, key: jax.Array, centre: jax.Array, context: jax.Array) -> jax.Array:
        others = jax.random.randint(key, (rows, negatives), 0, words)
        x = w["words"][centre]
        near = (x * w["contexts"][context]).sum(-1)
        far = jnp.einsum("bd,bnd->bn", x, w["contexts"][others])
        return (jax.nn.softplus(-near) + jax.nn.softplus(far).sum(-1)).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return integers(i, words, rows), integers(i + 1, words, rows)

    return trained_with_key(lambda: weights(sizes), loss, batch, descent())


def tabular(
    rows: int, *, features: int = 203, width: int = 512, depth: int = 6, classes: int = 7
) -> ZooStep:
    """Residual dense layers with norms over the batch and dropout, on many rows of numbers, in
    float32."""
    sizes: Sizes = {"first": (features, width), "last": (width, classes), "bias": (classes,)}
    for n in range(depth):
        sizes |= {f"up_{n}": (width, width), f"down_{n}": (width, width), f"scale_{n}": (width,)}

    def loss(w: Any, key: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
        x = x @ w["first"]
        for n, own in enumerate(jax.random.split(key, depth)):
            y = (x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1e-5) * (1 + w[f"scale_{n}"])
            y = dropout(own, jax.nn.relu(y @ w[f"up_{n}"]))
            x = x + y @ w[f"down_{n}"]
        return cross_entropy(jax.nn.relu(x) @ w["last"] + w["bias"], labels)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, features), integers(i, classes, rows)

    return trained_with_key(lambda: weights(sizes), loss, batch)
