"""Random programs, sharded, equal `jax.jit`."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import autopar
from tests.properties.random_programs import MESHES, RandomProgram, programs
from tests.properties.random_strategies import run_by_any_strategies

FEW = settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MANY = settings(FEW, max_examples=500)


@st.composite
def meshes(draw: Any) -> autopar.LogicalMesh:
    """A mesh that prices only communication, so that products must be split; α and β make the
    solver favour one axis or the other, many small collectives or few large ones."""
    shape = draw(st.sampled_from(MESHES))
    powers = st.integers(-6, 0)
    alpha = tuple(10.0 ** draw(powers) for _ in shape)
    beta = tuple(10.0 ** (draw(powers) - 3) for _ in shape)
    return autopar.LogicalMesh(shape, alpha=alpha, beta=beta)


def assert_equal(got: Any, want: Any, tolerance: float) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        if not jax.numpy.issubdtype(theirs.dtype, jax.numpy.inexact):
            np.testing.assert_array_equal(ours, theirs)
        else:
            ours, theirs = np.float32(ours), np.float32(theirs)
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def check_planned(program: RandomProgram, mesh: autopar.LogicalMesh) -> None:
    floats, ints = program.inputs()
    want = jax.jit(program)(floats, ints)
    step = autopar.parallelize(program, method=autopar.ShardParallel(mesh))
    try:
        got = step(floats, ints)
    except autopar.MeshError:  # a mesh axis that divides nothing of so small a program
        return
    assert_equal(got, want, program.tolerance)
    assert step.last_executable is not None
    assert_details_add_up(step.last_executable.plan)


def assert_details_add_up(plan: autopar.ParallelPlan) -> None:
    """For any program, the costs of operators and collectives sum to the totals."""
    details = plan.details
    assert details is not None and details.memory is not None
    communication_s = pytest.approx(sum(m.communication_s for m in plan.modules), rel=1e-3)
    assert sum(details.ops.communication_s) == communication_s
    assert sum(one.seconds for one in details.collectives) == communication_s
    assert sum(details.memory.at_peak) == pytest.approx(plan.estimated_peak_bytes, rel=1e-3)
    assert max(map(len, plan.explain(detail="full").split("\n"))) <= 100


def check_any_strategies(program: RandomProgram, mesh_shape: tuple[int, ...], seed: int) -> None:
    """Whatever strategy each node takes, good or bad, the result is the same."""
    want = jax.jit(program)(*program.inputs())
    assert_equal(run_by_any_strategies(program, mesh_shape, seed), want, program.tolerance)


@FEW
@given(programs(3, 8), meshes())
def test_planned_programs_equal_jit(program: RandomProgram, mesh: autopar.LogicalMesh) -> None:
    check_planned(program, mesh)


@pytest.mark.ci
@FEW
@given(programs(3, 8), st.sampled_from(MESHES), st.integers(0, 2**16))
def test_any_strategies_equal_jit(
    program: RandomProgram, mesh_shape: tuple[int, ...], seed: int
) -> None:
    check_any_strategies(program, mesh_shape, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@MANY
@given(programs(6, 14), meshes())
def test_500_planned_programs_equal_jit(program: RandomProgram, mesh: autopar.LogicalMesh) -> None:
    check_planned(program, mesh)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@MANY
@given(programs(6, 14), st.sampled_from(MESHES), st.integers(0, 2**16))
def test_500_any_strategies_equal_jit(
    program: RandomProgram, mesh_shape: tuple[int, ...], seed: int
) -> None:
    check_any_strategies(program, mesh_shape, seed)
