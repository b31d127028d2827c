"""Inter-operator planning: from the traces of a step to a pipeline.

loop     TracedStep at whole batch and micro-batch → one with a loop   (rewrite.accumulate)
layers   its body → layers, and every equation's layer                 (rewrite.layers, attach)
tables   Graph, submeshes → figures of every layer                     (stage_tables)
search   tables → stages on submeshes                                  (stages.stage_search)
slice    the step, stages → a step per stage                           (rewrite.stage_slices)
stages   a step per stage → a plan per stage                           (stage_plans)
plan     all of the above → ParallelPlan
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, prod

import numpy as np
from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError, MemoryBudgetError, PlanError
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import FOLLOWING, HELD, ParallelPlan, StagePlan
from autopar.ir.stages import SearchReport
from autopar.ir.traced_step import TracedStep
from autopar.lower.planned_step import PlannedStep
from autopar.lower.schedules import in_flight_bound, make_schedule
from autopar.methods import (
    AutoLayers,
    AutoStages,
    ManualLayers,
    ManualStages,
    PipeshardParallel,
    ShardingOptions,
    ShardParallel,
    UniformStages,
)
from autopar.progress import Progress
from autopar.rewrite.layers_by_input import layers_by_arguments
from autopar.rewrite.stage_slices import SlicedStep
from autopar.sharding.assemble import bind_plan, pipeline_plan
from autopar.sharding.constraints import asked_by
from autopar.sharding.origin import Pins, bound_origin, pins_of
from autopar.sharding.plan_mesh import PassTimer
from autopar.stages.choose_stages import StageChooser
from autopar.stages.layer_tables import submesh_cluster
from autopar.stages.looped import (
    Loop,
    LoopedStep,
    StageSpec,
    batch_rows,
    even_ranges,
    find_looped,
    first_micro_batches,
    halved,
    launch_s,
    layers_of,
    slice_into,
)
from autopar.stages.manual_stages import check_layer_ids
from autopar.stages.simulate import mesh_hosts, predicted_s, stage_times
from autopar.stages.stage_plans import (
    SolvedStage,
    StageSolver,
    StageTask,
    StageTooLarge,
    in_flight_of,
    pins_for,
)
from autopar.stages.stage_search import remember_search
from autopar.stages.submeshes import place, uniform_submesh


@dataclass(frozen=True)
class ExistingPlacement:
    """Where everything is already, for a step that follows another.

    devices, stage_mesh: of every stage.
    owners:   input, by position -> the stage that has it.
    specs:    input, by position -> how it lies there.
    layering: how the layers were found, for the plan.
    """

    devices: tuple[tuple[int, ...], ...]
    stage_mesh: tuple[int, ...]
    layering: str
    owners: Mapping[int, int] = field(default_factory=dict)
    specs: Mapping[int, PartitionSpec] = field(default_factory=dict)


def plan_pipeline(
    loop: Loop, method: PipeshardParallel, cluster: ClusterSpec, timer: PassTimer
) -> PlannedStep:
    """A pipeline as a method asks for it."""
    planner = _Planner(loop, method, cluster, timer)
    if isinstance(method.stages, AutoStages):
        return planner.searched()
    if method.num_micro_batches == "auto":
        raise ArgumentError(
            "PipeshardParallel(num_micro_batches='auto'): needs stages=AutoStages(), which "
            "searches it. Give a number with stages that are given."
        )
    assert isinstance(method.num_micro_batches, int)
    return planner.given(method.num_micro_batches)


def plan_following(
    looped: LoopedStep,
    specs: list[StageSpec],
    lying: ExistingPlacement,
    cluster: ClusterSpec,
    timer: PassTimer,
) -> PlannedStep:
    """A pipeline on stages that another step has."""
    schedule = "gpipe" if looped.has_backward else "inference"
    stages = ManualStages(
        [list(range(*spec.layers)) for spec in specs],
        [spec.submesh for spec in specs],
        [spec.mesh_shape for spec in specs],
    )
    number = looped.step.num_micro_batches
    method = PipeshardParallel(number, stages=stages, schedule=schedule)
    planner = _Planner(lambda _: looped.step, method, cluster, timer, lying)
    return planner.finish(looped, specs, None)


def bind_pipeline(
    plan: ParallelPlan, loop: Loop, timer: PassTimer, cluster: ClusterSpec
) -> PlannedStep:
    """A pipeline plan that was made elsewhere, for this step. `cluster`: what there is here."""
    with timer("slice"):
        step = loop(plan.num_micro_batches)
        bound = bind_plan(plan, step)
        owners: dict[int, int] = {}
        layering = plan.layering
        if layering.startswith(FOLLOWING):
            owners = {i: tensor.stages[0] for i, tensor in enumerate(plan.inputs)}
            layering = layering.removeprefix(FOLLOWING)
        if layering == HELD:
            holders = {i: tensor.stages for i, tensor in enumerate(plan.inputs)}
            looped = LoopedStep(step, layers_by_arguments(step, holders)[0])
        else:
            looped = find_looped(step, layers_of(layering))
        if len(looped.layers) != len(plan.layers):
            raise PlanError(
                f"method=plan: the plan is for {len(plan.layers)} layers, and {looped.step.name} "
                f"has {len(looped.layers)}. Plan again for this step."
            )
        specs = [StageSpec(s.layers, s.submesh, s.mesh_shape, s.remat) for s in plan.stages]
        sliced = slice_into(looped, specs, owners)
    own, number = [], plan.num_micro_batches
    cluster = plan.cluster or cluster
    num_meshes = 1 + max(stage.mesh for stage in plan.stages)
    for k, (stage, cut) in enumerate(zip(plan.stages, sliced.stages, strict=True)):
        assert stage.plan is not None
        part = bind_plan(stage.plan, cut.step)
        if part.origin is None:
            in_flight = in_flight_bound(plan.schedule, len(specs), number, k, num_meshes=num_meshes)
            change = in_flight_of(cut, in_flight)
            pins = pins_for(pins_of(plan), cut)
            whole = submesh_cluster(cluster, stage.submesh)
            part = replace(part, origin=bound_origin(part, cut.step, whole, change, pins))
        own.append(replace(stage, plan=part))
    if bound.origin is None:
        bound = replace(bound, origin=_bound_origin(plan, looped, owners, cluster))
    return PlannedStep(looped.step, replace(bound, stages=tuple(own)), sliced)


def _bound_origin(
    plan: ParallelPlan, looped: LoopedStep, owners: Mapping[int, int], cluster: ClusterSpec
) -> PipelineOrigin:
    budget = None if plan.memory_budget_bytes == inf else plan.memory_budget_bytes
    options = ShardingOptions(memory_budget_bytes=budget)
    method = PipeshardParallel(plan.num_micro_batches, schedule=plan.schedule, options=options)
    lying = ExistingPlacement(
        devices=tuple(stage.devices for stage in plan.stages),
        stage_mesh=tuple(stage.mesh for stage in plan.stages),
        layering=plan.layering,
        owners=owners,
        specs={i: plan.spec_of(plan.inputs[i]) for i in owners},
    )
    return PipelineOrigin(looped, method, cluster, lying, (), pins_of(plan))


@dataclass(frozen=True, eq=False)
class PipelineOrigin:
    """What solves a pipeline's stages again (see `Origin`). `solved`: as they were solved, if that
    is known; `pins`: what `with_pins` asked for."""

    looped: LoopedStep
    method: PipeshardParallel
    cluster: ClusterSpec
    lying: ExistingPlacement | None
    solved: tuple[SolvedStage, ...]
    pins: Pins


def repin_pipeline(
    plan: ParallelPlan, origin: PipelineOrigin, pins: Pins, timer: PassTimer
) -> ParallelPlan:
    """The same stages on the same meshes, with these specs. Only stages are solved whose arrays
    pins speak of that are new."""
    looped = origin.looped
    planner = _Planner(
        lambda _: looped.step, origin.method, origin.cluster, timer, origin.lying, pins
    )
    planner.options = replace(planner.options, remat="none")
    specs = [StageSpec(s.layers, s.submesh, s.mesh_shape, s.remat) for s in plan.stages]
    if origin.solved:
        sliced = slice_into(looped, specs, None if origin.lying is None else origin.lying.owners)
        planner.known = [
            None if pins_for(pins, cut) != pins_for(origin.pins, cut) else own
            for cut, own in zip(sliced.stages, origin.solved, strict=True)
        ]
    return planner.finish(looped, specs, plan.search).plan


def _recomputes_more(plan: ParallelPlan, report: SearchReport) -> bool:
    """Whether more stages are recomputed than the best plan of the tables has."""
    meant = sum(stage.remat for stage in report.best[0].stages)
    return sum(stage.remat for stage in plan.stages) > meant


class _Planner:
    def __init__(
        self,
        loop: Loop,
        method: PipeshardParallel,
        cluster: ClusterSpec,
        timer: PassTimer,
        lying: ExistingPlacement | None = None,
        pins: Pins | None = None,
    ) -> None:
        self.loop, self.method, self.cluster, self.timer = loop, method, cluster, timer
        self.lying = lying
        self.pins = pins or {}
        self.options = method.options
        self.solver = StageSolver(cluster, method.options, timer, self.pins)
        self.chooser = StageChooser(method, cluster, timer)
        self.known: Sequence[SolvedStage | None] = ()  # stages that need not be solved again

    # -- stages that are given

    def given(self, num_micro_batches: int) -> PlannedStep:
        stages = self.method.stages
        least = stages.num_stages if isinstance(stages, UniformStages) else 1
        if isinstance(stages, ManualStages) and self.method.layers == AutoLayers():
            count = sum(map(len, stages.layer_ids))
            looped = self.looped(num_micro_batches, AutoLayers(count))
        else:
            looped = self.looped(num_micro_batches, self.method.layers, least)
        if isinstance(stages, UniformStages):
            specs = self.uniform(stages.num_stages, looped)
        else:
            assert isinstance(stages, ManualStages)
            check_layer_ids(stages.layer_ids, len(looped.layers))
            shapes = stages.mesh_shapes or (None,) * len(stages.submeshes)
            ends = [0, *np.cumsum([len(ids) for ids in stages.layer_ids]).tolist()]
            specs = [
                StageSpec(layers, submesh, shape)
                for layers, submesh, shape in zip(
                    pairwise(ends), stages.submeshes, shapes, strict=True
                )
            ]
        if self.options.remat == "all":
            specs = [replace(spec, remat=True) for spec in specs]
        return self.finish(looped, specs, None)

    def looped(
        self, num_micro_batches: int, layers: AutoLayers | ManualLayers, at_least: int = 1
    ) -> LoopedStep:
        with self.timer("trace"):
            step = self.loop(num_micro_batches)
        with self.timer("layers"):
            return find_looped(step, layers, at_least)

    def looped_near(self, number: int, other_than: int) -> LoopedStep | None:
        """The step in so many micro-batches; if it is not the same program with so few rows, in
        half as many and so on, as long as these are more than the number that is known."""
        while number > other_than:
            try:
                return self.looped(number, self.method.layers)
            except Exception:  # ours, or the user's own: a function that needs more rows
                if number % 2:
                    return None
                number //= 2
                if number <= other_than:
                    return None
        return self.looped(number, self.method.layers) if number < other_than else None

    def uniform(self, num_stages: int, looped: LoopedStep) -> list[StageSpec]:
        num_layers = len(looped.layers)
        if num_stages > num_layers:
            raise ArgumentError(
                f"UniformStages(num_stages={num_stages}): every stage needs a layer, and there are "
                f"{num_layers}. Ask for {num_layers} stages or fewer, or for more layers with "
                "layers=AutoLayers(…)."
            )
        num_meshes = num_stages
        if self.method.schedule == "interleaved_1f1b":
            if num_stages % 2:
                raise ArgumentError(
                    f"UniformStages(num_stages={num_stages}): schedule='interleaved_1f1b' runs two "
                    "stages on every submesh, so it needs an even number of them. Ask for "
                    f"{num_stages + 1}, or use schedule='1f1b'."
                )
            num_meshes = num_stages // 2
        submesh = uniform_submesh(num_meshes, self.cluster)
        ranges = even_ranges([layer.flops for layer in looped.layers], num_stages)
        return [StageSpec(layers, submesh) for layers in ranges]

    # -- stages that are searched

    def searched(self) -> PlannedStep:
        asked = self.method.num_micro_batches
        number = first_micro_batches(self.loop(1), self.cluster) if asked == "auto" else int(asked)
        looped = self.looped(number, self.method.layers)
        choice, report, other = self.chooser.search(looped, number, asked == "auto")
        rows = batch_rows(looped.step)
        again = None if other is None else self.looped_near(other.num_micro_batches, number)
        if other is not None and again is not None:
            count = again.step.num_micro_batches
            submeshes = {s.submesh for plan in (*report.best, other) for s in plan.stages}
            few_rows = rows // count < self.cluster.devices_per_host  # which tables know little of
            found = self.chooser.search(again, count, False, None if few_rows else submeshes)
            if choice is None or (found[0] is not None and found[0].step_s < choice.step_s):
                looped, (choice, report, _) = again, found
        if choice is None and asked == "auto" and rows % 2 == 0:  # as small as can be split
            least = self.looped_near(rows // 2, looped.step.num_micro_batches)
            if least is not None:
                looped = least
                choice, report, _ = self.chooser.search(
                    looped, looped.step.num_micro_batches, False
                )
        if choice is None:
            raise self.chooser.nothing_fits(looped, report)
        planned = self.best_solved(looped, report)
        if asked == "auto" and _recomputes_more(planned.plan, report):
            return self.with_smaller(planned)
        return planned

    def with_smaller(self, planned: PlannedStep) -> PlannedStep:
        """The same submeshes with micro-batches half as large, if that is faster: tables had more
        room than the stages themselves, so that these were recomputed where it was not meant."""
        count = planned.plan.num_micro_batches
        looped = self.looped_near(2 * count, count)
        if looped is None:
            return planned
        submeshes = {stage.submesh for stage in planned.plan.stages}
        choice, report, _ = self.chooser.search(looped, 2 * count, False, submeshes)
        if choice is None or choice.step_s >= planned.plan.estimated_step_s:
            return planned
        try:
            smaller = self.best_solved(looped, report)
        except MemoryBudgetError:
            return planned
        faster = smaller.plan.estimated_step_s < planned.plan.estimated_step_s
        return smaller if faster else planned

    def best_solved(self, looped: LoopedStep, report: SearchReport) -> PlannedStep:
        """The best of the plans that the tables give, as solved exactly: the first, and others as
        long as the tables promise more than has been found, or others are wanted too."""
        considered = self.timer.considered
        least = 1 if considered is None else considered.num
        best: PlannedStep | None = None
        misfit: MemoryBudgetError | None = None
        checked: list[tuple[float, float]] = []
        for choice in report.best:
            enough = len(checked) >= least
            if best is not None and enough and choice.step_s >= best.plan.estimated_step_s:
                break
            specs = [StageSpec(s.layers, s.submesh, s.mesh_shape, s.remat) for s in choice.stages]
            if self.method.schedule == "interleaved_1f1b":
                specs = halved(specs, looped)
            try:
                found = self.timer.consider(self.finish(looped, specs, report))
            except MemoryBudgetError as error:
                misfit = misfit or error
                continue
            exact_s = found.plan.estimated_step_s
            checked.append((choice.step_s, exact_s))
            if best is None or exact_s < best.plan.estimated_step_s:
                best = found
        if best is None:
            assert misfit is not None
            raise misfit
        report = replace(report, checked=tuple(checked))
        remember_search(report)
        return replace(best, plan=replace(best.plan, search=report))

    # -- from stages to a plan

    def finish(
        self, looped: LoopedStep, specs: list[StageSpec], report: SearchReport | None
    ) -> PlannedStep:
        self.check(looped, len(specs))
        asked_by(looped.step, ShardParallel(options=self.options))  # patterns that match nothing
        devices, stage_mesh = self.devices(specs)
        while True:
            with self.timer("slice"):
                owners = None if self.lying is None else self.lying.owners
                sliced = slice_into(looped, specs, owners)
            try:
                solved = self.solve(sliced, specs, stage_mesh)
                break
            except StageTooLarge as miss:
                may_recompute = self.options.remat == "auto" and looped.has_backward
                if specs[miss.stage].remat or not may_recompute:
                    raise self.too_large(miss, specs, looped) from miss.error
                specs[miss.stage] = replace(specs[miss.stage], remat=True)
        step = looped.recomputing([i for s in specs if s.remat for i in range(*s.layers)]).step
        plan = self.assembled(step, looped, sliced, specs, solved, devices, stage_mesh, report)
        origin = PipelineOrigin(
            looped, self.method, self.cluster, self.lying, tuple(solved), self.pins
        )
        return PlannedStep(looped.step, replace(plan, origin=origin), sliced)

    def check(self, looped: LoopedStep, num_stages: int) -> None:
        schedule = self.method.schedule
        if schedule != "inference" and not looped.has_backward:
            raise ArgumentError(
                f"PipeshardParallel(schedule={schedule!r}): {looped.step.name} has no backward "
                "pass. Use schedule='inference' for a step that takes no gradient."
            )
        if schedule == "inference" and looped.has_backward:
            raise ArgumentError(
                f"PipeshardParallel(schedule='inference'): {looped.step.name} takes a gradient. "
                "Use a training schedule such as '1f1b'."
            )
        make_schedule(schedule, num_stages, 1, stage_mesh=list(range(num_stages)))

    def devices(self, specs: Sequence[StageSpec]) -> tuple[list[tuple[int, ...]], list[int]]:
        """(devices of every stage, its mesh). Stages of an interleaved schedule share meshes."""
        if self.lying is not None:
            return list(self.lying.devices), list(self.lying.stage_mesh)
        submeshes = [spec.submesh for spec in specs]
        num_meshes = len(specs)
        if self.method.schedule == "interleaved_1f1b":
            used, count = 0, 0
            while count < len(specs) and used < self.cluster.num_devices:
                used += prod(submeshes[count])
                count += 1
            num_meshes = count
            if len(specs) % count or any(
                s != submeshes[k % count] for k, s in enumerate(submeshes)
            ):
                raise ArgumentError(
                    f"PipeshardParallel(schedule='interleaved_1f1b'): stage k shares the mesh of "
                    f"stage k + {count}, so stages must be a multiple of {count} whose submeshes "
                    f"repeat; the submeshes are {submeshes}. Give submeshes that repeat, or use "
                    "schedule='1f1b'."
                )
        placed = place(submeshes[:num_meshes], self.cluster)
        meshes = [k % num_meshes for k in range(len(specs))]
        return [tuple(placed[m]) for m in meshes], meshes

    def solve(
        self, sliced: SlicedStep, specs: Sequence[StageSpec], stage_mesh: Sequence[int]
    ) -> list[SolvedStage]:
        number = sliced.stages[0].step.num_micro_batches
        num_meshes = max(stage_mesh) + 1
        solved = []
        with Progress("solving stages", len(specs)) as progress:
            for stage, (own, spec) in enumerate(zip(sliced.stages, specs, strict=True)):
                known = self.known[stage] if stage < len(self.known) else None
                if known is not None:
                    solved.append(known)
                    progress.step()
                    continue
                in_flight = in_flight_bound(
                    self.method.schedule, len(specs), number, stage, num_meshes=num_meshes
                )
                in_specs = ()
                if self.lying is not None:
                    known = [self.lying.specs.get(i) for i in own.inputs]
                    in_specs = (*known, *[None] * (len(own.step.avals) - len(known)))
                task = StageTask(own, spec.submesh, spec.mesh_shape, in_flight, in_specs)
                solved.append(self.solver.solve(stage, task))
                progress.step()
        return solved

    def too_large(
        self, miss: StageTooLarge, specs: Sequence[StageSpec], looped: LoopedStep
    ) -> MemoryBudgetError:
        spec = specs[miss.stage]
        first, last = spec.layers
        error = miss.error
        text = str(error)
        if self.options.remat == "auto":  # which was tried
            lines = text.split("\n")
            text = "\n".join(x for x in lines if not x.startswith("  - rematerialisation"))
        return MemoryBudgetError(
            f"stage {miss.stage} of {len(specs)} (layers {first} to {last - 1} of "
            f"{len(looped.layers)}, on a submesh of {spec.submesh[0]}×{spec.submesh[1]}): {text}\n"
            "  - give the stage fewer layers or more devices, or let stages=AutoStages() choose",
            error.peak_bytes,
            error.budget_bytes,
        )

    def assembled(
        self,
        step: TracedStep,
        looped: LoopedStep,
        sliced: SlicedStep,
        specs: Sequence[StageSpec],
        solved: Sequence[SolvedStage],
        devices: Sequence[tuple[int, ...]],
        stage_mesh: Sequence[int],
        report: SearchReport | None,
    ) -> ParallelPlan:
        number = step.num_micro_batches
        with self.timer("simulate"):
            times = stage_times(
                sliced,
                solved,
                devices=[devices[k][: own.plan.num_devices] for k, own in enumerate(solved)],
                stage_mesh=stage_mesh,
                schedule=self.method.schedule,
                num_micro_batches=number,
                cluster=self.cluster,
                launch_s=launch_s(self.cluster),
            )
            schedule = make_schedule(
                self.method.schedule, len(specs), number, stage_mesh=stage_mesh
            )
            hosts = mesh_hosts(devices, stage_mesh, self.cluster.devices_per_host)
            step_s = predicted_s(times, schedule, hosts)
        stages = []
        for k, (spec, own) in enumerate(zip(specs, solved, strict=True)):
            forward_s, backward_s = times.forward_s[k], times.backward_s[k]
            if times.weights_s:
                backward_s += times.weights_s[k]
            once_s = float(own.figures.once_s[0])
            waits = sum(c.seconds for c in times.crossings if c.target == k and c.phase)
            stages.append(
                StagePlan(
                    spec.layers,
                    spec.submesh,
                    own.plan.mesh_shape,
                    forward_s + backward_s + waits + once_s / number,
                    own.plan,
                    devices[k][: own.plan.num_devices],
                    stage_mesh[k],
                    forward_s,
                    backward_s,
                    once_s,
                    waits,
                    spec.remat,
                )
            )
        layering = "manual" if self.lying is None else self.lying.layering
        if self.lying is None and isinstance(self.method.layers, AutoLayers):
            natural = self.method.layers.num_layers == "auto" and not isinstance(
                self.method.stages, ManualStages
            )
            same = natural and len(find_looped(looped.step, AutoLayers()).layers) == len(
                looped.layers
            )
            layering = "auto" if same else str(len(looped.layers))
        plan = pipeline_plan(
            looped.step,
            step,
            sliced,
            tuple(stages),
            method=self.method,
            layers=tuple(layer.name for layer in looped.layers),
            layering=layering,
            schedule=self.method.schedule,
            step_s=step_s,
            sent_bytes=sum(c.num_bytes * (number if c.phase else 1) for c in times.crossings),
            seconds=dict(self.timer.seconds),
            search=report,
            cluster=self.cluster,
        )
        return replace(plan, cluster=self.cluster, times=times)
