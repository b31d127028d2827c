"""What a step takes with other numbers of micro-batches, by the graph of one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.rewrite.step_source import StepSource
from autopar.sharding.memory_limits import memory_by_rows, memory_floor
from autopar.tracer.build import build_graph
from autopar.tracer.trace import StepOptions

DEVICES, ROWS, WIDTH = 4, 512, 64
WEIGHTS = [jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.float32)] * 6
STACK = jax.ShapeDtypeStruct((6, WIDTH, WIDTH), jnp.float32)
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, 8, WIDTH), jnp.float32)}


def _trained(loss: Callable[[Any, Any], Any], state: Any, batch: Any) -> tuple[Any, Any]:
    value, grads = jax.value_and_grad(loss)(state, batch["x"])
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def written_out(weights: Any, batch: Any) -> tuple[Any, Any]:
    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = x + jnp.tanh(x @ weight) @ weight.T
        return jnp.mean(x**2)

    return _trained(loss, weights, batch)


def checkpointed(weights: Any, batch: Any) -> tuple[Any, Any]:
    @jax.checkpoint
    def layer(x: Any, weight: Any) -> Any:
        return x + jnp.tanh(x @ weight) @ weight.T

    def loss(weights: Any, x: Any) -> Any:
        for weight in weights:
            x = layer(x, weight)
        return jnp.mean(x**2)

    return _trained(loss, weights, batch)


def scanned(stack: Any, batch: Any) -> tuple[Any, Any]:
    def loss(stack: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
        return jnp.mean(x**2)

    return _trained(loss, stack, batch)


def with_predictions(weights: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Returns an array of the whole batch, which the loop stacks."""
    state, value = written_out(weights, batch)
    return state, value, jnp.tanh(batch["x"] @ weights[0])


def _loop(step: Callable[..., Any], state: Any, number: int) -> Any:
    source = StepSource.of(step, (state, BATCH), {}, StepOptions())
    return source.with_recomputation((), number)


@pytest.mark.parametrize(
    ("step", "state", "is_exact"),
    [
        (written_out, WEIGHTS, True),
        (checkpointed, WEIGHTS, True),
        (scanned, STACK, True),
        (with_predictions, WEIGHTS, False),
    ],
)
def test_one_graph_tells_the_memory_of_every_number(step: Any, state: Any, is_exact: bool) -> None:
    known = memory_by_rows(build_graph(_loop(step, state, 8)), 8, DEVICES)
    mesh = mesh_of_cluster(ClusterSpec(1, DEVICES, "a100-sxm"), (DEVICES,))
    for number in (1, 2, 4, 8, 16, 32):
        floor = memory_floor(build_graph(_loop(step, state, number)), mesh)
        assert known.floor(number) <= floor * (1 + 1e-9)
        if is_exact and number > 1:
            assert known.floor(number) == pytest.approx(floor, rel=0.02)
