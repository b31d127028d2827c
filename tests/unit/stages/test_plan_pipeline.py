"""What a search learns of stages that do not fit, and of other numbers of micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import MemoryBudgetError
from autopar.progress import Best
from autopar.sharding.planning_log import PlanningLog
from autopar.stages import plan_pipeline
from autopar.stages.choose_stages import StageSearch, choose_stages
from autopar.stages.expected_work import (
    BENCH,
    GRAPH,
    LOOP,
    PIPELINE,
    TABLES,
    search_again_s,
    solving_s,
)
from autopar.stages.looped import LoopedStep, StageSpec
from autopar.stages.pipeline_task import PipelineTask, StageMisfit
from tests.unit.stages.small_pipeline import CLUSTER, METHOD, looped_step, step_source


@pytest.fixture(scope="module")
def found() -> tuple[LoopedStep, StageSearch]:
    looped = looped_step()
    search = choose_stages(looped, METHOD, CLUSTER, PlanningLog())
    peak = max(stage.peak_bytes for stage in search.choice.stages)
    return looped, replace(search, setting=replace(search.setting, memory_budget=1.05 * peak))


def task() -> PipelineTask:
    return PipelineTask(METHOD, CLUSTER, PlanningLog())


def missed(task: PipelineTask, search: StageSearch, times: float) -> StageSpec:
    """The search's first stage did not fit: it takes so many times what the table says."""
    stage = search.report.best[0].stages[0]
    spec = StageSpec(stage.layers, stage.submesh, stage.mesh_shape)
    task.misfits.append(StageMisfit(spec, 2, times * stage.peak_bytes))
    return spec


def test_the_next_search_has_less_room_there(found) -> None:
    _, search = found
    tried, excess = task(), {}
    spec = missed(tried, search, 1.2)
    again = plan_pipeline._with_less_room(tried, search, excess)
    assert excess == {spec.submesh: pytest.approx(1.2)}
    if again is not None:
        budget = search.setting.budget_bytes(spec.submesh)
        assert again.within.budget_bytes(spec.submesh) == pytest.approx(budget / 1.2)
        assert all(s.peak_bytes <= budget / 1.2 for s in again.choice.stages)
        assert again.choice.step_s >= search.choice.step_s


def test_what_is_known_is_no_reason_to_search(found) -> None:
    _, search = found
    assert plan_pipeline._with_less_room(task(), search, {}) is None  # nothing was tried
    tried = task()
    spec = missed(tried, search, 1.2)
    known = replace(search, excess={spec.submesh: 1.2})
    assert plan_pipeline._with_less_room(tried, known, {}) is None


def test_a_pipeline_that_does_not_fit_gives_way_to_one_that_does(found, monkeypatch) -> None:
    looped, search = found
    tried, solved, reports = task(), object(), []

    def best_solved(task: Any, looped: Any, report: Any, *, until_misfit: bool = False) -> Any:
        reports.append(report)
        if len(reports) == 1:
            assert until_misfit
            missed(task, search, 1.01)
            raise MemoryBudgetError("too large", 2.0, 1.0)
        return solved

    monkeypatch.setattr(plan_pipeline, "_best_solved", best_solved)
    planned, again = plan_pipeline._fitted(tried, looped, search, {})
    assert planned is solved
    assert reports == [search.report, again.report]
    assert reports[0] is not reports[1]


def test_in_the_end_every_candidate_is_tried(found, monkeypatch) -> None:
    """Where nothing is learned, the other candidates have their turn, as they always had."""
    looped, search = found
    calls = []

    def best_solved(
        task: Any, looped: Any, report: Any, misfit: Any = None, *, until_misfit: bool = False
    ) -> Any:
        calls.append((until_misfit, misfit is not None))
        raise MemoryBudgetError("too large", 2.0, 1.0)

    monkeypatch.setattr(plan_pipeline, "_best_solved", best_solved)
    with pytest.raises(MemoryBudgetError):
        plan_pipeline._fitted(task(), looped, search, {})
    assert calls == [(True, False), (False, True)]


@pytest.mark.parametrize(
    ("has_plan", "to_the_end", "tries"), [(True, True, 1), (False, False, 1), (False, True, 2)]
)
def test_past_the_deadline_nothing_is_learned_if_there_is_another_way(
    found, monkeypatch, has_plan: bool, to_the_end: bool, tries: int
) -> None:
    looped, search = found
    tried, calls = replace(task(), to_the_end=to_the_end), []
    tried.log.best = Best(lambda: 0.0)
    if has_plan:
        tried.log.best.take(1.0, 0.0)
    tried.log.deadline.interrupt()

    def best_solved(*_: Any, **how: Any) -> Any:
        calls.append(how)
        raise MemoryBudgetError("too large", 2.0, 1.0)

    monkeypatch.setattr(plan_pipeline, "_best_solved", best_solved)
    with pytest.raises(MemoryBudgetError):
        plan_pipeline._fitted(tried, looped, search, {})
    assert len(calls) == tries


@pytest.mark.parametrize(("then_s", "is_searched"), [(0.0, True), (100.0, True), (900.0, False)])
def test_a_second_number_leaves_time_for_one_mesh(
    found, monkeypatch, then_s: float, is_searched: bool
) -> None:
    looped, search = found
    other = replace(search.choice, num_micro_batches=8, step_s=0.9 * search.choice.step_s)
    calls = []
    monkeypatch.setattr(plan_pipeline, "_search_again", lambda *_, **how: calls.append(how))
    tried = replace(task(), then_s=lambda _: then_s)
    tried.log.deadline.limit_s = 1000.0
    tried.log.took_s.update({LOOP: 50.0, GRAPH: 50.0, TABLES: 50.0})
    plan_pipeline._at_better_number(
        step_source(), tried, looped, replace(search, another=other), {}
    )
    assert bool(calls) == is_searched
    assert is_searched or "tables of 8 micro-batches" in tried.log.deadline.left_out


def test_a_search_tells_what_it_took() -> None:
    log = PlanningLog()
    choose_stages(looped_step(), METHOD, CLUSTER, log)
    assert set(log.took_s) == {GRAPH, BENCH, TABLES} and solving_s(log) > log.took_s[GRAPH]
    assert search_again_s(log, 1.0) == pytest.approx(sum(log.took_s.values()))
    log.took_s[PIPELINE] = 7.0  # once a pipeline was solved, that counts
    assert solving_s(log) == 7.0


def test_a_stage_with_what_did_not_fit_is_not_built() -> None:
    tried = task()
    assert not tried.cannot_fit([StageSpec((0, 4), (1, 2), (2,))], 4)
    tried.misfits.append(StageMisfit(StageSpec((1, 3), (1, 2), (2,)), 2, 9e9))
    shapes = (1, 2), (2,)
    two = [StageSpec((0, 3), *shapes), StageSpec((3, 4), *shapes)]  # two in flight on the first
    assert tried.cannot_fit(two, 4)
    assert not tried.cannot_fit(two, 1)  # fewer in flight
    assert not tried.cannot_fit([StageSpec((0, 1), *shapes), StageSpec((1, 4), *shapes)], 4)
    assert not tried.cannot_fit([StageSpec((0, 2), *shapes), StageSpec((2, 4), *shapes)], 4)
    assert not tried.cannot_fit([StageSpec((0, 3), (2, 2), (4,)), two[1]], 4)


@pytest.mark.parametrize(
    ("share", "loop_s", "number"), [(0.8, 10.0, 8), (0.9, 10.0, 4), (0.8, 2000.0, 4)]
)
def test_without_time_for_tables_another_number_must_promise_clearly_more(
    found, share: float, loop_s: float, number: int
) -> None:
    """And there must be time to trace the step once more."""
    looped, search = found
    choice = search.choice
    other = replace(choice, num_micro_batches=8, step_s=share * choice.step_s)
    tried = task()
    tried.log.deadline.limit_s = 1000.0
    tried.log.took_s.update({LOOP: loop_s, GRAPH: 2000.0})
    at, chosen = plan_pipeline._at_better_number(
        step_source(), tried, looped, replace(search, another=other), {}
    )
    assert at.step.num_micro_batches == chosen.setting.num_micro_batches == number
    assert chosen.choice == chosen.report.best[0] == (other if number == 8 else choice)
    half = search.setting.num_micro_batches / number
    for table, before in zip(chosen.tables, search.tables, strict=True):
        assert table.in_flight_bytes == pytest.approx(half * before.in_flight_bytes)
