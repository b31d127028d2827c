"""The table of plans with XLA's sizes of merged collectives and with the plan's."""

from __future__ import annotations

from benchmarks.merging import cells_of


def test_both_programs_of_a_plan_are_in_a_line() -> None:
    own = {"step_ms": 8.0, "exposed_ms": 2.0, "peak_gb": 3.0}
    chosen = {"step_ms": 6.0, "exposed_ms": 0.5, "peak_gb": 3.5}
    cells = cells_of({"mesh": [4, 2], "own": own, "chosen": chosen})
    assert cells[:4] == ["4×2", "8.00 ms", "6.00 ms", "0.750"]
    assert cells[4:] == ["2.00 ms", "0.50 ms", "3.00 GB", "3.50 GB"]
