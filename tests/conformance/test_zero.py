"""ZeRO on the MLP of 6 × (Dense + relu) with bias, batch 256, hidden 32, on four devices.

Reduce-scatter is asserted on what the plan says: XLA's CPU compiler keeps an all-reduce and takes a
slice of it, its GPU compiler makes a reduce-scatter of the two (see `benchmarks/memory.py`).
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from examples.models import mlp
from tests.conformance.closed_form import collectives, kinds, specs

EXAMPLE = mlp.example(mlp.MLPConfig(32), 256)


def plan_of(method):
    state, batch = EXAMPLE.abstract_state(), EXAMPLE.abstract_batch(256)
    cluster = autopar.ClusterSpec(1, 4, "cpu")
    return autopar.plan(EXAMPLE.train_step, state, batch, cluster=cluster, method=method)


@pytest.fixture(scope="module")
def zero2():
    return plan_of(autopar.Zero2Parallel())


@pytest.fixture(scope="module")
def zero3():
    return plan_of(autopar.Zero3Parallel())


def planned_collectives(plan) -> dict[str, int]:
    total: dict[str, int] = {}
    for module in plan.modules:
        for kind, count in module.collectives:
            name = kind.split("(")[0]
            total[name] = total.get(name, 0) + count
    return total


def test_zero2_shards_moments_and_keeps_parameters_whole(zero2):
    assert set(specs(zero2, ".params").values()) == {P()}
    moments = specs(zero2, "opt_state")
    split = {path: spec for path, spec in moments.items() if spec != P()}
    assert {path for path in moments if "mu" in path or "nu" in path} == set(split)
    assert set(specs(zero2, "batch").values()) == {P("x")}


def test_zero2_scatters_gradients_and_gathers_parameters(zero2):
    planned = planned_collectives(zero2)
    assert set(planned) == {"reduce-scatter", "all-gather"}
    assert planned["reduce-scatter"] == planned["all-gather"] == 12
    assert "all-gather" in kinds(collectives(EXAMPLE, 256, zero2))


def test_zero3_shards_every_parameter_and_all_reduces_no_gradient(zero3):
    for path, spec in specs(zero3, "state").items():
        if "kernel" in path or "bias" in path:
            assert spec != P(), path
    assert "all-reduce" not in planned_collectives(zero3)
    assert planned_collectives(zero3)["reduce-scatter"] == 12


METHODS = {
    "ZeRO-2": autopar.Zero2Parallel(),
    "ZeRO-3": autopar.Zero3Parallel(),
    "two micro-batches": autopar.Zero2Parallel(num_micro_batches=2),
}


@pytest.mark.representatives("ZeRO-2", "ZeRO-3")
@pytest.mark.parametrize("name", METHODS)
def test_results_are_those_of_one_device(name):
    method = METHODS[name]
    state, batch = EXAMPLE.create_state(), EXAMPLE.make_batch()
    expected, expected_loss = jax.jit(EXAMPLE.train_step)(state, batch)
    autopar.init(devices=jax.devices()[:4])
    try:
        step = autopar.parallelize(EXAMPLE.train_step, method=method, donate_argnums=())
        got, loss = step(state, batch)
    finally:
        autopar.shutdown()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_a_batch_that_does_not_divide_is_named():
    state, batch = EXAMPLE.abstract_state(), EXAMPLE.abstract_batch(254)
    cluster = autopar.ClusterSpec(1, 4, "cpu")
    with pytest.raises(autopar.MeshError, match=r"batch.*254.*Zero3Parallel"):
        autopar.plan(
            EXAMPLE.train_step, state, batch, cluster=cluster, method=autopar.Zero3Parallel()
        )


def solve_within(share: float, whole_bytes: float):
    state, batch = EXAMPLE.abstract_state(), EXAMPLE.abstract_batch(256)
    options = autopar.ShardingOptions(memory_budget_bytes=share * whole_bytes, remat="none")
    mesh = autopar.LogicalMesh((4,))
    return autopar.solve_sharding(EXAMPLE.train_step, state, batch, mesh=mesh, options=options)


def split_share(solution, part: str) -> float:
    """How much of the bytes under a path is split."""
    tensors = [t for t in solution.plan.inputs if part in t.path and t.shape]
    total = sum(np.prod(t.shape) for t in tensors)
    return sum(np.prod(t.shape) for t in tensors if t.layout != (-1,)) / total


@pytest.mark.slow
def test_zero_falls_out_of_the_budget():
    """Without a budget everything is whole; as it tightens, moments are split first, because that
    costs one α each, then parameters, which must be gathered where they are used. (The first
    layer's are as cheap as moments: only the forward pass reads them.)"""
    free = solve_within(1e6, 1.0 * 2**40)
    assert split_share(free, "state") == 0
    peak = free.plan.estimated_peak_bytes
    found = [solve_within(share, peak) for share in (0.92, 0.82, 0.72)]
    for share, solution in zip((0.92, 0.82, 0.72), found, strict=True):
        assert solution.plan.estimated_peak_bytes <= share * peak
        assert solution.objective >= free.objective
    moments = [split_share(s, "opt_state") for s in found]
    parameters = [split_share(s, ".params") for s in found]
    assert moments[0] > parameters[0]
    assert all(m >= p for m, p in zip(moments, parameters, strict=True))
    assert moments == sorted(moments) and parameters == sorted(parameters)
    assert parameters[-1] > 0
