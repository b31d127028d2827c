"""Random programs of rows, run on micro-batches, equal `jax.jit` on the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import autopar
from tests.properties.random_programs import RandomProgram, programs

BATCH_SIZE = 16
FEW = settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MANY = settings(FEW, max_examples=200)


@dataclass(frozen=True)
class RowProgram:
    """A random program applied to every row: its first array is the row, the others are
    parameters; the loss is a mean over rows plus a decay of the parameters."""

    program: RandomProgram

    def inputs(self) -> tuple[Any, Any]:
        (first, *params), ints = self.program.inputs()
        rng = np.random.default_rng(1)
        x = rng.normal(size=(BATCH_SIZE, *first.shape)).astype(np.float32)
        return params, {"x": x, "ids": np.stack([ints[0] + i for i in range(BATCH_SIZE)])}

    def __call__(self, params: Any, batch: Any) -> Any:
        def of_row(params: Any, row: Any) -> Any:
            values = self.program.values([row["x"], *params], [row["ids"]])
            floats = [v for v in values if v.dtype == jnp.float32] or [row["x"]]
            return sum(jnp.mean(jnp.sin(v)) for v in floats[-3:])

        def loss(params: Any) -> Any:
            each = jax.vmap(of_row, in_axes=(None, 0))(params, batch)
            decay = sum(jnp.sum(p**2) for p in params)
            return jnp.mean(each) + 0.1 * decay, each

        if not self.program.gradient:
            return loss(params)
        (value, each), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return [p - g for p, g in zip(params, grads, strict=True)], value, each


def check(program: RandomProgram, mesh_shape: tuple[int, ...], num_micro_batches: int) -> None:
    step = RowProgram(program)
    args = step.inputs()
    want = jax.jit(step)(*args)
    mesh = autopar.LogicalMesh(mesh_shape)
    method = autopar.ShardParallel(mesh, num_micro_batches=num_micro_batches)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    got = parallel(*args)
    warnings = parallel.last_executable.plan.warnings
    assert all("ends by the data" in warning for warning in warnings)  # of while loops' trips
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=program.tolerance, atol=program.tolerance)


ARGUMENTS = (
    programs(2, 8),
    st.sampled_from([(4,), (2, 2), (1,)]),
    st.sampled_from([2, 4]),
)


@pytest.mark.ci
@FEW
@given(*ARGUMENTS)
def test_micro_batches_equal_the_whole_batch(
    program: RandomProgram, mesh_shape: tuple[int, ...], num_micro_batches: int
) -> None:
    check(program, mesh_shape, num_micro_batches)


@pytest.mark.slow
@MANY
@given(*ARGUMENTS)
def test_micro_batches_equal_the_whole_batch_many(
    program: RandomProgram, mesh_shape: tuple[int, ...], num_micro_batches: int
) -> None:
    check(program, mesh_shape, num_micro_batches)
