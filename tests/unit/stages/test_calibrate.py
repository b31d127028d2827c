"""The memory of stages, solved by themselves, corrects the search over tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.sharding.planning_log import PlanningLog
from autopar.stages import calibrate
from autopar.stages.calibrate import calibrated
from autopar.stages.choose_stages import StageSearch, choose_stages, search_within
from autopar.stages.looped import LoopedStep
from autopar.stages.pipeline_task import PipelineTask
from tests.unit.stages.small_pipeline import CLUSTER, METHOD, looped_step


@pytest.fixture(scope="module")
def found() -> tuple[PipelineTask, LoopedStep, StageSearch]:
    looped = looped_step()
    task = PipelineTask(METHOD, CLUSTER, PlanningLog())
    return task, looped, choose_stages(looped, METHOD, CLUSTER, task.log)


def test_stages_that_take_more_are_searched_with_less(found, monkeypatch) -> None:
    """Where stages take twice as much, tables must take half of the budget at most."""
    task, looped, search = found
    peak = max(stage.peak_bytes for stage in search.choice.stages)
    tight = replace(search.setting, memory_budget=1.5 * peak)
    search = replace(search, setting=tight)
    submeshes = {table.submesh for table in search.tables}
    monkeypatch.setattr(calibrate, "FULL", 0.0)
    monkeypatch.setattr(calibrate, "_excess", lambda *_: dict.fromkeys(submeshes, 2.0))
    excess: dict[Any, float] = {}
    again = calibrated(task, looped, search, excess)
    assert excess == dict.fromkeys(submeshes, 2.0)
    assert again.within.budget_bytes((1, 2)) == 0.75 * peak
    if again.choice is not None:
        assert again.choice.step_s >= search.choice.step_s
        assert max(stage.peak_bytes for stage in again.choice.stages) <= 0.75 * peak


def test_the_excess_is_that_of_a_stage_alone(found, monkeypatch) -> None:
    task, looped, search = found
    monkeypatch.setattr(calibrate, "FULL", 0.0)
    monkeypatch.setattr(calibrate, "unbounded_peak", lambda *_: 1e6)
    excess = calibrate._excess(task, looped, search)
    assert set(excess) <= {stage.submesh for stage in search.choice.stages} and excess
    monkeypatch.setattr(calibrate, "unbounded_peak", lambda *_: 2e6)
    assert calibrate._excess(task, looped, search) == {s: 2 * e for s, e in excess.items()}


def test_a_stage_alone_takes_about_what_tables_say(found, monkeypatch) -> None:
    task, looped, search = found
    monkeypatch.setattr(calibrate, "FULL", 0.0)
    assert all(0.3 < e < 3 for e in calibrate._excess(task, looped, search).values())


def test_a_stage_that_becomes_one_program_is_not_cut_out(found, monkeypatch) -> None:
    """The graph that tables were made of tells its memory."""
    task, looped, search = found
    alone = next(c for c in (search.choice, *search.report.best) if len(c.stages) == 1)
    search = replace(search, choice=alone)
    monkeypatch.setattr(calibrate, "FULL", 0.0)
    expected = calibrate._excess(task, looped, search)
    monkeypatch.setattr(calibrate, "unbounded_peak", lambda *_: pytest.fail("was cut out"))
    asked = replace(task, on_one_mesh=lambda number, step_s: None)
    (excess,) = calibrate._excess(asked, looped, search).values()
    assert excess == pytest.approx(*expected.values(), rel=0.5)


def test_stages_far_from_full_are_not_solved(found, monkeypatch) -> None:
    task, looped, search = found
    monkeypatch.setattr(calibrate, "unbounded_peak", lambda *_: pytest.fail("was solved"))
    excess: dict[Any, float] = {}
    assert calibrated(task, looped, search, excess) is search
    assert not excess


def test_an_unknown_submesh_has_the_least_excess(found) -> None:
    task, _, search = found
    again = search_within(search, {(1, 1): 1.5, (1, 2): 1.2}, task.log)
    budget = search.setting.budget_bytes((2, 2))
    assert again.within.budget_bytes((1, 1)) == budget / 1.5
    assert again.within.budget_bytes((2, 2)) == budget / 1.2
    assert again.setting is search.setting
