"""What cannot be part of a better plan is left out of a search; the plan is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.ir.stages import PipelineChoice, Submesh
from autopar.sharding.memory_budget import RESERVE_SHARE
from autopar.sharding.planning_log import PlanningLog
from autopar.stages import choose_stages, worthwhile
from autopar.stages.choose_stages import StageSearch
from tests.unit.stages.small_pipeline import CLUSTER, METHOD, looped_step


@pytest.mark.parametrize("room", [3.0, 1.1, 0.8, 0.5])
def test_the_best_stages_are_those_of_all_tables(
    room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is ample, where tables that save it are made to no avail, and where they are
    needed. Relative to what the best stages take if there is no budget."""
    looped, all_sizes = looped_step(), []

    def search_all(looped: Any, where: Any, submeshes: Any, maker: Any) -> Any:
        tables = maker.tables(submeshes)
        all_sizes.append(len(tables))
        return tables, *worthwhile.search_tables(tables, where, maker.log)[:2]

    def searched(cluster: autopar.ClusterSpec) -> StageSearch:
        return choose_stages.choose_stages(looped, METHOD, cluster, PlanningLog())

    free = searched(CLUSTER).choice
    assert free is not None
    peak = max(stage.peak_bytes for stage in free.stages)
    cluster = replace(CLUSTER, memory_bytes=room * peak / (1 - RESERVE_SHARE))
    found = searched(cluster)
    monkeypatch.setattr(choose_stages, "search_worthwhile", search_all)
    expected = searched(cluster)
    if expected.choice is None:
        assert found.choice is None
    else:
        assert found.choice is not None
        assert found.choice.step_s <= (1 + worthwhile.LITTLE) * expected.choice.step_s
    assert len(found.tables) <= all_sizes[0]
    if room == 3.0:
        assert found.choice is not None and expected.choice is not None
        assert _ranges(found.choice) == _ranges(expected.choice)
        assert len(found.tables) < all_sizes[0]


def _ranges(choice: PipelineChoice) -> list[tuple[Any, ...]]:
    return [(stage.layers, stage.submesh, stage.mesh_shape) for stage in choice.stages]


def test_what_has_no_time_for_prices_keeps_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up once memory turns out to be short: one mesh has prices, all others keep theirs."""
    log, plain = PlanningLog(), set()

    def until_time_is_up(tables: Any, where: Any, maker: Any, *_: Any) -> set[Submesh]:
        plain.update((table.submesh, table.mesh_shape) for table in tables)
        log.deadline.interrupt()
        return {table.submesh for table in tables} - maker.priced

    monkeypatch.setattr(worthwhile, "_lacking", until_time_is_up)
    search = choose_stages.choose_stages(looped_step(), METHOD, CLUSTER, log)
    assert len(plain) > 2
    assert {(table.submesh, table.mesh_shape) for table in search.tables} == plain
    assert any(table.price_per_byte for table in search.tables)


def test_tables_that_save_memory_are_made_once_stages_turn_out_to_take_more() -> None:
    looped, log = looped_step(), PlanningLog()
    search = choose_stages.choose_stages(looped, METHOD, CLUSTER, log)
    assert search.choice is not None
    assert not any(table.price_per_byte for table in search.tables)
    excess = 0.9 * CLUSTER.spec.memory_bytes / max(s.peak_bytes for s in search.choice.stages)
    again = choose_stages.search_within(
        search, dict.fromkeys({table.submesh for table in search.tables}, 2 * excess), log
    )
    assert any(table.price_per_byte for table in again.tables)
    assert again.choice is not None and again.choice.step_s >= search.choice.step_s
