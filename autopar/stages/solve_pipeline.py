"""From stages to the plan of a pipeline: a looped step and `StageSpec`s → `PlannedStep`.

slice      the step, stages → a step per stage              (rewrite.stage_slices)
stages     a step per stage → a plan per stage              (stages.stage_plans)
simulate   plans of stages, a schedule → seconds of a step  (stages.simulate)
plan       all of the above → ParallelPlan                  (sharding.assemble)

A stage that does not fit is planned once more with its layers recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, prod

from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError, MemoryBudgetError, PlanError
from autopar.ir.graph import Graph
from autopar.ir.layering import Layering, LayerSource
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan, StagePlan, Tensor
from autopar.ir.stages import SearchReport
from autopar.ir.text import format_bytes
from autopar.ir.timeline import PipelineTimes
from autopar.lower.planned_step import PlannedStep
from autopar.lower.schedules import in_flight_bound, make_schedule
from autopar.methods import (
    AutoLayers,
    ManualStages,
    PipeshardParallel,
    ShardingOptions,
    ShardParallel,
)
from autopar.progress import Progress
from autopar.rewrite.layers_by_input import layers_by_arguments
from autopar.rewrite.split_stacks import Parts, Rows, StackPart, Stacks
from autopar.rewrite.stage_slices import WHOLE_STACKS, SlicedStep, StageSlice
from autopar.rewrite.step_source import StepSource
from autopar.sharding.assemble import PipelineDecision, bind_plan, stages_plan
from autopar.sharding.constraints import method_constraints
from autopar.sharding.method_text import method_text
from autopar.sharding.origin import Pins, bound_origin, pins_of
from autopar.sharding.planning_log import PlanningLog, paused_garbage_collector
from autopar.stages.layer_tables import submesh_cluster
from autopar.stages.looped import (
    LoopedStep,
    StageSpec,
    are_alike,
    find_looped,
    launch_s,
    layers_of,
    slice_into,
    with_even_stacks,
)
from autopar.stages.simulate import mesh_hosts, predicted_s, stage_times
from autopar.stages.stage_plans import (
    KnownShardings,
    SolvedStage,
    StageTask,
    StageTooLarge,
    in_flight_of,
    pins_for,
    plan_stage,
)
from autopar.stages.submeshes import place_submeshes
from autopar.tracer.build import build_graph
from autopar.tracer.costs import aval_bytes

_MUCH_COPIED = 2**20  # bytes of other stages' parameters that a stage may get without a warning


@dataclass(frozen=True)
class ExistingPlacement:
    """Where a step that follows another finds its arguments.

    devices, stage_mesh: of every stage.
    layering: how the layers were found, for the plan.
    owners:   input, by position -> the stage that holds it.
    specs:    input, by position -> its spec there.
    """

    devices: tuple[tuple[int, ...], ...]
    stage_mesh: tuple[int, ...]
    layering: Layering
    owners: Mapping[int, int] = field(default_factory=dict)
    specs: Mapping[int, PartitionSpec] = field(default_factory=dict)


@dataclass(frozen=True)
class PipelineTask:
    """What a pipeline is planned for, whatever its stages are.

    placement: where arguments are already, for a step that follows another.
    pins:      specs that come before what the method asks for.
    stack_parts: the stacks over layers that are split over stages; None to split what can be.
    reuse:     stages, by number, that need not be solved again.
    known:     shardings of stages that were solved, for equal ones.
    may_recompute: a stage that does not fit may recompute its layers, if the options say so.
    to_the_end: if no pipeline is found in time, search on.
    cuts, graphs: the stages that were cut last, and their graphs.
    """

    method: PipeshardParallel
    cluster: ClusterSpec
    log: PlanningLog
    placement: ExistingPlacement | None = None
    pins: Pins = field(default_factory=dict)
    stack_parts: Stacks | None = None
    reuse: Mapping[int, SolvedStage] = field(default_factory=dict)
    known: KnownShardings = field(default_factory=dict)
    may_recompute: bool = True
    to_the_end: bool = True
    cuts: dict[tuple, tuple[LoopedStep, SlicedStep]] = field(default_factory=dict)
    graphs: dict[int, tuple[StageSlice, Graph]] = field(default_factory=dict)

    @property
    def owners(self) -> Mapping[int, int] | None:
        return None if self.placement is None else self.placement.owners

    @property
    def splits_stacks(self) -> bool:
        """Whether stacks over layers may be split over stages as is best. Where stages share
        devices, they stay whole."""
        return self.stack_parts is None and self.method.schedule != "interleaved_1f1b"

    def alike(self, looped: LoopedStep, specs: list[StageSpec]) -> list[StageSpec]:
        """Stages like these over which stacks over layers can be split, if there are any."""
        if not self.splits_stacks or not looped.stack_rows:
            return specs
        return with_even_stacks(looped, specs) or specs

    def stacks(self, looped: LoopedStep, specs: Sequence[StageSpec]) -> Stacks:
        """Which stacks are split over these stages."""
        if self.stack_parts is not None:
            return self.stack_parts
        if not self.splits_stacks or not looped.stack_rows:
            return WHOLE_STACKS
        return partial(are_alike, tuple(specs))

    def sliced(
        self, looped: LoopedStep, specs: Sequence[StageSpec], *, may_be_unlike: bool = False
    ) -> SlicedStep:
        """The step cut into these stages; the last cut is kept. `may_be_unlike`: stacks are split
        even over stages over which they cannot be, as long as `alike` would change these."""
        stacks = self.stacks(looped, specs)
        key = (id(looped), *((spec.layers, spec.remat) for spec in specs))
        if isinstance(stacks, partial):
            key = (*key, may_be_unlike, *((spec.submesh, spec.mesh_shape) for spec in specs))
            if may_be_unlike and with_even_stacks(looped, specs) is not None:
                stacks = _any_parts
        if key not in self.cuts:
            self.cuts.clear()
            self.graphs.clear()
            with self.log.timed("slice"):
                self.cuts[key] = looped, slice_into(looped, specs, self.owners, stacks)
        return self.cuts[key][1]

    def graph_of(self, cut: StageSlice) -> Graph:
        """The graph of a stage of the last cut."""
        if id(cut) not in self.graphs:
            with self.log.timed("graph"), paused_garbage_collector():
                self.graphs[id(cut)] = cut, build_graph(cut.step)
        return self.graphs[id(cut)][1]


def _any_parts(_: Parts) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class PipelineOrigin:
    """What solves a pipeline's stages again (see `Origin`). `solved`: the stages' solutions, if
    known; `pins`: those of `with_pins`."""

    looped: LoopedStep
    method: PipeshardParallel
    cluster: ClusterSpec
    placement: ExistingPlacement | None
    solved: tuple[SolvedStage, ...]
    pins: Pins


@dataclass(frozen=True)
class _Stages:
    """The stages of a pipeline as they are solved."""

    specs: list[StageSpec]
    devices: list[tuple[int, ...]]
    stage_mesh: list[int]
    sliced: SlicedStep
    solved: list[SolvedStage]


def solve_pipeline(
    task: PipelineTask,
    looped: LoopedStep,
    specs: Sequence[StageSpec],
    report: SearchReport | None = None,
) -> PlannedStep:
    """The pipeline with these stages. `report`: the search that found them."""
    _check_schedule(task.method.schedule, looped, len(specs))
    method_constraints(
        looped.step, ShardParallel(options=task.method.options)
    )  # names patterns in vain
    stages = _solve_stages(task, looped, list(specs))
    plan = _plan(task, looped, stages, report)
    origin = PipelineOrigin(
        looped, task.method, task.cluster, task.placement, tuple(stages.solved), task.pins
    )
    return PlannedStep(looped.step, replace(plan, origin=origin), stages.sliced)


def _check_schedule(schedule: str, looped: LoopedStep, num_stages: int) -> None:
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


# -- devices


def _devices(
    task: PipelineTask, specs: Sequence[StageSpec]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """(devices of every stage, its mesh). Stages of an interleaved schedule share meshes."""
    if task.placement is not None:
        return list(task.placement.devices), list(task.placement.stage_mesh)
    submeshes = [spec.submesh for spec in specs]
    num_meshes = len(specs)
    if task.method.schedule == "interleaved_1f1b":
        num_meshes = _num_shared_meshes(submeshes, task.cluster)
    placed = place_submeshes(submeshes[:num_meshes], task.cluster)
    meshes = [k % num_meshes for k in range(len(specs))]
    return [tuple(placed[m]) for m in meshes], meshes


def _num_shared_meshes(submeshes: Sequence[tuple[int, int]], cluster: ClusterSpec) -> int:
    """How many of the stages fill the cluster; the others repeat their submeshes."""
    used, count = 0, 0
    while count < len(submeshes) and used < cluster.num_devices:
        used += prod(submeshes[count])
        count += 1
    repeats = all(s == submeshes[k % count] for k, s in enumerate(submeshes))
    if len(submeshes) % count or not repeats:
        raise ArgumentError(
            f"PipeshardParallel(schedule='interleaved_1f1b'): stage k shares the mesh of "
            f"stage k + {count}, so stages must be a multiple of {count} whose submeshes "
            f"repeat; the submeshes are {submeshes}. Give submeshes that repeat, or use "
            "schedule='1f1b'."
        )
    return count


# -- stages


def _solve_stages(task: PipelineTask, looped: LoopedStep, specs: list[StageSpec]) -> _Stages:
    """Plan every stage; recompute the layers of stages that do not fit otherwise."""
    devices, stage_mesh = _devices(task, specs)
    options = task.method.options
    may_recompute = task.may_recompute and options.remat == "auto" and looped.has_backward
    leads = [0]
    while True:
        sliced = task.sliced(looped, specs)
        try:
            solved = _solve_each(task, sliced, specs, max(stage_mesh) + 1, leads[-1])
        except StageTooLarge as miss:
            if miss.stage not in leads and any(sliced.stages[miss.stage].input_rows):
                leads.append(miss.stage)  # it may fit in a layout of its own choice
                continue
            if specs[miss.stage].remat or not may_recompute:
                raise _too_large(miss, specs, looped, options) from miss.error
            specs[miss.stage] = replace(specs[miss.stage], remat=True)
        else:
            return _Stages(specs, devices, stage_mesh, sliced, solved)


def _solve_each(
    task: PipelineTask,
    sliced: SlicedStep,
    specs: Sequence[StageSpec],
    num_meshes: int,
    lead: int = 0,
) -> list[SolvedStage]:
    """A solution per stage. Stages that hold rows of the same stack have it in the layout, and on
    the mesh, that the one solved first has chosen; `lead` is solved first."""
    method = task.method
    solved: dict[int, SolvedStage] = {}
    chosen: dict[int, tuple[tuple[int, ...], PartitionSpec]] = {}  # stack -> mesh shape, spec
    number = sliced.stages[0].step.num_micro_batches
    with Progress("solving stages", len(specs)) as progress:
        for k in (lead, *(k for k in range(len(specs)) if k != lead)):
            cut, spec = sliced.stages[k], specs[k]
            stacks = [n for n, rows in enumerate(cut.input_rows) if rows is not None]
            stage = task.reuse.get(k)
            if stage is None:
                in_flight = in_flight_bound(
                    method.schedule, len(specs), number, k, num_meshes=num_meshes
                )
                known = {
                    cut.inputs[n]: chosen[cut.inputs[n]] for n in stacks if cut.inputs[n] in chosen
                }
                in_specs = _input_specs(cut, task.placement, {i: s for i, (_, s) in known.items()})
                shapes = [shape for shape, _ in known.values()]
                mesh_shape = shapes[0] if shapes else spec.mesh_shape
                stage_task = StageTask(
                    cut, spec.submesh, mesh_shape, in_flight, in_specs, task.graph_of(cut)
                )
                with task.log.sharing(1 / (len(specs) - len(solved))):
                    stage = plan_stage(
                        k, stage_task, task.cluster, method.options, task.pins, task.known, task.log
                    )
            for n in stacks:
                tensor = stage.plan.inputs[n]
                choice = stage.plan.mesh_shape, stage.plan.spec_of(tensor)
                chosen.setdefault(cut.inputs[n], choice)
            solved[k] = stage
            progress.step()
    return [solved[k] for k in range(len(specs))]


def _input_specs(
    cut: StageSlice,
    placement: ExistingPlacement | None,
    chosen: Mapping[int, PartitionSpec],
) -> tuple[PartitionSpec | None, ...]:
    """Specs of a stage's inputs: of the user's arguments as they are, of the rest None. `chosen`:
    those of stacks on other stages."""
    if placement is None and not chosen:
        return ()
    known = {**(placement.specs if placement is not None else {}), **chosen}
    given = [known.get(i) for i in cut.inputs]
    return (*given, *[None] * (len(cut.step.avals) - len(given)))


def _too_large(
    miss: StageTooLarge,
    specs: Sequence[StageSpec],
    looped: LoopedStep,
    options: ShardingOptions,
) -> MemoryBudgetError:
    spec, error = specs[miss.stage], miss.error
    first, last = spec.layers
    remedies = {
        **error.remedies,
        "other stages": "give the stage fewer layers or more devices, or let stages=AutoStages() "
        "choose",
    }
    if options.remat == "auto":  # it was tried, and is no remedy
        remedies.pop("rematerialisation", None)
    return MemoryBudgetError(
        f"stage {miss.stage} of {len(specs)} (layers {first} to {last - 1} of "
        f"{len(looped.layers)}, on a submesh of {spec.submesh[0]}×{spec.submesh[1]}): "
        f"{error.problem}",
        error.peak_bytes,
        error.budget_bytes,
        tried=error.tried,
        remedies=remedies,
        num_micro_batches=error.num_micro_batches,
    )


# -- the plan


def _plan(
    task: PipelineTask, looped: LoopedStep, stages: _Stages, report: SearchReport | None
) -> ParallelPlan:
    recomputed = [i for spec in stages.specs if spec.remat for i in range(*spec.layers)]
    step = looped.recomputing(recomputed).step
    times, step_s = _simulated(task, stages, step.num_micro_batches)
    inputs, outputs = _tensors(stages)
    sent = [t.num_bytes * (step.num_micro_batches if t.phase else 1) for t in times.crossings]
    decision = PipelineDecision(
        inputs=inputs,
        outputs=outputs,
        layers=tuple(layer.name for layer in looped.layers),
        layering=_layering(task, looped),
        step_s=step_s,
        schedule=task.method.schedule,
        sent_bytes=sum(sent),
        warnings=(*step.notes, *_copied_state(stages.sliced)),
        search=report,
        times=times,
    )
    return stages_plan(
        step,
        _stage_plans(stages, times, step.num_micro_batches),
        method_text(task.method),
        task.cluster,
        decision,
        fingerprint_of=looped.step.program,
        seconds=task.log.seconds,
    )


def _simulated(
    task: PipelineTask, stages: _Stages, num_micro_batches: int
) -> tuple[PipelineTimes, float]:
    """(times of every stage, seconds of the step)."""
    name, cluster = task.method.schedule, task.cluster
    with task.log.timed("simulate"):
        times = stage_times(
            stages.sliced,
            stages.solved,
            devices=_used_devices(stages),
            stage_mesh=stages.stage_mesh,
            schedule=name,
            num_micro_batches=num_micro_batches,
            cluster=cluster,
            launch_s=launch_s(cluster),
        )
        schedule = make_schedule(
            name, len(stages.specs), num_micro_batches, stage_mesh=stages.stage_mesh
        )
        hosts = mesh_hosts(stages.devices, stages.stage_mesh, cluster.devices_per_host)
        return times, predicted_s(times, schedule, hosts)


def _used_devices(stages: _Stages) -> list[tuple[int, ...]]:
    return [
        devices[: stage.plan.num_devices]
        for devices, stage in zip(stages.devices, stages.solved, strict=True)
    ]


def _stage_plans(stages: _Stages, times: PipelineTimes, num_micro_batches: int) -> list[StagePlan]:
    devices = _used_devices(stages)
    plans = []
    for k, (spec, stage) in enumerate(zip(stages.specs, stages.solved, strict=True)):
        forward_s, backward_s = times.forward_s[k], times.backward_s[k]
        if times.weights_s:
            backward_s += times.weights_s[k]
        once_s = float(stage.costs.once_s[0])
        transfer_s = sum(t.seconds for t in times.crossings if t.target == k and t.phase)
        plans.append(
            StagePlan(
                layers=spec.layers,
                submesh=spec.submesh,
                mesh_shape=stage.plan.mesh_shape,
                cost=forward_s + backward_s + transfer_s + once_s / num_micro_batches,
                plan=stage.plan,
                devices=devices[k],
                mesh=stages.stage_mesh[k],
                forward_s=forward_s,
                backward_s=backward_s,
                once_s=once_s,
                transfer_s=transfer_s,
                remat=spec.remat,
            )
        )
    return plans


def _tensors(stages: _Stages) -> tuple[list[Tensor], list[Tensor]]:
    """All inputs and outputs of the step, with the stages that hold them: owner first, copies."""
    inputs: dict[int, list[tuple[Rows | None, Tensor]]] = {}
    outputs: dict[int, list[tuple[Rows | None, Tensor]]] = {}
    cuts = stages.sliced.stages
    received = [{value for value, _ in cut.received} for cut in cuts]
    for number, (cut, stage) in enumerate(zip(cuts, stages.solved, strict=True)):
        values, tensors = cut.step.program.inputs, stage.plan.inputs
        own = zip(cut.inputs, values, cut.input_rows, tensors, strict=False)
        for position, value, rows, tensor in own:
            copies = [n for n, got in enumerate(received) if value in got]
            tensor = replace(tensor, stages=(number, *copies))
            inputs.setdefault(position, []).append((rows, tensor))
        own = zip(cut.outputs, cut.output_rows, stage.plan.outputs, strict=False)
        for position, rows, tensor in own:
            outputs.setdefault(position, []).append((rows, replace(tensor, stages=(number,))))
    return (
        [_whole_tensor(inputs[i]) for i in range(len(inputs))],
        [_whole_tensor(outputs[o]) for o in range(len(outputs))],
    )


def _whole_tensor(held: Sequence[tuple[Rows | None, Tensor]]) -> Tensor:
    (rows, tensor), *others = held
    if rows is None:
        assert not others, f"{tensor.path} is on several stages"
        return tensor
    in_order = sorted(held, key=lambda one: one[0] or (0, 0))
    return joined([tensor for _, tensor in in_order])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """A stack, of the tensors of its stages in the order of their rows."""
    split = tuple(part.shape[0] for part in parts)
    shape = (sum(split), *parts[0].shape[1:])
    return replace(
        parts[0], shape=shape, stages=tuple(part.stages[0] for part in parts), split=split
    )


def parts_of(tensor: Tensor) -> Parts:
    """The parts of a tensor that is split over stages."""
    return tuple(
        StackPart(rows, stage)
        for stage, rows in zip(tensor.stages, tensor.rows(), strict=True)
        if rows is not None
    )


def stacks_of(plan: ParallelPlan) -> dict[int, Parts]:
    """The parts of a plan's inputs that are split over stages."""
    return {i: parts_of(t) for i, t in enumerate(plan.inputs) if t.split is not None}


def _layering(task: PipelineTask, looped: LoopedStep) -> Layering:
    """How the layers can be found again."""
    if task.placement is not None:
        return task.placement.layering
    layers = task.method.layers
    if not isinstance(layers, AutoLayers):
        return Layering(LayerSource.MANUAL)
    is_natural = layers.num_layers == "auto" and not isinstance(task.method.stages, ManualStages)
    if is_natural and len(find_looped(looped.step, AutoLayers()).layers) == len(looped.layers):
        return Layering(LayerSource.AUTO)
    return Layering(LayerSource.AUTO, len(looped.layers))


def _copied_state(sliced: SlicedStep) -> list[str]:
    """Warnings for stages that get much of others' parameters in every step."""
    warnings = []
    for number, stage in enumerate(sliced.stages):
        program = stage.step.program
        assert stage.step.loop is not None
        before = program.equations[: stage.step.loop + 1]
        read = {o for e in before for o in e.operands if isinstance(o, int)}
        sizes: dict[int, int] = {}
        for value, source in stage.received:
            if value in read:
                sizes[source] = sizes.get(source, 0) + aval_bytes(program.avals[value])
        warnings += [
            f"stage {number} gets {format_bytes(size)} of parameters from stage {source} in every "
            "step: they are shared by both, or stacked over layers, and then stay with one stage"
            for source, size in sizes.items()
            if size > _MUCH_COPIED
        ]
    return warnings


# -- plans solved again, and plans from elsewhere


def stage_specs(plan: ParallelPlan) -> list[StageSpec]:
    return [StageSpec(s.layers, s.submesh, s.mesh_shape, s.remat) for s in plan.stages]


def repin_pipeline(
    plan: ParallelPlan, origin: PipelineOrigin, pins: Pins, log: PlanningLog
) -> ParallelPlan:
    """The same stages on the same meshes, with these pins. Re-solves only the stages whose pins
    changed."""
    specs = stage_specs(plan)
    task = PipelineTask(
        origin.method,
        origin.cluster,
        log,
        origin.placement,
        pins,
        stacks_of(plan),
        may_recompute=False,
    )
    if origin.solved:
        stacks = task.stacks(origin.looped, specs)
        sliced = slice_into(origin.looped, specs, task.owners, stacks)
        unchanged = {
            k: stage
            for k, (cut, stage) in enumerate(zip(sliced.stages, origin.solved, strict=True))
            if pins_for(pins, cut) == pins_for(origin.pins, cut)
        }
        task = replace(task, reuse=unchanged)
    return solve_pipeline(task, origin.looped, specs, plan.search).plan


def bind_pipeline(
    plan: ParallelPlan, source: StepSource, cluster: ClusterSpec, log: PlanningLog
) -> PlannedStep:
    """A pipeline plan that was made elsewhere, for this step. `cluster`: what there is here."""
    with log.timed("slice"):
        step = source.as_loop(plan.num_micro_batches)
        bound = bind_plan(plan, step)
        looped, owners = _layers_of_plan(plan, LoopedStep(step, ()))
        sliced = slice_into(looped, stage_specs(plan), owners, stacks_of(plan))
    cluster = plan.cluster or cluster
    num_meshes = 1 + max(stage.mesh for stage in plan.stages)
    stages = []
    for k, (stage, cut) in enumerate(zip(plan.stages, sliced.stages, strict=True)):
        assert stage.plan is not None
        stage_plan = bind_plan(stage.plan, cut.step)
        if stage_plan.origin is None:
            in_flight = in_flight_bound(
                plan.schedule, len(plan.stages), plan.num_micro_batches, k, num_meshes=num_meshes
            )
            origin = bound_origin(
                stage_plan,
                cut.step,
                submesh_cluster(cluster, stage.submesh),
                in_flight_of(cut, in_flight),
                pins_for(pins_of(plan), cut),
            )
            stage_plan = replace(stage_plan, origin=origin)
        stages.append(replace(stage, plan=stage_plan))
    if bound.origin is None:
        bound = replace(bound, origin=_bound_origin(plan, looped, owners, cluster))
    return PlannedStep(looped.step, replace(bound, stages=tuple(stages)), sliced)


def _layers_of_plan(plan: ParallelPlan, looped: LoopedStep) -> tuple[LoopedStep, dict[int, int]]:
    """(the step with the plan's layers, the stage that holds each input if another step gave
    it)."""
    owners: dict[int, int] = {}
    step, layering = looped.step, plan.layering
    assert layering is not None, "a plan without a pipeline"
    if layering.is_following:
        owners = {i: tensor.stages[0] for i, tensor in enumerate(plan.inputs)}
    if layering.source is LayerSource.BY_ARGUMENTS:
        holders = {i: tensor.stages for i, tensor in enumerate(plan.inputs)}
        looped = LoopedStep(step, layers_by_arguments(step, holders)[0])
    else:
        looped = find_looped(step, layers_of(layering))
    if len(looped.layers) != len(plan.layers):
        raise PlanError(
            f"method=plan: the plan is for {len(plan.layers)} layers, and {step.name} "
            f"has {len(looped.layers)}. Plan again for this step."
        )
    return looped, owners


def _bound_origin(
    plan: ParallelPlan, looped: LoopedStep, owners: Mapping[int, int], cluster: ClusterSpec
) -> PipelineOrigin:
    assert plan.layering is not None, "a plan without a pipeline"
    budget = None if plan.memory_budget_bytes == inf else plan.memory_budget_bytes
    options = ShardingOptions(memory_budget_bytes=budget)
    method = PipeshardParallel(plan.num_micro_batches, schedule=plan.schedule, options=options)
    placement = ExistingPlacement(
        devices=tuple(stage.devices for stage in plan.stages),
        stage_mesh=tuple(stage.mesh for stage in plan.stages),
        layering=plan.layering,
        owners=owners,
        specs={i: plan.spec_of(plan.inputs[i]) for i in owners},
    )
    return PipelineOrigin(looped, method, cluster, placement, (), pins_of(plan))
