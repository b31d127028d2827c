"""Steps that nobody tuned the planner for, against `jax.jit` over three calls: on a mesh, with
micro-batches, with shards of everything, in a pipeline."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import pytest

import autopar
from tests.ecosystem.steps import check_close, own
from tests.equivalence.unusual_steps import STEPS

METHODS: dict[str, Any] = {
    "mesh": autopar.ShardParallel((2, 4)),
    "micro-batches": autopar.ShardParallel((8,), num_micro_batches=2),
    "zero-3": autopar.Zero3Parallel(),
    "stages": autopar.PipeshardParallel(2, stages=autopar.UniformStages(2)),
}
CI = {
    ("memory-bank", "micro-batches"),
    ("memory-bank", "stages"),
    ("balanced-experts", "micro-batches"),
    ("globe", "zero-3"),
    ("siamese", "micro-batches"),
    ("clipped-policy", "micro-batches"),
    ("mixed-images", "micro-batches"),
    ("mixed-images", "stages"),
}
EXACT = ("clipped-policy", "mixed-images")  # without a warning that rows are mixed


@lru_cache(maxsize=1)  # cases of one step are neighbours
def on_one_device(name: str) -> tuple[Any, list[Any]]:
    unusual = STEPS[name]()
    state, results = unusual.state, []
    jitted = jax.jit(unusual.step)
    for i in range(3):
        state, metrics = jitted(state, unusual.batch_of(i))
        results.append((state, metrics))
    return unusual, results


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(
            name, method, marks=pytest.mark.ci if (name, method) in CI else pytest.mark.slow
        )
        for name in STEPS
        for method in METHODS
    ],
)
def test_as_on_one_device(name: str, method: str) -> None:
    unusual, results = on_one_device(name)
    parallel = autopar.parallelize(unusual.step, method=METHODS[method])
    state = own(unusual.state)
    for i, wanted in enumerate(results):
        state, metrics = parallel(state, unusual.batch_of(i))
        check_close((state, metrics), wanted, rtol=1e-3, atol=1e-4)
    if name in EXACT:
        assert parallel.last_executable.plan.warnings == ()
