"""The pure parts of the benchmark of transports."""

from __future__ import annotations

import pytest

from benchmarks.transfers import row, with_ratios


def test_a_row_is_the_median_and_the_best():
    got = row("one", "one way", 2_000_000, [0.001, 0.004, 0.002])
    assert got["gb_per_s"] == pytest.approx(1.0)
    assert got["best_gb_per_s"] == pytest.approx(2.0)
    assert got["median_ms"] == pytest.approx(2.0)


def test_rows_are_held_against_the_ceilings_of_their_size():
    rows = [
        row("ceiling: copy", "one way", 2**20, [0.001]),
        row("ceiling: copy", "one way", 2**24, [0.001]),
        row("one", "one way", 2**20, [0.004]),
        {"transport": "two", "error": "it is not there"},
    ]
    assert with_ratios(rows)[2]["over"] == {"copy": pytest.approx(0.25)}
    assert [own for own in with_ratios(rows) if "over" not in own] == [*rows[:2], rows[3]]
