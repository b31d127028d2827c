"""Closed-form cases: 6 × (Dense + relu) with bias, MSE, Adam, on four devices."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import LogicalMesh
from examples.models import mlp
from tests.conformance.closed_form import all_reduce, collectives, kinds, solve, specs

NUM_LAYERS = 6


def kernels(plan):
    return list(specs(plan, ".params").items())[1::2]


def axis(shape):
    return "x" if shape[0] == 4 else "y"


@pytest.mark.representatives("shape2")
@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (4,)])
def test_large_batch_is_data_parallel(shape):
    example = mlp.example(mlp.MLPConfig(32), 256)
    solution = solve(example, 256, LogicalMesh(shape))
    assert solution.gap == 0
    assert set(specs(solution.plan, "state").values()) == {P()}
    assert set(specs(solution.plan, "batch").values()) == {P(axis(shape))}
    loss = all_reduce(4, 4)
    gradients = NUM_LAYERS * (all_reduce(32 * 32 * 4, 4) + all_reduce(32 * 4, 4))
    assert solution.objective == pytest.approx(gradients + loss)
    assert kinds(collectives(example, 256, solution.plan)) == {"all-reduce": 1}


@pytest.mark.representatives("shape0")
@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_small_batch_is_tensor_parallel(shape):
    example = mlp.example(mlp.MLPConfig(256), 32)
    solution = solve(example, 32, LogicalMesh(shape))
    assert solution.gap == 0
    column, row = P(None, axis(shape)), P(axis(shape))
    assert [spec for _, spec in kernels(solution.plan)] == [column, row] * 3
    assert solution.objective == pytest.approx(5 * all_reduce(32 * 256 * 4, 4))
    ops = collectives(example, 32, solution.plan)
    assert kinds(ops) == {"all-reduce": 5}
    assert {op.shapes for op in ops} == {((32, 256),)}


def test_data_and_tensor_together_on_two_axes():
    """α = 1, β = (1, 0.1). Data parallelism on axis 0 with Megatron on axis 1 costs the closed
    form. The solver must not pay more; it finds a cheaper plan of the same shape (data on the
    dear axis, kernels split over the cheap one), which scatters gradients over the cheap axis
    before they cross the dear one."""
    example = mlp.example(mlp.MLPConfig(32), 256)
    closed_form = NUM_LAYERS * (
        all_reduce(32 * 32 * 4 / 2, 2, 1, 1) + all_reduce(32 * 4, 2, 1, 1)
    ) + 5 * all_reduce(256 * 32 * 4 / 2, 2, 1, 0.1)
    solution = solve(example, 256, LogicalMesh((2, 2), alpha=(1, 1), beta=(1, 0.1)))
    assert solution.gap == 0
    assert solution.objective <= closed_form
    # Gradients cross axis 0 halved: no plan of this kind can do with less.
    assert solution.objective >= NUM_LAYERS * all_reduce(32 * 32 * 4 / 2, 2, 1, 1)
    for _, spec in kernels(solution.plan):
        assert "y" in spec and "x" not in spec, spec
    for spec in specs(solution.plan, "batch").values():
        assert spec[0] in ("x", ("x", "y")), spec


@pytest.mark.representatives("4")
@pytest.mark.parametrize("num_devices", [2, 4])
def test_forced_data_parallelism(num_devices):
    """`DataParallel` is data parallel even where tensor parallelism is cheaper."""
    example = mlp.example(mlp.MLPConfig(256), 32)
    state, batch = example.abstract_state(), example.abstract_batch(32)
    cluster = autopar.ClusterSpec(1, num_devices, "cpu")
    plan = autopar.plan(
        example.train_step, state, batch, cluster=cluster, method=autopar.DataParallel()
    )
    assert set(specs(plan, "state").values()) == {P()}
    assert set(specs(plan, "batch").values()) == {P("x")}
    assert kinds(collectives(example, 32, plan)) == {"all-reduce": 1}
