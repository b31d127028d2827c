"""What the written programs share: the usual train step, losses, and random batches.

A program gives a loss of parameters and batch; `trained` makes of it the step that everybody
writes with optax. Programs that train otherwise (two optimizers, several inner steps, parameters
beside statistics) have steps of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import Size, ZooStep
from tests.zoo.steps import momentum, train_step


def pick(size: Size, small: Any, real: Any, one_gpu: Any = None) -> Any:
    if size is Size.ONE_GPU and one_gpu is not None:
        return one_gpu
    return small if size is Size.SMALL else real


def adamw() -> optax.GradientTransformation:
    """Its eps is large, so that the rounding of gradients near zero stays small in the update."""
    return optax.adamw(1e-3, eps=1e-3)


def adamw_if_real(size: Size) -> optax.GradientTransformation:
    """For models of many parameters: momentum has a third of AdamW's operators."""
    return pick(size, momentum(), adamw())


def trained(
    init: Callable[[], Any],
    loss: Callable[..., jax.Array],
    make_batch: Callable[[int], tuple],
    optimizer: optax.GradientTransformation | None = None,
) -> ZooStep:
    """A step of `optimizer`, or AdamW, on `loss(params, *batch)`."""
    return train_step(loss, init, make_batch, optimizer or adamw())


def trained_with_key(
    init: Callable[[], Any],
    loss: Callable[..., jax.Array],
    make_batch: Callable[[int], tuple],
    optimizer: optax.GradientTransformation | None = None,
) -> ZooStep:
    """Like `trained`, with `loss(params, key, *batch)`; the key is in the state, and split by
    every step."""
    tx = optimizer or adamw()

    def make_state() -> Any:
        params = init()
        return {"params": params, "opt": tx.init(params), "key": jax.random.key(7)}

    def step(state: Any, *batch: Any) -> Any:
        key, draw = jax.random.split(state["key"])
        value, grads = jax.value_and_grad(loss)(state["params"], draw, *batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "key": key}, value

    return ZooStep(step, make_state, make_batch)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def normal(i: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Data of call i."""
    return jax.random.normal(jax.random.fold_in(jax.random.key(11), i), shape, dtype)


def integers(i: int, limit: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.fold_in(jax.random.key(13), i), shape, 0, limit)


def dense_init(key: jax.Array, fan_in: int, fan_out: int) -> jax.Array:
    return jax.random.normal(key, (fan_in, fan_out)) / fan_in**0.5


def mlp_init(key: jax.Array, *widths: int) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {"w": dense_init(k, m, n), "b": jnp.zeros(n)}
        for k, m, n in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def mlp(layers: list[dict[str, jax.Array]], x: jax.Array, activation: Any = jax.nn.gelu) -> Any:
    for layer in layers[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]
