"""A zoo program and a method → three steps on many devices, compared with `jax.jit` on one.

States and metrics must agree after every step, up to the order of sums. So that agreement means
something, metrics must be finite and the state must change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from tests.ecosystem.steps import check_close, own
from tests.zoo.program import Size, ZooProgram, ZooStep

NUM_STEPS = 3
STAGES = "stages"


def methods_of(program: ZooProgram) -> dict[str, Any]:
    """The methods a program is checked with, by the name that tests and tables use."""
    found: dict[str, Any] = {
        "x".join(map(str, shape)): autopar.ShardParallel(shape) for shape in program.meshes
    }
    if program.layers:
        stages = autopar.UniformStages(2)
        found[STAGES] = autopar.PipeshardParallel(program.micro_batches, stages=stages)
    return found


@contextmanager
def environment_of(program: ZooProgram) -> Iterator[None]:
    with jax.enable_x64(True) if program.x64 else nullcontext():
        yield


@lru_cache(maxsize=1)  # tests of one program are neighbours
def _on_one_device(program: ZooProgram) -> tuple[ZooStep, Any, list[tuple[Any, Any]]]:
    """The step, its first state, and the state and metrics after every step."""
    zoo_step = program.build(Size.SMALL)
    first = zoo_step.make_state()
    state, results = first, []
    jitted = jax.jit(zoo_step.step)
    for i in range(NUM_STEPS):
        state, metrics = jitted(state, *zoo_step.make_batch(i))
        results.append((state, metrics))
    _check_meaning(first, results)
    return zoo_step, first, results


def check_program(program: ZooProgram, method: str) -> autopar.ParallelPlan:
    """Raises an AssertionError where results differ; returns the plan that was run."""
    with environment_of(program):
        zoo_step, first, wanted = _on_one_device(program)
        parallel = autopar.parallelize(zoo_step.step, method=methods_of(program)[method])
        state = own(first)
        for i, (want_state, want_metrics) in enumerate(wanted):
            state, metrics = parallel(state, *zoo_step.make_batch(i))
            check_close(metrics, want_metrics, rtol=program.rtol, atol=program.atol)
            check_close(state, want_state, rtol=program.rtol, atol=program.atol)
        plan = parallel.last_executable.plan
        assert plan.is_pipeline == (method == STAGES)
        return plan


def _check_meaning(first: Any, results: list[tuple[Any, Any]]) -> None:
    for _, metrics in results:
        numbers = [np.asarray(x) for x in jax.tree.leaves(metrics)]
        assert numbers, "a step returns its loss"
        assert all(np.isfinite(x).all() for x in numbers if x.dtype.kind == "f")
    last = results[-1][0]
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True)
    floats = [(a, b) for a, b in pairs if jax.dtypes.issubdtype(jnp.result_type(a), np.floating)]
    changed = [not np.array_equal(np.asarray(a), np.asarray(b)) for a, b in floats]
    assert any(changed), "three steps left every number of the state as it was"
