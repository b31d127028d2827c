"""Closed forms of schedules: clocks, idle clocks, and micro-batches in flight."""

from __future__ import annotations

from itertools import product

import pytest

from autopar.ir.pipeline import Phase
from autopar.ir.schedule import Schedule
from autopar.lower.schedules import in_flight, in_flight_bound, make_schedule
from autopar.stages.simulate import predicted_s
from tests.properties.clock_by_clock import chain_times

SIZES = list(product(range(1, 6), range(1, 9)))  # stages b, micro-batches m


def simulated_s(schedule: Schedule, crossing_s: float = 0, **phases_s: float) -> float:
    """Seconds of a step whose stages are equal and send to their neighbours."""
    num_stages = len(schedule.stage_mesh)
    seconds = {Phase(name): [took_s] * num_stages for name, took_s in phases_s.items()}
    return predicted_s(chain_times(seconds, [crossing_s] * (num_stages - 1)), schedule)


def idle_clocks(schedule: Schedule) -> int:
    """Clocks in which meshes wait, without those of the update."""
    return sum(
        clock.count(None)
        for clock in schedule.clocks
        if not any(task and task.phase is Phase.UPDATE for task in clock)
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b_eager"])
def test_clocks_of_training(name: str):
    for b, m in SIZES:
        schedule = make_schedule(name, b, m)
        assert len(schedule.clocks) == 2 * (m + b - 1) + 1
        assert simulated_s(schedule, forward=1, backward=1) == 2 * (m + b - 1)


def test_clocks_of_inference():
    for b, m in SIZES:
        schedule = make_schedule("inference", b, m)
        assert len(schedule.clocks) == m + b - 1 == simulated_s(schedule, forward=1)


def test_clocks_of_zero_bubble_and_its_idle_ones():
    for b, m in SIZES:
        schedule = make_schedule("zero_bubble", b, m)
        assert len(schedule.clocks) == 3 * m + 2 * (b - 1) + 1
        assert idle_clocks(schedule) == 2 * b * (b - 1)
        # 1F1B with a backward pass of two clocks, one for inputs and one for weights
        fused_s = simulated_s(make_schedule("1f1b", b, m), forward=1, backward=2)
        apart_s = simulated_s(schedule, forward=1, backward=1, weights=1)
        assert fused_s == 3 * (m + b - 1)
        assert apart_s == 3 * m + 2 * (b - 1)


def test_clocks_of_interleaved():
    for num_meshes, stages_each, m in product(range(1, 5), range(2, 5), range(1, 14)):
        schedule = make_schedule(
            "interleaved_1f1b", num_meshes * stages_each, m, num_meshes=num_meshes
        )
        least = 2 * (stages_each * m + num_meshes - 1) + stages_each  # with the updates
        if m >= num_meshes:
            assert len(schedule.clocks) == least
        else:  # a micro-batch comes round to a mesh only every num_meshes clocks
            round_trips = 2 * (num_meshes * stages_each + m - 1) + stages_each
            assert least <= len(schedule.clocks) == round_trips


def test_interleaved_waits_less_than_1f1b():
    b, m, stages_each = 4, 8, 2
    plain_s = simulated_s(make_schedule("1f1b", b, m), forward=1, backward=2)
    schedule = make_schedule("interleaved_1f1b", b * stages_each, m, num_meshes=b)
    interleaved_s = simulated_s(schedule, forward=0.5, backward=1)
    assert plain_s == 3 * (m + b - 1)
    assert interleaved_s == 3 * m + 3 * (b - 1) / stages_each


def test_micro_batches_in_flight():
    for b, m in SIZES:
        closed_forms = {
            "gpipe": [m] * b,
            "1f1b": [min(m, b - i) for i in range(b)],
            "interleaved_1f1b": [min(m, b - i) for i in range(b)],  # one stage on each mesh
            "zero_bubble": [min(m, b - i) for i in range(b)],
            "1f1b_eager": [min(m, 2 * (b - i) - 1) for i in range(b)],
            "inference": [1] * b,
        }
        for name, expected in closed_forms.items():
            assert list(in_flight(make_schedule(name, b, m))) == expected
            assert [in_flight_bound(name, b, m, i) for i in range(b)] == expected


def test_micro_batches_in_flight_interleaved():
    for num_meshes, stages_each, m in product(range(1, 5), range(2, 4), range(1, 12)):
        b = num_meshes * stages_each
        schedule = make_schedule("interleaved_1f1b", b, m, num_meshes=num_meshes)
        kept = in_flight(schedule)
        bound = [
            in_flight_bound("interleaved_1f1b", b, m, i, num_meshes=num_meshes) for i in range(b)
        ]
        assert list(kept) == bound
        if m % num_meshes == 0:
            assert max(kept) <= min(m, 2 * num_meshes)


def test_transfers_are_hidden_by_eager_schedules():
    """Three stages, forward 2, backward 2, transfers 1. If all but those of the first round trip
    were hidden, a step would take 60. But a mesh receives after the run that it is in, so that some
    of them show; in 1F1B all of them do, in every round."""
    b, m = 3, 12
    plain_s, eager_s = (
        simulated_s(make_schedule(name, b, m), crossing_s=1, forward=2, backward=2)
        for name in ("1f1b", "1f1b_eager")
    )
    assert 4 * (m + b - 1) + 2 * (b - 1) == 60
    assert (eager_s, plain_s) == (68, 81)
