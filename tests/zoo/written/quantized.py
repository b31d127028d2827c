"""Quantized products: int8 with scales per row and column, fp8 with scales from past maxima."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import (
    adamw,
    cross_entropy,
    dense_init,
    integers,
    normal,
    pick,
    trained,
)


def quantize(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127 + 1e-8
    return jnp.round(x / scale).astype(jnp.int8), scale


@jax.custom_vjp
def int8_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x w with both rounded to int8 and summed in int32; gradients ignore the rounding."""
    (xq, x_scale), (wq, w_scale) = quantize(x, 1), quantize(w, 0)
    product = jnp.matmul(xq, wq, preferred_element_type=jnp.int32)
    return product.astype(jnp.float32) * x_scale * w_scale


def _forward(x: jax.Array, w: jax.Array) -> Any:
    return int8_matmul(x, w), (x, w)


def _backward(saved: Any, g: jax.Array) -> Any:
    x, w = saved
    return g @ w.T, x.T @ g


int8_matmul.defvjp(_forward, _backward)


@zoo_program("int8", source="written", layers=True, rtol=2e-2, atol=5e-3)
def int8(size: Size) -> ZooStep:
    """Where rounding errors of a sum cross a rounding step to int8, results differ by that step."""
    rows, width, hidden, depth, classes = pick(
        size, (16, 12, 24, 3, 5), (16384, 4096, 16384, 8, 1000)
    )

    def init() -> Any:
        widths = [width] + [hidden] * (depth - 1) + [classes]
        keys = jax.random.split(jax.random.key(0), depth)
        return [dense_init(k, m, n) for k, m, n in zip(keys, widths, widths[1:], strict=False)]

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        for w in params[:-1]:
            x = jax.nn.gelu(int8_matmul(x, w))
        return cross_entropy(int8_matmul(x, params[-1]), labels)

    return trained(init, loss, lambda i: (normal(i, rows, width), integers(i, classes, rows)))


@zoo_program("fp8", source="written", layers=True, micro_batches=1, rtol=5e-2, atol=1e-2)
def fp8(size: Size) -> ZooStep:
    """Operands are cast to fp8 by scales of the last steps' maxima, which the state keeps: maxima
    over the whole batch, so micro-batches would see smaller ones."""
    rows, width, hidden, depth, classes = pick(
        size, (16, 12, 24, 3, 5), (16384, 4096, 16384, 8, 1000)
    )
    history, tx = pick(size, 4, 16), adamw()

    def cast_fp8(x: jax.Array, maxima: jax.Array) -> tuple[jax.Array, jax.Array]:
        limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
        scale = jnp.maximum(maxima.max(), 1e-3) / limit
        return jnp.clip(x / scale, -limit, limit).astype(jnp.float8_e4m3fn), scale

    @jax.custom_vjp
    def matmul(x: jax.Array, w: jax.Array, maxima: jax.Array) -> jax.Array:
        (xq, x_scale), (wq, w_scale) = cast_fp8(x, maxima[0]), cast_fp8(w, maxima[1])
        return jnp.matmul(xq, wq, preferred_element_type=jnp.float32) * (x_scale * w_scale)

    def forward(x: jax.Array, w: jax.Array, maxima: jax.Array) -> Any:
        return matmul(x, w, maxima), (x, w, maxima)

    def backward(saved: Any, g: jax.Array) -> Any:
        x, w, maxima = saved
        return g @ w.T, x.T @ g, jnp.zeros_like(maxima)

    matmul.defvjp(forward, backward)

    def make_state() -> Any:
        widths = [width] + [hidden] * (depth - 1) + [classes]
        keys = jax.random.split(jax.random.key(0), depth)
        params = [dense_init(k, m, n) for k, m, n in zip(keys, widths, widths[1:], strict=False)]
        return {"params": params, "opt": tx.init(params), "maxima": jnp.ones((depth, 2, history))}

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> Any:
            y, seen = x, []
            for i, w in enumerate(params):
                y = y if i == 0 else jax.nn.gelu(y)
                seen.append(jnp.stack([jnp.abs(y).max(), jnp.abs(w).max()]))
                y = matmul(y, w, state["maxima"][i])
            return cross_entropy(y, labels), jnp.stack(seen)

        (value, seen), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        maxima = jnp.roll(state["maxima"], 1, axis=-1).at[..., 0].set(seen)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "maxima": maxima}, value

    return ZooStep(step, make_state, lambda i: (normal(i, rows, width), integers(i, classes, rows)))
