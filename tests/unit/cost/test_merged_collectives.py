"""The latency of collectives that XLA merges."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.cost.reshard import deferred_alpha_share
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster

MIB = 2**20


def test_members_of_a_merged_collective_share_its_latency_by_their_bytes() -> None:
    mesh = mesh_of_cluster(ClusterSpec(1, 8, "h100-sxm"), (8,))
    assert deferred_alpha_share(mesh, 15 * MIB) == pytest.approx(0.5)
    assert deferred_alpha_share(mesh, 100 * MIB) == 1.0  # too large to be merged
    assert 0 < deferred_alpha_share(mesh, 4) < 0.05
    assert deferred_alpha_share(mesh, 4) == deferred_alpha_share(mesh, 1024)


def test_nothing_is_shared_where_compute_has_no_price() -> None:
    assert deferred_alpha_share(LogicalMesh((8,)), 4) == 1.0


def test_many_small_gradients_do_not_keep_a_batch_from_being_split() -> None:
    """Their sums are one collective: 48 latencies of 15 µs would take longer than the step."""

    def step(weights: list[Any], batch: Any) -> tuple[list[Any], Any]:
        def loss(weights: list[Any]) -> Any:
            hidden = batch
            for weight in weights:
                hidden = jnp.tanh(hidden @ weight)
            return jnp.mean(hidden**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 48
    batch = jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    mesh = mesh_of_cluster(ClusterSpec(2, 8, "h100-sxm"), (16,))
    solution = autopar.solve_sharding(step, weights, batch, mesh=mesh)
    _, batch_spec = solution.input_specs
    assert batch_spec[0] == "x"
