"""What is proven of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.stages.solve_pipeline import pipeline_gap
from autopar.stages.stage_plans import SolvedStage


def stage(objective: float, lower_bound: float) -> SolvedStage:
    unused: Any = None
    return SolvedStage(unused, unused, objective, lower_bound)


def test_the_gap_counts_the_slowest_stage_for_every_micro_batch() -> None:
    stages = [stage(10.0, 9.0), stage(8.0, 4.0)]
    # 10 + 8 + 3 · 10 = 48 seconds; 9 + 4 + 3 · 9 = 40 are proven
    assert pipeline_gap(stages, 4) == pytest.approx(8 / 48)


def test_with_one_stage_it_is_the_gap_of_that() -> None:
    assert pipeline_gap([stage(10.0, 9.5)], 7) == pytest.approx(0.05)
    assert pipeline_gap([stage(10.0, 10.0), stage(3.0, 3.0)], 7) == 0.0
