"""On many devices, what cannot be part of a better plan is left out; the plan is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.sharding.planning_log import PlanningLog
from autopar.stages import choose_stages
from autopar.stages.stage_search import search_stages
from examples.models import build
from tests.unit.stages.costs import setting, table
from tests.unit.stages.small_pipeline import CLUSTER, METHOD, looped_step


@pytest.mark.ci
def test_the_plan_is_that_of_all_tables(monkeypatch) -> None:
    example = build("gpt-tiny", 16)
    method = autopar.PipeshardParallel(2)
    cluster = autopar.ClusterSpec(2, 2, "v100", host_bandwidth=1e9)

    def planned() -> autopar.ParallelPlan:
        args = example.abstract_state(), example.abstract_batch()
        return autopar.plan(example.train_step, *args, cluster=cluster, method=method)

    assert cluster.num_devices < choose_stages.MANY_DEVICES
    all_tables = planned()
    monkeypatch.setattr(choose_stages, "MANY_DEVICES", 1)
    pruned = planned()
    assert pruned.estimated_step_s == pytest.approx(all_tables.estimated_step_s)
    assert [s.submesh for s in pruned.stages] == [s.submesh for s in all_tables.stages]
    assert pruned.search is not None and all_tables.search is not None
    assert pruned.search.num_candidates <= all_tables.search.num_candidates


@pytest.mark.parametrize(("room", "is_short"), [(2.0, False), (1.05, True), (0.9, True)])
def test_memory_is_short_unless_the_best_pipeline_leaves_room(room: float, is_short: bool) -> None:
    cluster = autopar.ClusterSpec(4, 1)
    tables = [table((1, 1), [1.0] * 4, in_flight_bytes=8.0, held_bytes=1.0)]
    free = setting(cluster, 4, 4)
    best, _ = search_stages(tables, free)
    assert best is not None
    budget = room * max(stage.peak_bytes for stage in best.stages)
    log = PlanningLog()
    where = replace(free, memory_budget=budget)
    assert choose_stages._is_short_of_memory(tables, where, log) == is_short
    log.deadline.interrupt()  # nothing is known then
    assert choose_stages._is_short_of_memory(tables, where, log)


def test_what_has_no_time_for_prices_keeps_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up once memory turns out to be short: one mesh has prices, all others keep theirs."""
    monkeypatch.setattr(choose_stages, "MANY_DEVICES", 1)
    log, plain = PlanningLog(), set()
    is_short = choose_stages._is_short_of_memory

    def until_time_is_up(tables: Any, where: Any, log: PlanningLog) -> bool:
        plain.update((table.submesh, table.mesh_shape) for table in tables)
        assert is_short(tables, replace(where, memory_budget=1.0), log)
        log.deadline.interrupt()
        return True

    monkeypatch.setattr(choose_stages, "_is_short_of_memory", until_time_is_up)
    monkeypatch.setattr(choose_stages, "may_lack_memory", lambda *_: True)
    search = choose_stages.choose_stages(looped_step(), METHOD, CLUSTER, log)
    assert len(plain) > 2
    assert {(table.submesh, table.mesh_shape) for table in search.tables} == plain
