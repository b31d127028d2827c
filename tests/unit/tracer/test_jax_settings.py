"""Steps called under settings of JAX: other precision, a mesh of `jax.set_mesh`, no compilation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

import autopar

STAGES = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))


def step(params: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> Any:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def state() -> list[jax.Array]:
    return [jax.random.normal(jax.random.key(i), (8, 8)) for i in range(2)]


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(7), (16, 8))


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("d",), axis_types=(kind,))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("method", ["data", STAGES], ids=["data", "stages"])
def test_a_step_inside_set_mesh(kind: AxisType, method: Any) -> None:
    """JAX makes meshes with explicit axes unless told otherwise."""
    _, wanted = jax.jit(step)(state(), batch())
    parallel = autopar.parallelize(step, method=method)
    with jax.set_mesh(mesh_of(kind)):
        sharded = jax.device_put(batch(), PartitionSpec("d"))
        params, loss = parallel(state(), sharded)
        assert jax.sharding.get_abstract_mesh().axis_names == ("d",), "is set again"
        parallel(params, sharded)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)


def test_the_step_finds_its_mesh_in_set_mesh() -> None:
    def constrained(params: Any, batch: Any) -> Any:
        batch = jax.lax.with_sharding_constraint(batch, PartitionSpec("d"))
        double = jax.shard_map(
            lambda x: 2 * x, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")
        )
        return step(params, double(batch))

    _, wanted = jax.jit(step)(state(), 2 * batch())
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        plan = autopar.parallelize(constrained, method="data").plan(state(), batch())
        _, loss = autopar.parallelize(constrained, method="data")(state(), batch())
    assert plan.num_devices == 8
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)


def test_a_setting_that_traces_read_makes_another_program() -> None:
    parallel = autopar.parallelize(step, method="data")
    params, _ = parallel(state(), batch())
    usual = parallel.last_planned
    with jax.default_matmul_precision("highest"):
        params, _ = parallel(params, batch())
    exact = parallel.last_planned
    parallel(params, batch())
    assert parallel.last_planned is usual
    assert exact is not usual
    assert exact is not None
    precisions = [
        equation.params["precision"]
        for equation in exact.traced.program.equations
        if equation.name == "dot_general"
    ]
    assert precisions
    assert all(str(p) != "None" for p in precisions)


def test_without_jit_a_step_runs_line_by_line() -> None:
    losses = []

    def printing(params: Any, batch: Any) -> Any:
        params, loss = step(params, batch)
        losses.append(float(loss))  # no tracer
        return params, loss

    with jax.disable_jit():
        autopar.parallelize(printing)(state(), batch())
    _, wanted = jax.jit(step)(state(), batch())
    assert losses == [pytest.approx(float(wanted), rel=1e-5)]
