"""The rebuild of the core in docs/from_scratch.py finds what autopar finds."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.stages import LayerTable
from autopar.stages.ranges import Setting
from autopar.stages.stage_search import search_stages
from tests.docs.blocks import ROOT

PATH = ROOT / "docs" / "from_scratch.py"


@pytest.fixture(scope="module")
def scratch() -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_scratch", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["from_scratch"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["from_scratch"]


def _objective(step, state, batch, axis) -> float:
    mesh = autopar.LogicalMesh((axis.size,), ("x",), (axis.alpha,), (axis.beta,))
    return autopar.solve_sharding(step, state, batch, mesh=mesh).objective


@pytest.mark.representatives("sizes2-8", "sizes2-4")
@pytest.mark.parametrize("num_devices", [4, 8])
@pytest.mark.parametrize("sizes", [(4096, 64), (8, 512), (512, 128)])
def test_dense_layers_cost_what_autopar_says(scratch, sizes, num_devices) -> None:
    axis = scratch.Axis(num_devices)
    model = scratch.mlp(*sizes)
    cost = scratch.choose(scratch.trace(*model), axis).cost
    assert cost == pytest.approx(_objective(*model, axis), rel=1e-6)


@pytest.mark.ci
@pytest.mark.parametrize("sizes", [(8, 32, 64), (64, 32, 64)])
def test_a_transformer_block_costs_what_autopar_says(scratch, sizes) -> None:
    axis = scratch.Axis(8, alpha=20.0)
    model = scratch.transformer_block(*sizes)
    cost = scratch.choose(scratch.trace(*model), axis).cost
    assert cost == pytest.approx(_objective(*model, axis), rel=1e-6)


def test_it_runs_and_equals_one_device(scratch) -> None:
    axis = scratch.Axis(8)
    step, state, batch = scratch.transformer_block(8, 16, 64)
    program = scratch.trace(step, state, batch)
    sharding = scratch.choose(program, axis)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    there = scratch.apply(program, sharding, mesh)(state, batch)
    here = jax.jit(step)(state, batch)
    for a, b in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    layouts = [sharding.layouts[value] for value in program.inputs]
    assert any(layout >= 0 for layout in layouts)


def test_a_small_batch_is_split_by_columns_and_rows(scratch) -> None:
    program = scratch.trace(*scratch.mlp(8, 512))
    sharding = scratch.choose(program, scratch.Axis(8))
    weights = [sharding.layouts[value] for value in program.inputs[: program.num_state]]
    assert weights in ([1, 0, 1, 0], [0, 1, 0, 1])


def test_loops_are_refused(scratch) -> None:
    def step(w, batch):
        return jax.lax.scan(lambda c, x: (c * x, None), w, batch)[0], w

    with pytest.raises(NotImplementedError, match="scan"):
        scratch.trace(step, jnp.ones(()), jnp.ones((4,)))


@pytest.mark.parametrize("seed", range(6))
def test_stages_are_those_of_trying_all_and_of_autopar(scratch, seed: int) -> None:
    draw = random.Random(seed)
    num_layers, num_devices, num_micro_batches = 5, 4, draw.choice([1, 4, 16])
    weights = [draw.uniform(1, 4) for _ in range(num_layers)]
    seconds = {m: [w / m ** draw.uniform(0.5, 1.0) for w in weights] for m in (1, 2, 4)}
    best, stages = scratch.choose_stages(seconds, num_devices, num_micro_batches)

    def step_s(cuts, devices) -> float:
        ends = [0, *cuts, num_layers]
        costs = [sum(seconds[m][a:b]) for a, b, m in zip(ends[:-1], ends[1:], devices, strict=True)]
        return sum(costs) + (num_micro_batches - 1) * max(costs)

    tried = [
        step_s(cuts, devices)
        for num_stages in range(1, num_layers + 1)
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1)
        for devices in itertools.product(seconds, repeat=num_stages)
        if sum(devices) == num_devices
    ]
    assert best == pytest.approx(min(tried))
    assert sum(m for _, _, m in stages) == num_devices

    zeros = np.zeros(num_layers)
    tables = [
        LayerTable((1, m), (m,), np.array(row), zeros, zeros, zeros, zeros, zeros)
        for m, row in seconds.items()
    ]
    device = autopar.DeviceSpec("free", 1, 1, 1, 1, 1, 1, intra_host_alpha_s=0.0)
    cluster = autopar.ClusterSpec(1, num_devices, device)
    setting = Setting(cluster, np.zeros(num_layers - 1), num_micro_batches)
    choice, _ = search_stages(tables, setting)
    assert choice is not None
    assert choice.step_s == pytest.approx(best, rel=1e-6)


def test_it_is_a_few_hundred_lines() -> None:
    lines = [line for line in PATH.read_text().splitlines() if line.strip()]
    assert len(lines) <= 500
