"""The best stages by tables that are worth making: a `TableMaker` → `LayerTable`s, stages.

A plan found on large submeshes rules out small ones (`stages.pruning`). Tables that save memory are
made where they are of use alone: as long as a bound on what they can lead to is clearly below the
best stages at hand, and on the submeshes that the bound is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod

from autopar.cost.measured import min_work_s
from autopar.errors import AutoparError
from autopar.ir.stages import LayerTable, PipelineChoice, SearchReport, Submesh
from autopar.sharding.planning_log import PlanningLog
from autopar.stages.looped import LoopedStep
from autopar.stages.pruning import min_times, too_slow_submeshes
from autopar.stages.ranges import Setting
from autopar.stages.stage_search import search_stages
from autopar.stages.table_maker import TableMaker

# Share of the time left for one search of the tables.
SEARCH_SHARE = 0.25
# Tables that save memory are not made for a gain below this.
LITTLE = 0.001


def search_worthwhile(
    looped: LoopedStep, setting: Setting, submeshes: Sequence[Submesh], maker: TableMaker
) -> tuple[Sequence[LayerTable], PipelineChoice | None, SearchReport]:
    """(tables, the best stages, what was considered): plans found on large submeshes rule out
    small ones, and prices of memory are worked out only where memory may be short."""
    cluster, num_layers = setting.cluster, len(looped.layers)
    flops = [setting.num_micro_batches * layer for layer in looped.layer_flops]
    least_s = min_times(flops, lambda work: min_work_s(cluster, work))
    even = cluster.num_devices / num_layers
    large = [s for s in submeshes if prod(s) >= even] or list(submeshes)
    try:
        tables = maker.tables(large, prices=())
    except AutoparError:  # perhaps smaller ones can be had
        large, tables = list(submeshes), maker.tables(submeshes, prices=())
    small, slow = [s for s in submeshes if s not in large], []
    if small:
        known_s = search_tables(tables, setting, maker.log)[2]
        slow = too_slow_submeshes(small, least_s, num_layers, known_s)
        tables += maker.more([s for s in small if s not in slow], prices=())
    choice, report, _ = search_tables(tables, setting, maker.log)
    tables, choice, report = search_priced(tables, setting, maker, choice, report)
    return tables, choice, replace(report, notes=(*report.notes, *_left_out(slow)))


def search_priced(
    tables: Sequence[LayerTable],
    setting: Setting,
    maker: TableMaker,
    choice: PipelineChoice | None,
    report: SearchReport,
) -> tuple[Sequence[LayerTable], PipelineChoice | None, SearchReport]:
    """The same, once tables that save memory are made where they are of use. `choice`, `report`:
    of the tables at hand."""
    while lacking := _lacking(tables, setting, maker, choice, report):
        tables = maker.with_prices(tables, lacking)
        choice, report, _ = search_tables(tables, setting, maker.log)
    return tables, choice, report


def _lacking(
    tables: Sequence[LayerTable],
    setting: Setting,
    maker: TableMaker,
    choice: PipelineChoice | None,
    report: SearchReport,
) -> set[Submesh]:
    """Submeshes on which tables that save memory may lead to a better choice, or to one mesh, with
    which it is compared. Where only the cheapest tables are known, no others cost less: so with
    no budget there, the best pipeline is a bound. If it is clearly below the choice, its stages
    that do not fit are why. A choice that leaves devices unused is none."""
    unpriced = {table.submesh for table in tables} - maker.priced
    cluster, best_s = setting.cluster, _step_s(choice, setting)

    def budget(submesh: Submesh) -> float:
        return inf if submesh in unpriced else setting.budget_bytes(submesh)

    if not unpriced:
        return set()
    with maker.log.timed("search"):
        free, free_report = search_stages(
            tables,
            replace(setting, memory_budget=budget),
            top=1,
            cutoff_s=best_s / (1 + LITTLE),
            deadline=maker.log.deadline.part(SEARCH_SHARE),
        )
    stages = () if free is None else free.stages
    lacking = {stage.submesh for stage in stages if stage.submesh in unpriced}
    fitting = {s.submesh for s in stages if s.peak_bytes <= setting.budget_bytes(s.submesh)}
    lacking = (lacking - fitting) or lacking
    whole = (cluster.num_hosts, cluster.devices_per_host)
    if report.intra_only_s is None and free_report.intra_only_s is not None and whole in unpriced:
        lacking.add(whole)
    return lacking


def search_tables(
    tables: Sequence[LayerTable], setting: Setting, log: PlanningLog
) -> tuple[PipelineChoice | None, SearchReport, float]:
    """(the best stages, what was considered, the step time if they use all devices)."""
    with log.timed("search"):
        choice, report = search_stages(tables, setting, deadline=log.deadline.part(SEARCH_SHARE))
    return choice, report, _step_s(choice, setting)


def _step_s(choice: PipelineChoice | None, setting: Setting) -> float:
    """Infinite if there is none, or one that leaves devices unused."""
    if choice is None:
        return inf
    used = sum(prod(stage.submesh) for stage in choice.stages)
    return choice.step_s if used == setting.cluster.num_devices else inf


def _left_out(submeshes: Sequence[Submesh]) -> list[str]:
    if not submeshes:
        return []
    shapes = ", ".join(f"{hosts}×{devices}" for hosts, devices in submeshes)
    return [
        f"Submeshes {shapes} were left out: one layer on one of them, at full speed, would take as "
        "long as the whole step of the plan that was found."
    ]
