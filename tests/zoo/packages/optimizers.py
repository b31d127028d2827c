"""Optimizers of optax and optax.contrib around one residual network of dense layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from tests.zoo.program import Size, ZooStep, zoo_program

Params = dict[str, dict[str, jax.Array]]


def _make_params(num_layers: int, width: int) -> Params:
    keys = jax.random.split(jax.random.key(0), num_layers)
    return {
        f"layer_{i}": {
            "kernel": jax.random.normal(key, (width, width)) * width**-0.5,
            "bias": jnp.zeros(width),
        }
        for i, key in enumerate(keys)
    }


def _apply(params: Params, x: jax.Array) -> jax.Array:
    for layer in params.values():
        x = x + jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x


def regression(
    optimizer: optax.GradientTransformation, size: Size, loss_scale: float = 1.0
) -> ZooStep:
    """A step as optax's documentation writes it; some optimizers use the loss."""
    num_layers, width, rows = (2, 16, 16) if size.is_small else (16, 8192, 8192)
    optimizer = optax.with_extra_args_support(optimizer)

    def make_state() -> Any:
        params = _make_params(num_layers, width)
        return params, optimizer.init(params)

    def make_batch(i: int) -> tuple[Any, ...]:
        draw = jax.random.normal(jax.random.key(100 + i), (2, rows, width))
        return ({"x": draw[0], "y": draw[1]},)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def loss_fn(params: Params) -> jax.Array:
            return loss_scale * jnp.mean((_apply(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, value=loss, grad=grads, value_fn=loss_fn
        )
        return (optax.apply_updates(params, updates), opt_state), loss

    return ZooStep(step, make_state, make_batch)


def _labels(params: Params) -> Any:
    """The first half of the layers is frozen."""
    names = list(params)
    return {name: "frozen" if i < len(names) // 2 else "trained" for i, name in enumerate(names)}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-3),
    "lars": lambda: optax.lars(1e-2),
}


def _register(name: str, make: Callable[[], Any]) -> None:
    @zoo_program(f"optax-{name}", source="optax", layers=True, packages=("optax",))
    def build(size: Size) -> ZooStep:
        return regression(make(), size)


for _name, _make in OPTIMIZERS.items():
    _register(_name, _make)
