"""Which stages a pipeline has: from a step as a loop to the best stages on submeshes, by tables.

graph   the looped step → Graph
tables  Graph, submeshes → figures of every layer on each        (stage_tables)
search  tables → the best few pipelines, and what was considered (stages.stage_search)

On many devices, what a plan at hand shows to be of no use is left out (stages.pruning).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import inf, prod

import numpy as np

from autopar.cost.measured import least_work_s
from autopar.errors import MemoryBudgetError
from autopar.ir.graph import check_graph
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.ir.stages import LayerTable, PipelineChoice, SearchReport, Submesh
from autopar.ir.text import format_bytes
from autopar.methods import AutoStages, PipeshardParallel, ShardParallel
from autopar.rewrite.attach_layers import boundary_bytes
from autopar.sharding.constraints import asked_by, solver_constraints
from autopar.sharding.memory_budget import memory_budget
from autopar.sharding.plan_mesh import PassTimer, paused_garbage_collector
from autopar.stages.layer_tables import PRICES, TableBench, node_places, stage_tables
from autopar.stages.looped import LoopedStep, batch_rows, forbidden_collectives, launch_s
from autopar.stages.micro_batches import candidate_micro_batches, choose_micro_batches
from autopar.stages.pruning import least_times, may_lack_memory, too_slow_submeshes
from autopar.stages.ranges import Setting
from autopar.stages.stage_search import remember_search, search_stages
from autopar.stages.submeshes import candidate_submeshes
from autopar.tracer.build import build_graph

# From so many devices on, only what can be part of a better plan than one at hand is looked at.
MANY_DEVICES = 128
# A stage search at another number of micro-batches must promise this much to be made.
WORTH_ANOTHER = 0.06
# A plan is slow that takes so many times as long as its products at full speed on all devices (what
# recomputes everything takes a third longer), and a stage is full from this share of the budget on.
SLOW = 1.6
FULL = 0.8


class StageChooser:
    def __init__(self, method: PipeshardParallel, cluster: ClusterSpec, timer: PassTimer) -> None:
        self.method, self.cluster, self.timer = method, cluster, timer
        self.options = method.options

    def search(
        self,
        looped: LoopedStep,
        number: int,
        is_free: bool,
        only: Collection[Submesh] | None = None,
    ) -> tuple[PipelineChoice | None, SearchReport, PipelineChoice | None]:
        """(the best stages, what was considered, stages with another number of micro-batches that
        promise to be better). `only`: the submeshes that are searched."""
        step = looped.step
        stages = self.method.stages
        assert isinstance(stages, AutoStages)
        method = ShardParallel(options=self.options)
        with self.timer("graph"), paused_garbage_collector():
            graph = build_graph(step)
            check_graph(graph)
            places = node_places(graph, step, looped.attached)
        asked = asked_by(step, method)
        submeshes = list(candidate_submeshes(self.cluster, stages.submeshes))
        if only is not None:
            submeshes = [submesh for submesh in submeshes if submesh in only]
        remat = {"none": (False,), "all": (True,)}.get(self.options.remat, (False, True))
        if not looped.has_backward:
            remat = (False,)
        with self.timer("tables"), paused_garbage_collector():
            bench = TableBench(graph, places, number, self.options.fold_layers, self.options.solver)

        def tables_of(
            chosen: Sequence[Submesh], prices: Sequence[float] = PRICES
        ) -> list[LayerTable]:
            with self.timer("tables"), paused_garbage_collector():
                return stage_tables(
                    graph,
                    places,
                    self.cluster,
                    chosen,
                    number,
                    constraints=lambda mesh: solver_constraints(graph, step, mesh, method, asked),
                    forbidden=forbidden_collectives(self.options),
                    prices=prices,
                    remat=remat,
                    bench=bench,
                )

        setting = self._setting(looped, number)
        if self.cluster.num_devices < MANY_DEVICES:
            tables = tables_of(submeshes)
            with self.timer("search"):
                choice, report = search_stages(tables, setting)
        else:
            tables, choice, report = self._search_many(looped, setting, submeshes, tables_of)
        with self.timer("search"):
            remember_search(report)
            other = None
            if is_free:
                found = self._another_number(looped, tables, setting, choice)
                if found is not None and (
                    choice is None or found.step_s < choice.step_s * (1 - WORTH_ANOTHER)
                ):
                    other = found if found.num_micro_batches != number else None
        return choice, report, other

    def _another_number(
        self,
        looped: LoopedStep,
        tables: Sequence[LayerTable],
        setting: Setting,
        choice: PipelineChoice | None,
    ) -> PipelineChoice | None:
        """The best stages with any number of micro-batches, by tables made at one of them. What is
        found with fewer rows than a host has devices may not be had, since tables may split rows
        over more devices: it is looked for if nothing else fits, or all else is slow for want of
        memory."""
        rows, most = batch_rows(looped.step), self.cluster.devices_per_host
        best = choice
        for least in (most, *(n for n in (2, 1) if n < most)):
            needless = least == 1 or best is None or not self._lacks_memory(looped, setting, best)
            if least < most and best is not None and needless:
                break
            candidates = candidate_micro_batches(rows, least_rows=min(rows, least))
            found = choose_micro_batches(tables, setting, candidates)
            if found is not None and (best is None or found.choice.step_s < best.step_s):
                best = found.choice
        return best

    def _lacks_memory(self, looped: LoopedStep, setting: Setting, choice: PipelineChoice) -> bool:
        """Whether a plan is slow, and memory may be the reason: a stage recomputes or is full."""
        flops = setting.num_micro_batches * sum(looped.layer_flops) / self.cluster.num_devices
        is_slow = choice.step_s > SLOW * least_work_s(self.cluster, flops)
        return is_slow and any(
            stage.remat or stage.peak_bytes > FULL * setting.budget_bytes(stage.submesh)
            for stage in choice.stages
        )

    def _search_many(
        self,
        looped: LoopedStep,
        setting: Setting,
        submeshes: Sequence[Submesh],
        tables_of: Callable[..., list[LayerTable]],
    ) -> tuple[list[LayerTable], PipelineChoice | None, SearchReport]:
        """(tables, the best stages, what was considered) on many devices: what the plans found so
        far show to be of no use is left out."""
        num_layers, number = len(looped.layers), setting.num_micro_batches
        flops = [number * own for own in looped.layer_flops]
        least_s = least_times(flops, lambda own: least_work_s(self.cluster, own))

        def searched(tables: list[LayerTable]) -> tuple[PipelineChoice | None, SearchReport, float]:
            with self.timer("search"):
                choice, report = search_stages(tables, setting)
            used = sum(prod(stage.submesh) for stage in choice.stages) if choice else 0
            is_whole = choice is not None and used == self.cluster.num_devices
            return choice, report, choice.step_s if choice and is_whole else inf

        even = self.cluster.num_devices / num_layers
        large = [s for s in submeshes if prod(s) >= even] or list(submeshes)
        tables = tables_of(large, prices=())
        known_s = searched(tables)[2]
        small = [s for s in submeshes if s not in large]
        slow = too_slow_submeshes(small, least_s, num_layers, known_s)
        tables += tables_of([s for s in small if s not in slow], prices=())
        choice, report, known_s = searched(tables)
        lacking = {
            table.submesh
            for table in tables
            if not table.remat and may_lack_memory(table, setting, least_s, known_s)
        }
        if lacking:
            tables = [table for table in tables if table.submesh not in lacking]
            tables += tables_of([s for s in submeshes if s in lacking])
            choice, report, _ = searched(tables)
        return tables, choice, replace(report, notes=(*report.notes, *_left_out(slow)))

    def _setting(self, looped: LoopedStep, number: int) -> Setting:
        schedule = self.method.schedule
        return Setting(
            self.cluster,
            np.array(boundary_bytes(looped.body, looped.attached), dtype=float),
            number,
            "1f1b" if schedule == "interleaved_1f1b" else schedule,
            self._budget(),
            launch_s(self.cluster),
            looped.has_backward,
        )

    def _budget(self) -> float:
        mesh = mesh_of_cluster(self.cluster, (self.cluster.num_devices,))
        found = memory_budget(mesh, ShardParallel(options=self.options), self.options)
        return inf if found is None else found

    def nothing_fits(self, looped: LoopedStep, report: SearchReport) -> MemoryBudgetError:
        budget = self._budget()
        reasons = " ".join(report.notes)
        return MemoryBudgetError(
            f"{looped.step.name}: no pipeline of its {report.num_layers} layers fits into the "
            f"budget of {format_bytes(budget)} per device. {reasons}",
            inf,
            budget,
        )


def _left_out(submeshes: Sequence[Submesh]) -> list[str]:
    if not submeshes:
        return []
    shapes = ", ".join(f"{hosts}×{devices}" for hosts, devices in submeshes)
    return [
        f"Submeshes {shapes} were left out: one layer on one of them, at full speed, would take as "
        "long as the whole step of the plan that was found."
    ]
