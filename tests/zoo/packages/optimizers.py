"""Optimizers of optax and optax.contrib around one residual network of dense layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.steps import rows_of

Params = dict[str, dict[str, jax.Array]]
Extra = Callable[[Any, Any, Any], dict[str, Any]]  # of the loss, its gradient and its function


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


def _regression(optimizer: Any, extra: Extra, size: Size) -> ZooStep:
    """A step as optax's documentation writes it; `extra` gives what some optimizers ask for."""
    num_layers, width, rows = (2, 16, 16) if size.is_small else (8, 8192, 8192)
    optimizer = optax.with_extra_args_support(optimizer)

    def make_state() -> Any:
        params = _make_params(num_layers, width)
        return params, optimizer.init(params)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def loss_fn(params: Params) -> jax.Array:
            return jnp.mean((_apply(params, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, **extra(loss, grads, loss_fn)
        )
        return (optax.apply_updates(params, updates), opt_state), loss

    return ZooStep(step, make_state, rows_of(rows, width, width))


def _half_frozen(params: Params) -> Any:
    names = list(params)
    return {name: "frozen" if i < len(names) // 2 else "trained" for i, name in enumerate(names)}


def _frozen() -> Any:
    trained = optax.adamw(1e-2, eps=1e-3)
    return optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, _half_frozen)


def _sam() -> Any:
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2, opaque_mode=True)


def _plateau() -> Any:
    return optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(0.5, patience=1))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-3),
    "lars": lambda: optax.lars(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "novograd": lambda: optax.novograd(1e-2, eps=1e-3),
    "sm3": lambda: optax.sm3(1e-2),
    "adan": lambda: optax.adan(1e-2, eps=1e-3),
    "noisy-sgd": lambda: optax.noisy_sgd(1e-2),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "multi-steps": lambda: optax.MultiSteps(optax.adamw(1e-2, eps=1e-3), every_k_schedule=2),
    "apply-if-finite": lambda: optax.apply_if_finite(optax.adamw(1e-2, eps=1e-3), 3),
    "frozen-parts": _frozen,
    "muon": lambda: optax.contrib.muon(1e-2, eps=1e-3),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2, eps=1e-3),
    "sophia": lambda: optax.contrib.sophia(1e-3, eps=1e-3, update_interval=2),
    "sam": _sam,
    "prodigy": lambda: optax.contrib.prodigy(0.1, eps=1e-3),
    "mechanize": lambda: optax.contrib.mechanize(optax.adamw(1e-2, eps=1e-3)),
    "dog": lambda: optax.contrib.dog(0.1),
    "momo-adam": lambda: optax.contrib.momo_adam(1e-2, eps=1e-3),
    "ademamix": lambda: optax.contrib.ademamix(1e-2, eps=1e-3),
    "cocob": lambda: optax.contrib.cocob(1e-2),
    "plateau": _plateau,
}
EXTRA: dict[str, Extra] = {
    "lbfgs": lambda loss, grad, fn: {"value": loss, "grad": grad, "value_fn": fn},
    "momo-adam": lambda loss, grad, fn: {"value": loss},
    "plateau": lambda loss, grad, fn: {"value": loss},
    "sam": lambda loss, grad, fn: {"grad_fn": lambda params, _: jax.grad(fn)(params)},
    "sophia": lambda loss, grad, fn: {"obj_fn": fn},
}
OPTIONS: dict[str, dict[str, Any]] = {
    # Its line search evaluates the loss of the whole batch several times.
    "lbfgs": {"micro_batches": 1},
    # Newton–Schulz iterations magnify what sums in another order leave.
    "muon": {"rtol": 1e-2, "atol": 1e-3},
    # The second gradient is taken where the whole batch's first one leads.
    "sam": {"micro_batches": 1},
    # Its estimate of the Hessian is one of the whole batch.
    "sophia": {"micro_batches": 1},
}


def _register(name: str, make: Callable[[], Any]) -> None:
    options = OPTIONS.get(name, {})

    @zoo_program(f"optax-{name}", source="optax", layers=True, packages=("optax",), **options)
    def build(size: Size) -> ZooStep:
        return _regression(make(), EXTRA.get(name, lambda *_: {}), size)


for _name, _make in OPTIMIZERS.items():
    _register(_name, _make)
