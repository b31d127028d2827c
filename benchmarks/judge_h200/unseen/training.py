"""What these steps share: initial weights, norms, losses, optimizers, and the usual step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.program import ZooStep

f32, bf16 = jnp.float32, jnp.bfloat16
zeros_like = partial(jax.tree.map, jnp.zeros_like)


@dataclass(frozen=True)
class Optimizer:
    """init: parameters → state; update: (gradients, state, parameters) → (parameters, state)."""

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]


def adamw(rate: float = 3e-4, decay: float = 0.01, clip: float | None = None) -> Optimizer:
    def init(params: Any) -> Any:
        return {"m": zeros_like(params), "v": zeros_like(params), "count": jnp.zeros((), jnp.int32)}

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if clip is not None:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            scale = jnp.minimum(1.0, clip / (norm + 1e-6))
            grads = jax.tree.map(lambda g: g * scale, grads)
        count = state["count"] + 1
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["v"], grads)
        one, two = 1 - 0.9**count, 1 - 0.999**count

        def new(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            return p - rate * (m / one / (jnp.sqrt(v / two) + 1e-8) + decay * p)

        return jax.tree.map(new, params, m, v), {"m": m, "v": v, "count": count}

    return Optimizer(init, update)


def momentum(rate: float = 0.05, decay: float = 1e-4) -> Optimizer:
    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        state = jax.tree.map(lambda s, g, p: 0.9 * s + g + decay * p, state, grads, params)
        return jax.tree.map(lambda p, s: p - rate * s, params, state), state

    return Optimizer(zeros_like, update)


def adagrad(rate: float = 0.01) -> Optimizer:
    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        state = jax.tree.map(lambda s, g: s + g * g, state, grads)
        new = jax.tree.map(
            lambda p, g, s: p - rate * g * jax.lax.rsqrt(s + 1e-7), params, grads, state
        )
        return new, state

    return Optimizer(zeros_like, update)


def descent(rate: float = 0.1) -> Optimizer:
    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), state

    return Optimizer(lambda params: (), update)


def trained(
    init: Callable[[], Any],
    loss: Callable[..., jax.Array],
    make_batch: Callable[[int], tuple[Any, ...]],
    optimizer: Optimizer | None = None,
) -> ZooStep:
    """`loss(params, *batch)`."""
    optimizer = optimizer or adamw()

    def make_state() -> Any:
        params = init()
        return params, optimizer.init(params)

    def step(state: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state[0], *batch)
        return optimizer.update(grads, state[1], state[0]), value

    return ZooStep(step, make_state, make_batch)


def trained_with_key(
    init: Callable[[], Any],
    loss: Callable[..., jax.Array],
    make_batch: Callable[[int], tuple[Any, ...]],
    optimizer: Optimizer | None = None,
) -> ZooStep:
    """`loss(params, key, *batch)`; every step splits the key of its state."""
    optimizer = optimizer or adamw()

    def make_state() -> Any:
        params = init()
        return {"params": params, "opt": optimizer.init(params), "key": jax.random.key(7)}

    def step(state: Any, *batch: Any) -> Any:
        key, own = jax.random.split(state["key"])
        value, grads = jax.value_and_grad(loss)(state["params"], own, *batch)
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt, "key": key}, value

    return ZooStep(step, make_state, make_batch)


def trained_with_statistics(
    init: Callable[[], tuple[Any, Any]],
    loss: Callable[..., tuple[jax.Array, Any]],
    make_batch: Callable[[int], tuple[Any, ...]],
    optimizer: Optimizer | None = None,
) -> ZooStep:
    """`loss(params, statistics, *batch)` → (loss, statistics)."""
    optimizer = optimizer or momentum()

    def make_state() -> Any:
        params, statistics = init()
        return {"params": params, "stats": statistics, "opt": optimizer.init(params)}

    def step(state: Any, *batch: Any) -> Any:
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, stats), grads = grad(state["params"], state["stats"], *batch)
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "stats": stats, "opt": opt}, value

    return ZooStep(step, make_state, make_batch)


def weights(sizes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Matrices and kernels by fan-in; vectors are zero."""
    keys = jax.random.split(jax.random.key(0), len(sizes))

    def made(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.zeros(shape)
        fan_in = 1
        for size in shape[:-1]:
            fan_in *= size
        return jax.random.normal(key, shape) * fan_in**-0.5

    return {n: made(k, s) for k, (n, s) in zip(keys, sizes.items(), strict=True)}


def half(params: Any) -> Any:
    return jax.tree.map(lambda p: p.astype(bf16), params)


def layer_norm(x: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    wide = x.astype(f32)
    mean = wide.mean(-1, keepdims=True)
    wide = (wide - mean) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return (wide if scale is None else wide * (1 + scale.astype(f32))).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(f32)
    wide = wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return (wide * (1 + scale.astype(f32))).astype(x.dtype)


def heads_of(x: jax.Array, heads: int) -> jax.Array:
    """(…, length, width) → (…, length, heads, features)"""
    return x.reshape(*x.shape[:-1], heads, -1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any = None) -> jax.Array:
    """Of (batch, length, heads, features); heads are joined again."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(f32) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)
    return mixed.reshape(*mixed.shape[:2], -1)


def causal(length: int) -> jax.Array:
    return jnp.tril(jnp.ones((length, length), bool))


def rotated(x: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotary positions for (batch, length, heads, features)."""
    half_size = x.shape[-1] // 2
    waves = base ** (-jnp.arange(half_size) / half_size)
    angle = jnp.arange(x.shape[1])[:, None, None] * waves
    one, two = jnp.split(x.astype(f32), 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1).astype(x.dtype)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(f32)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def convolution(
    x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1, padding: str = "SAME"
) -> jax.Array:
    """Of (batch, *positions, channels)."""
    letters = "HW"[2 - (x.ndim - 2) :] if x.ndim < 5 else "DHW"
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride,) * (x.ndim - 2),
        padding,
        dimension_numbers=(f"N{letters}C", f"{letters}IO", f"N{letters}C"),
        feature_group_count=groups,
    )


def dropout(key: jax.Array, x: jax.Array, rate: float = 0.1) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def normal(i: int, *shape: int, dtype: Any = f32) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(jax.random.key(11), i), shape, dtype)


def integers(i: int, limit: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.fold_in(jax.random.key(13), i), shape, 0, limit)
