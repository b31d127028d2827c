"""Gradients that are scattered along another dimension than the first of their state."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.cost.reshard import value_table
from autopar.ir.graph import NodeKind, Value
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.spec import PARTIAL
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

GRADIENT = Value((4096, 1024), "bfloat16", 2 * 4096 * 1024, deferred=True)


def costs(mesh: LogicalMesh, value: Value) -> tuple[float, float]:
    """Of a sum that is scattered along the first and along the second dimension."""
    table = value_table(mesh, value, True)
    return table.cost((PARTIAL,), (0,)), table.cost((PARTIAL,), (1,))


def h100s() -> LogicalMesh:
    return mesh_of_cluster(ClusterSpec(1, 8, "h100-sxm"), (8,))


def test_the_update_reads_two_arrays_of_the_state_again() -> None:
    first, second = costs(h100s(), GRADIENT)
    assert second - first == pytest.approx(8 * 4096 * 1024 / 8 / 3.35e12)


def test_what_counts_is_the_order_of_the_state() -> None:
    turned = costs(h100s(), replace(GRADIENT, order=(1, 0)))
    assert turned == costs(h100s(), GRADIENT)[::-1]


def test_values_that_somebody_waits_for_are_no_gradients() -> None:
    first, second = costs(h100s(), replace(GRADIENT, deferred=False))
    assert first == second


def test_without_a_device_nothing_is_added() -> None:
    first, second = costs(LogicalMesh((8,), alpha=(1.0,), beta=(1.0,)), GRADIENT)
    assert first == second


def scattered_by_columns(rows: int) -> float:
    """Two devices have the rows, and four of each the columns."""
    mesh = mesh_of_cluster(ClusterSpec(1, 8, "h100-sxm"), (2, 4))
    value = Value((rows, 1024), "float32", 2**20, deferred=True)
    return value_table(mesh, value, True).cost((0, PARTIAL), (0, 1))


def test_a_device_with_a_single_row_has_its_columns_in_order() -> None:
    assert scattered_by_columns(4) - scattered_by_columns(2) == pytest.approx(
        8 * 4 * 1024 / 8 / 3.35e12
    )


def step(state, batch):
    weights, moments = state

    def loss(weights):
        hidden = batch
        for weight in weights:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean(hidden**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    updates, moments = optax.adam(1e-3).update(gradients, moments)
    return (optax.apply_updates(weights, updates), moments), value


def arguments():
    weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2
    state = weights, jax.eval_shape(optax.adam(1e-3).init, weights)
    return state, jax.ShapeDtypeStruct((65536, 4096), jnp.float32)


def test_a_product_makes_its_gradient_transposed() -> None:
    graph = build_graph(trace_step(step, arguments(), {}, batch_argnums=(1,)))
    unfinished = {n.operands[0] for n in graph.nodes if n.kind is NodeKind.FINISH}
    orders = [graph.values[value].order for value in unfinished]
    assert orders.count((1, 0)) == 2


def test_state_is_split_along_its_first_dimension() -> None:
    """The layouts are equal otherwise."""
    cluster = ClusterSpec(1, 8, "h100-sxm")
    method = autopar.ShardParallel((8,))
    plan = autopar.plan(step, *arguments(), cluster=cluster, method=method)
    layouts = [one.layout for one in plan.inputs if len(one.shape) == 2 and one.shape[0] == 4096]
    assert len(layouts) == 6 and set(layouts) == {(0,)}
