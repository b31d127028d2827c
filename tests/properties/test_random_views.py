"""Random steps on several views of the batch are exact on micro-batches, noted, or refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from autopar.errors import TraceError
from autopar.rewrite.step_source import StepSource
from autopar.tracer.trace import StepOptions
from tests.properties.random_views import RandomViews
from tests.unit.tracer.test_flatten import evaluate


def is_exact(step: RandomViews, num_micro_batches: int) -> bool:
    """False where it is noted or refused; an AssertionError if it is wrong without a word."""
    args = step.inputs()
    source = StepSource.of(step, args, {}, StepOptions())
    try:
        loop = source.with_recomputation((), num_micro_batches)
    except TraceError:
        return False
    if loop.notes:
        return False
    run = jax.jit(lambda *leaves: evaluate(loop.program, *leaves))
    got = loop.rebuild_output(run(*jax.tree.leaves(args)))
    for ours, theirs in zip(
        jax.tree.leaves(got), jax.tree.leaves(jax.jit(step)(*args)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    return True


def check(seeds: range) -> int:
    exact = 0
    for seed in seeds:
        try:
            exact += is_exact(RandomViews(seed, 2 + seed % 5), 2 + 2 * (seed % 2))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return exact


@pytest.mark.ci
def test_views_meet_as_in_the_whole_batch() -> None:
    assert check(range(16)) >= 4


@pytest.mark.slow
def test_views_meet_as_in_the_whole_batch_many() -> None:
    assert check(range(16, 400)) >= 100
