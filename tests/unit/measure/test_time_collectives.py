"""Collectives timed by themselves: what runs is the collective that was asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.measure.time_collectives import CollectiveTimes
from autopar.runtime.hlo import CollectiveOp, read_collectives

PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))
CASES = [
    ("all-reduce", "f32", 4096, PAIRS, 2),
    ("all-gather", "bf16", 4096, ((0, 1, 2, 3), (4, 5, 6, 7)), 4),
    ("reduce-scatter", "f32", 1024, (tuple(range(8)),), 8),
    ("all-to-all", "f32", 4096, PAIRS, 2),
    ("collective-permute", "f32", 4096, tuple((d, (d + 1) % 8) for d in range(8)), 2),
]


@pytest.mark.parametrize(("kind", "dtype", "num_bytes", "groups", "size"), CASES)
def test_the_program_runs_that_collective(kind, dtype, num_bytes, groups, size):
    op = CollectiveOp(kind, num_bytes, size, ((1,),), groups=groups, dtype=dtype)
    program, data = CollectiveTimes(jax.devices()).program(op)
    text = program.lower(jnp.int32(2), data).compile().as_text()
    (found,) = read_collectives(text)
    assert (found.kind, found.num_bytes, found.group_size) == (kind, num_bytes, size)


def test_each_is_timed_once_and_counts_as_often_as_it_runs():
    op = CollectiveOp("all-reduce", 4096, 2, ((1,),), trips=3, groups=PAIRS, dtype="f32")
    times = CollectiveTimes(jax.devices(), limit_s=0.01)
    seconds = times.of(op)
    assert seconds >= 0 and len(times.known) == 1
    times.known = dict.fromkeys(times.known, 2.0)
    assert times.of_program((op, op)) == 12.0 and len(times.known) == 1


def test_what_moves_nothing_takes_no_time():
    times = CollectiveTimes(jax.devices())
    assert times.of(CollectiveOp("all-reduce", 4, 1, ((),))) == 0
    assert not times.known
