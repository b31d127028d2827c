"""Closed forms of schedules: clocks, idle clocks, and micro-batches in flight."""

from __future__ import annotations

from itertools import product

import pytest

from autopar.cost.pipeline import simulate
from autopar.ir.program import Phase
from autopar.ir.schedule import Schedule
from autopar.stages.schedules import in_flight, in_flight_bound, make_schedule

SIZES = list(product(range(1, 6), range(1, 9)))  # stages b, micro-batches m


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
        assert len(make_schedule(name, b, m).clocks) == 2 * (m + b - 1) + 1


def test_clocks_of_inference():
    for b, m in SIZES:
        assert len(make_schedule("inference", b, m).clocks) == m + b - 1


def test_clocks_of_zero_bubble_and_its_idle_ones():
    for b, m in SIZES:
        schedule = make_schedule("zero_bubble", b, m)
        assert len(schedule.clocks) == 3 * m + 2 * (b - 1) + 1
        assert idle_clocks(schedule) == 2 * b * (b - 1)
        # 1F1B with a backward pass of two clocks, one for inputs and one for weights
        fused = simulate(make_schedule("1f1b", b, m), [1] * b, [2] * b)
        apart = simulate(schedule, [1] * b, [1] * b, [1] * b)
        assert fused.step_s == 3 * (m + b - 1)
        assert apart.step_s == 3 * m + 2 * (b - 1)
        assert (apart.bubble < fused.bubble) == (b > 1)


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
    plain = simulate(make_schedule("1f1b", b, m), [1] * b, [2] * b)
    half = [0.5] * (b * stages_each)
    schedule = make_schedule("interleaved_1f1b", b * stages_each, m, num_meshes=b)
    interleaved = simulate(schedule, half, [1] * len(half))
    assert plain.step_s == 3 * (m + b - 1)
    assert interleaved.step_s == 3 * m + 3 * (b - 1) / stages_each


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
    """Three stages, forward 2, backward 2, transfers 1: eager, only the first round trip shows."""
    b, m = 3, 12
    times = dict(forward_s=[2] * b, backward_s=[2] * b, transfer_s=[1] * (b - 1))
    plain = simulate(make_schedule("1f1b", b, m), **times)
    eager = simulate(make_schedule("1f1b_eager", b, m), **times)
    hidden = 4 * (m + b - 1) + 2 * (b - 1)
    assert eager.step_s == hidden < plain.step_s
