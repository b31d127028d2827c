"""The pure parts of the simulator's benchmark."""

from __future__ import annotations

from autopar.lower.schedules import make_schedule
from autopar.stages.simulate import predicted_s
from benchmarks.simulator import chain, speed


def test_the_chain_is_a_1f1b_pipeline() -> None:
    """Forward 1, backward 2, transfers 0.1, update 1; one micro-batch goes through all of it."""
    step_s = predicted_s(chain(3), make_schedule("1f1b", 3, 1))
    assert abs(step_s - (3 * 3 + 4 * 0.1 + 1)) < 1e-9


def test_events_are_runs_sends_and_receives() -> None:
    row = speed(2, 3, rounds=1)
    assert row["num_events"] == 2 * (2 * 3 + 1) + 2 * 2 * 3
