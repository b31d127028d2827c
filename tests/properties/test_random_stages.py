"""Random steps on micro-batches, cut into stages anywhere, equal `jax.jit` under any schedule."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings

from autopar.errors import TraceError
from tests.properties.random_programs import RandomProgram, programs
from tests.properties.staged_steps import body_of, cut_step, layers_cut_at, loop_of, run_lists
from tests.properties.test_micro_batches import RowProgram

FEW = settings(
    max_examples=10,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
MANY = settings(FEW, max_examples=150)
ARGUMENTS = (
    st.sampled_from([1, 2, 4]),
    st.lists(st.floats(0, 1), min_size=1, max_size=2),
    st.sampled_from(["gpipe", "1f1b", "zero_bubble"]),
)


def check(program: RandomProgram, num_micro_batches: int, cuts: list[float], schedule: str) -> None:
    step = RowProgram(program)
    args = step.inputs()
    want = jax.tree.leaves(jax.jit(step)(*args))
    try:
        looped = loop_of(step, args, num_micro_batches)
    except TraceError as error:
        assume("nothing in the step reads one" not in str(error))
        raise
    layers = layers_cut_at(body_of(looped), cuts)
    schedule = schedule if program.gradient else "inference"
    staged = cut_step(looped, layers, range(len(layers)), schedule)
    got = run_lists(staged, jax.tree.leaves(args))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=program.tolerance, atol=program.tolerance)


@pytest.mark.ci
@FEW
@given(programs(2, 5), *ARGUMENTS)
def test_stages_equal_the_whole_step(
    program: RandomProgram, num_micro_batches: int, cuts: list[float], schedule: str
) -> None:
    check(program, num_micro_batches, cuts, schedule)


@pytest.mark.slow
@MANY
@given(programs(2, 8), *ARGUMENTS)
def test_stages_equal_the_whole_step_many(
    program: RandomProgram, num_micro_batches: int, cuts: list[float], schedule: str
) -> None:
    check(program, num_micro_batches, cuts, schedule)
