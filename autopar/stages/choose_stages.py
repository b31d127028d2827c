"""Which stages a pipeline has: from a looped step to the best stages on submeshes, by tables.

graph   the looped step → Graph
tables  Graph, submeshes → costs of every layer on each           (stages.table_maker)
search  tables → the best few pipelines, and what was considered  (stages.worthwhile)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, prod

import numpy as np

from autopar.cost.measured import min_work_s
from autopar.errors import MemoryBudgetError
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.ir.stages import LayerTable, PipelineChoice, SearchReport, Submesh
from autopar.ir.text import format_bytes
from autopar.ir.traced_step import TracedStep
from autopar.methods import AutoStages, PipeshardParallel, ShardingOptions, ShardParallel
from autopar.rewrite.attach_layers import boundary_bytes
from autopar.sharding.deadline import Deadline
from autopar.sharding.memory_budget import memory_budget, state_floor
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.tried import MICRO_BATCHES, PIPELINES, RECOMPUTATION
from autopar.stages.expected_work import TABLES
from autopar.stages.layer_tables import mesh_shapes
from autopar.stages.looped import LoopedStep, batch_rows, launch_s, stacks_by_layer
from autopar.stages.micro_batches import (
    candidate_micro_batches,
    choose_micro_batches,
    least_step_s,
    scaled_setting,
    scaled_tables,
)
from autopar.stages.ranges import Setting
from autopar.stages.stage_search import search_stages
from autopar.stages.submeshes import candidate_submeshes
from autopar.stages.table_bench import TableBench
from autopar.stages.table_maker import TableMaker, table_maker
from autopar.stages.worthwhile import SEARCH_SHARE, search_priced, search_tables, search_worthwhile

# A stage search at another number of micro-batches must promise this much to be made.
WORTH_ANOTHER = 0.06
# Micro-batches of fewer rows than a host has devices must promise this much: tables know little.
WORTH_FEW_ROWS = 0.2
# What the tables of one mesh take, about: equal layers are solved once.
_SECONDS_PER_EQUATION, _MOST_DIFFERENT = 1e-3, 1500
SLOW = 1.6  # step time over ideal compute time (recomputing everything costs a third)
FULL = 0.8  # share of the budget from which on a stage is full


@dataclass(frozen=True)
class StageSearch:
    """What a stage search found.

    choice:  the best stages; None if nothing fits.
    report:  what it considered.
    another: stages with another number of micro-batches that promise to be better.
    tables, setting: what was searched.
    excess:  submesh -> how much more than in tables stages take there (see `calibrate`).
    plain:   (submesh, mesh shape, recomputed) -> the table at which memory has no price.
    maker:   makes tables that save memory, for whoever searches with less; None for scaled tables.
    """

    choice: PipelineChoice | None
    report: SearchReport
    another: PipelineChoice | None = None
    tables: Sequence[LayerTable] = ()
    setting: Setting | None = None
    excess: Mapping[Submesh, float] = field(default_factory=dict)
    plain: Mapping[tuple[Submesh, tuple[int, ...], bool], LayerTable] = field(default_factory=dict)
    maker: TableMaker | None = None

    @property
    def within(self) -> Setting:
        """The setting in which stages fit as they are."""
        assert self.setting is not None
        return within_less(self.setting, self.excess)


def choose_stages(
    looped: LoopedStep,
    method: PipeshardParallel,
    cluster: ClusterSpec,
    log: PlanningLog,
    *,
    only: Collection[Submesh] | None = None,
    excess: Mapping[Submesh, float] | None = None,
    to_the_end: bool = True,
    splits_stacks: bool = False,
) -> StageSearch:
    """The best stages of a looped step. `only`: the submeshes to search, all if None; `excess`: how
    much more than in tables stages take there (see `calibrate`); `to_the_end`: go on when time is
    up, until some stages fit or all submeshes were searched; `splits_stacks`: a stage holds its
    rows of stacks over layers."""
    assert isinstance(method.stages, AutoStages)
    submeshes = list(candidate_submeshes(cluster, method.stages.submeshes))
    if only is not None:
        submeshes = [submesh for submesh in submeshes if submesh in only]
    step = looped.step
    if splits_stacks and looped.stack_rows:
        step = stacks_by_layer(looped).step
    if log.processes is not None:  # they import what they need while the graph is built
        num_meshes = sum(len(mesh_shapes(submesh)) for submesh in submeshes)
        num_different = min(_MOST_DIFFERENT, step.program.num_equations())
        expected_s = _SECONDS_PER_EQUATION * num_meshes * num_different
        log.processes.start(TableBench.__module__, expected_s)
    maker = table_maker(looped, step, method.options, cluster, log)
    all_of_it = _setting(looped, method, cluster)
    setting = within_less(all_of_it, excess or {})
    with log.measured(TABLES):
        tables, choice, report = search_worthwhile(looped, setting, submeshes, maker)
    while maker.late and not _uses_all(choice, cluster) and (to_the_end or log.deadline.allows()):
        tables = [*tables, *maker.tables([maker.late.pop()])]  # the largest, or else the smallest
        with log.timed("search"):
            choice, report = search_stages(
                tables, setting, deadline=log.deadline.part(SEARCH_SHARE)
            )
    log.search = report
    log.axis_costs = maker.bench.cost_by_last_axis()
    maker.bench.problems.clear()  # large, and soon made again
    return StageSearch(
        choice, report, None, tables, all_of_it, dict(excess or {}), maker.bench.plain, maker
    )


def search_within(
    search: StageSearch, excess: Mapping[Submesh, float], log: PlanningLog
) -> StageSearch:
    """The same tables searched once more, with the budget of a submesh divided by its excess, and
    with tables that save memory where they are of use now."""
    search = replace(search, excess=dict(excess))
    choice, report, _ = search_tables(search.tables, search.within, log)
    tables = search.tables
    if search.maker is not None:
        tables, choice, report = search_priced(tables, search.within, search.maker, choice, report)
    log.search = report
    return replace(search, choice=choice, report=report, tables=tables)


def within_less(setting: Setting, excess: Mapping[Submesh, float]) -> Setting:
    """The setting with the budget of every submesh divided by its excess; where that is unknown, by
    the least that is known."""
    if not excess:
        return setting
    budget, least = setting.memory_budget, min(excess.values())

    def less(submesh: Submesh) -> float:
        whole = budget(submesh) if callable(budget) else budget
        return whole / excess.get(submesh, least)

    return replace(setting, memory_budget=less)


def with_another(looped: LoopedStep, search: StageSearch, log: PlanningLog) -> StageSearch:
    """The search with stages of another number of micro-batches, if they promise to be better."""
    setting, choice = search.within, search.choice
    with log.timed("search"):
        other = _other_number(
            looped, search.tables, setting, choice, log.deadline.part(SEARCH_SHARE)
        )
    if other is None or other.num_micro_batches == setting.num_micro_batches:
        return search
    promises = choice is None or other.step_s < choice.step_s * (1 - WORTH_ANOTHER)
    return replace(search, another=other) if promises else search


def at_another(search: StageSearch) -> StageSearch:
    """The search at its other number of micro-batches, by the same tables: those of a smaller or
    larger number, roughly (see `micro_batches`)."""
    other, setting = search.another, search.setting
    assert other is not None and setting is not None
    return replace(
        search,
        choice=other,
        report=replace(search.report, best=(other,)),
        another=None,
        tables=scaled_tables(search.tables, setting, other.num_micro_batches),
        setting=scaled_setting(setting, other.num_micro_batches),
        plain={},
        maker=None,
    )


def _uses_all(choice: PipelineChoice | None, cluster: ClusterSpec) -> bool:
    if choice is None:
        return False
    return sum(prod(stage.submesh) for stage in choice.stages) == cluster.num_devices


# -- another number of micro-batches


def _other_number(
    looped: LoopedStep,
    tables: Sequence[LayerTable],
    setting: Setting,
    choice: PipelineChoice | None,
    deadline: Deadline,
) -> PipelineChoice | None:
    """The best stages with any number of micro-batches, by tables made at one of them.
    Micro-batches with fewer rows than a host has devices may not exist, since tables may split rows
    over more devices: they are tried if nothing else fits, or all else is slow for want of
    memory."""
    rows, most = batch_rows(looped.step), setting.cluster.devices_per_host
    best, known = choice, {setting.num_micro_batches}
    for least in (most, *(n for n in (2, 1) if n < most)):
        needless = least == 1 or best is None or not _lacks_memory(looped, setting, best)
        if least < most and best is not None and needless:
            break
        candidates = candidate_micro_batches(rows, min_rows=min(rows, least))
        candidates = [number for number in candidates if number not in known]
        known.update(candidates)
        worth = WORTH_FEW_ROWS if least < most else WORTH_ANOTHER
        cutoff_s = inf if best is None else best.step_s * (1 - worth)
        own = setting.num_micro_batches
        candidates = [
            n for n in candidates if n > own or least_step_s(choice, setting, n) < cutoff_s
        ]
        other = choose_micro_batches(
            tables, setting, candidates, cutoff_s=cutoff_s, deadline=deadline
        )
        best = best if other is None else other.choice
    return best


def _lacks_memory(looped: LoopedStep, setting: Setting, choice: PipelineChoice) -> bool:
    """Whether a plan is slow, perhaps for want of memory: a stage recomputes or is full."""
    cluster = setting.cluster
    flops = setting.num_micro_batches * sum(looped.layer_flops) / cluster.num_devices
    is_slow = choice.step_s > SLOW * min_work_s(cluster, flops)
    return is_slow and any(
        stage.remat or stage.peak_bytes > FULL * setting.budget_bytes(stage.submesh)
        for stage in choice.stages
    )


# -- memory


def _setting(looped: LoopedStep, method: PipeshardParallel, cluster: ClusterSpec) -> Setting:
    schedule = method.schedule
    return Setting(
        cluster,
        np.array(boundary_bytes(looped.body, looped.attached), dtype=float),
        looped.step.num_micro_batches,
        "1f1b" if schedule == "interleaved_1f1b" else schedule,
        device_budget(method.options, cluster),
        launch_s(cluster),
        looped.has_backward,
    )


def device_budget(options: ShardingOptions, cluster: ClusterSpec) -> float:
    """The bytes that a device may hold."""
    mesh = mesh_of_cluster(cluster, (cluster.num_devices,))
    budget = memory_budget(mesh, ShardParallel(options=options))
    return inf if budget is None else budget


def nothing_fits(
    looped: LoopedStep, report: SearchReport, options: ShardingOptions, cluster: ClusterSpec
) -> MemoryBudgetError:
    budget = device_budget(options, cluster)
    return MemoryBudgetError(
        f"{looped.step.name}: no pipeline of its {report.num_layers} layers fits into the "
        f"budget of {format_bytes(budget)} per device. {' '.join(report.notes)}",
        inf,
        budget,
        remedies={
            MICRO_BATCHES: f"more than {looped.step.num_micro_batches} of them, of fewer rows",
            "smaller layers": f"layers=AutoLayers(…) with more than {report.num_layers}",
            "more devices": f"more than {cluster.num_devices}, or devices with more memory",
        },
    )


def check_state_fits(step: TracedStep, options: ShardingOptions, cluster: ClusterSpec) -> None:
    """Refuse at once what no pipeline can hold, whatever its stages are."""
    floor, budget = state_floor(step, cluster.num_devices), device_budget(options, cluster)
    if floor > budget:
        raise MemoryBudgetError(
            f"{step.name}: no pipeline fits. The state alone takes {format_bytes(floor)} per "
            f"device if it is divided evenly over all {cluster.num_devices}, and the budget is "
            f"{format_bytes(budget)}.",
            floor,
            budget,
            tried=dict.fromkeys(
                (MICRO_BATCHES, RECOMPUTATION, PIPELINES), "not tried: the state alone is too large"
            ),
            remedies={
                "more devices": f"{ceil(cluster.num_devices * floor / budget)} instead of "
                f"{cluster.num_devices} would hold the state alone; or devices with more memory"
            },
        )
