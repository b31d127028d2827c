"""The table of plans with and without overlap."""

from __future__ import annotations

from benchmarks.overlap import cells_of


def test_hidden_communication_is_shown_as_planned_and_as_judged() -> None:
    without = {"step_ms": 9.0, "exposed_ms": 3.0, "communication_ms": 4.0, "planned_hidden_ms": 0.0}
    with_overlap = {
        "step_ms": 8.0,
        "exposed_ms": 2.0,
        "communication_ms": 7.0,
        "planned_hidden_ms": 6.5,
    }
    cells = ["9.00 ms", "8.00 ms", "3.00 ms", "2.00 ms", "6.50 ms", "5.00 ms"]
    assert cells_of(without, with_overlap) == cells
