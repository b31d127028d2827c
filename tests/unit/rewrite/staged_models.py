"""Small steps whose layers are told apart by the shapes of their weights, without any names."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.ir.program import Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.attach_layers import LoopLayers, attach_layers, loop_batch
from autopar.rewrite.layers import find_layers
from tests.properties.staged_steps import body_of, loop_of

WIDTHS = (4, 5, 6, 7)  # of the input and of three layers
ROWS = 8


def parameters() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {"w": rng.normal(size=(a, b)).astype(np.float32), "b": np.zeros(b, np.float32)}
        for a, b in pairwise(WIDTHS)
    ]


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(ROWS, WIDTHS[0])).astype(np.float32),
        "y": rng.normal(size=(ROWS, WIDTHS[-1])).astype(np.float32),
    }


def loss_fn(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for own in params:
        x = jnp.tanh(x @ own["w"] + own["b"])
    return jnp.mean((x - batch["y"]) ** 2)


def trained_by(
    optimizer: optax.GradientTransformation, loss: Callable[..., Any] = loss_fn
) -> Callable[..., Any]:
    def step(state: Any, batch: Any) -> Any:
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), value

    return step


def looped(
    optimizer: optax.GradientTransformation,
    loss: Callable[..., Any] = loss_fn,
    params: Any = None,
    num_micro_batches: int = 2,
) -> TracedStep:
    params = parameters() if params is None else params
    args = ((params, optimizer.init(params)), batch())
    return loop_of(trained_by(optimizer, loss), args, num_micro_batches)


def in_layers(step: TracedStep, num_layers: int) -> LoopLayers:
    body = body_of(step)
    assert step.loop is not None
    batch = loop_batch(step.program.equations[step.loop])
    return attach_layers(body, find_layers(body, num_layers, batch=batch))


def makers(program: Program) -> dict[int, int]:
    """Value -> the equation that makes it."""
    return {r: i for i, equation in enumerate(program.equations) for r in equation.results}


def reads(operands: Any) -> list[int]:
    return [o for o in operands if isinstance(o, int)]
