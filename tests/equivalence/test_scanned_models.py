"""Models that scan over their layers, by every method: three steps give what `jax.jit` gives, and
each stage holds the state of its own layers alone.

    python -m pytest -m slow tests/equivalence/test_scanned_models.py    # all of them; minutes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import pytest

import autopar
from tests.equivalence.pipelines import NUM_STEPS, assert_equal, own_buffers
from tests.equivalence.scanned_models import MODELS, Scanned

METHODS: Mapping[str, Callable[[], Any]] = {
    "stages-2": lambda: autopar.PipeshardParallel(2, stages=autopar.UniformStages(2)),
    "stages-4": lambda: autopar.PipeshardParallel(4, stages=autopar.UniformStages(4)),
    "auto": autopar.AutoParallel,
    "shard": lambda: autopar.ShardParallel((2, 4)),
    "micro-batches": lambda: autopar.ShardParallel((8,), num_micro_batches=2),
    "zero3": autopar.Zero3Parallel,
}
# Two that found something; the others take minutes.
IN_CI = {("by-index", "stages-2"), ("rates-by-layer", "stages-2")}


@lru_cache(maxsize=1)  # tests of one model are neighbours
def on_one_device(name: str) -> tuple[Scanned, list[tuple[Any, Any]]]:
    model = MODELS[name]()
    jitted, state, found = jax.jit(model.step), model.state, []
    for index in range(NUM_STEPS):
        state, loss = jitted(state, model.batch_of(index))
        found.append((state, loss))
    return model, found


def cases() -> list[Any]:
    return [
        pytest.param(
            name,
            method,
            id=f"{name}-{method}",
            marks=pytest.mark.ci if (name, method) in IN_CI else pytest.mark.slow,
        )
        for name in MODELS
        for method in METHODS
    ]


@pytest.mark.parametrize(("name", "method"), cases())
def test_as_on_one_device(name: str, method: str) -> None:
    model, wanted = on_one_device(name)
    parallel = autopar.parallelize(model.step, method=METHODS[method]())
    state = own_buffers(model.state)
    for index, (_, want) in enumerate(wanted):
        state, loss = parallel(state, model.batch_of(index))
        assert_equal(loss, want, f"step {index}:", rtol=1e-3)
    assert_equal(state, wanted[-1][0], "state:", rtol=1e-3, atol=2e-4)
    plan = parallel.last_executable.plan
    if method.startswith("stages"):
        check_stacks(plan, model)
        check_rows_held(plan, state, model)
        check_live_bytes(parallel, model)


def check_stacks(plan: autopar.ParallelPlan, model: Scanned) -> None:
    """Every stack is split over all stages, or over those that run its layers, and nothing of it is
    sent for a step."""
    stacked = [
        t for t in plan.inputs if any(f"['{n}']" in t.path for n in model.stacks) and t.shape
    ]
    assert bool(stacked) == bool(model.stacks)
    assert not [t.path for t in stacked if t.split is None]
    assert not plan.warnings


def check_rows_held(plan: autopar.ParallelPlan, state: Any, model: Scanned) -> None:
    """A device holds bytes of a stack for the rows of its own stage alone."""
    by_path = {
        f"state{jax.tree_util.keystr(path)}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    split = [t for t in plan.inputs if t.split is not None and t.path in by_path]
    assert bool(split) == bool(model.stacks)
    for tensor in split:
        leaf, rows = by_path[tensor.path], [0] * len(plan.stages)
        for count, stage in zip(tensor.split or (), tensor.stages or (), strict=True):
            rows[stage] += count
        shards = [s for part in getattr(leaf, "parts", (leaf,)) for s in part.addressable_shards]
        for stage, own in zip(plan.stages, rows, strict=True):
            for device in stage.devices:
                held = sum(s.data.nbytes for s in shards if s.device == jax.devices()[device])
                assert held <= leaf.nbytes * own // sum(rows), (tensor.path, stage.devices, held)


def check_live_bytes(parallel: Any, model: Scanned) -> None:
    """What is alive in a step is what the executable said before, and no more than is planned."""
    arguments = own_buffers(model.state), model.batch_of(0)
    planned, executable = parallel._compile(arguments, {})
    _, stats = executable.run_tracked(jax.tree.leaves(arguments))
    live = executable.live_bytes()
    assert stats.peak_live_bytes == live
    for stage in planned.plan.stages:
        assert live[stage.mesh] <= stage.plan.estimated_peak_bytes  # counts temporaries too
