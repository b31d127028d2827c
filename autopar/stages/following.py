"""Functions beside a train step that keep to its layouts: from its plan to theirs.

    CreateStateParallel   an initialiser's results lie where the train step wants its state
    FollowParallel        an evaluation takes its arguments where the train step has them

Beside a step on one mesh both come to a `PlacedParallel`, a mesh and a spec per array; the solver
shards everything between. Beside a pipeline an evaluation becomes a pipeline on the same stages:
its layers are those of training if they are found again, else what each stage can do with the
parameters it holds. An initialiser becomes one program per stage, which makes that stage's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError, TraceError
from autopar.ir.host_memory import HostMemory
from autopar.ir.layering import BY_ARGUMENTS, PER_STAGE_OUTPUTS, Layering, LayerSource
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.plan import ParallelPlan, StagePlan, Tensor, item_bytes
from autopar.ir.rows import Rows
from autopar.ir.spec import num_shards
from autopar.ir.traced_step import TracedStep
from autopar.lower.planned_step import PlannedStep
from autopar.methods import (
    CreateStateParallel,
    FollowParallel,
    ManualStages,
    PipeshardParallel,
    PlacedParallel,
)
from autopar.rewrite.layers_by_input import layers_by_arguments
from autopar.rewrite.only_results import only_results
from autopar.rewrite.split_stacks import Parts, StackPart, split_stacks
from autopar.rewrite.stage_placement import place_stages
from autopar.rewrite.step_source import StepSource
from autopar.sharding.assemble import PipelineDecision, bind_plan, stages_plan
from autopar.sharding.origin import bound_origin
from autopar.sharding.plan_mesh import ShardingTask, plan_mesh
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.tried import why_not_cut
from autopar.stages.layer_tables import submesh_cluster
from autopar.stages.looped import LoopedStep, StageSpec, find_looped, layers_of
from autopar.stages.pipeline_task import ExistingPlacement, PipelineTask
from autopar.stages.solve_pipeline import solve_pipeline
from autopar.stages.stage_tensors import held_specs, joined, parts_of
from autopar.stages.training_arrays import arguments_of_training, state_of_training
from autopar.tracer.costs import aval_bytes


def plan_following(
    source: StepSource,
    method: CreateStateParallel | FollowParallel,
    cluster: ClusterSpec,
    log: PlanningLog,
) -> PlannedStep:
    """An initialiser or an evaluation, by the train step's plan."""
    if isinstance(method, CreateStateParallel):
        plan, tensors = state_of_training(source.whole, method)
        if plan.is_pipeline:
            return _make_on_stages(source.whole, plan, tensors, cluster, log)
        specs = tuple(map(plan.spec_of, tensors))
        placed = PlacedParallel("CreateStateParallel", _mesh_of(plan, cluster), out_specs=specs)
        made = plan_mesh(ShardingTask(source.whole, cluster, placed), log)
        return _with_host_memory(made, plan, outputs=dict(enumerate(tensors)))
    else:
        plan, matches = arguments_of_training(source.whole, method)
        if plan.is_pipeline:
            return _follow_pipeline(source, plan, matches, cluster, log)
        placed = _placed_arguments(source.whole, plan, matches, cluster)
    planned = plan_mesh(ShardingTask(source.whole, cluster, placed), log)
    read = {v for equation in source.whole.program.equations for v in equation.inputs}
    read.update(source.whole.program.output_values)
    unread = {i: t for i, t in matches.items() if source.whole.program.inputs[i] not in read}
    return _with_host_memory(planned, plan, inputs=unread)


# -- beside a step on one mesh


def _with_host_memory(
    planned: PlannedStep,
    training: ParallelPlan,
    inputs: Mapping[int, Tensor] | None = None,
    outputs: Mapping[int, Tensor] | None = None,
) -> PlannedStep:
    """The plan of a function that makes, or takes and does not read, state that training keeps in
    host memory. `inputs`, `outputs`: of the function -> the same array of the train step."""
    if training.host is None:
        return planned
    on_host = {id(training.inputs[i]) for i in training.host.inputs}
    hosted = [
        {i: tensor for i, tensor in (arrays or {}).items() if id(tensor) in on_host}
        for arrays in (inputs, outputs)
    ]
    if not any(hosted):
        return planned
    num_bytes = sum(
        prod(tensor.shape)
        * item_bytes(tensor.dtype)
        / num_shards(tensor.layout, training.mesh_shape)
        for arrays in hosted
        for tensor in arrays.values()
    )
    host = HostMemory(tuple(hosted[0]), tuple(hosted[1]), num_bytes=num_bytes)
    return replace(planned, plan=replace(planned.plan, host=host))


def _mesh_of(plan: ParallelPlan, cluster: ClusterSpec) -> LogicalMesh:
    return replace(mesh_of_cluster(cluster, plan.mesh_shape), axis_names=plan.axis_names)


def _placed_arguments(
    step: TracedStep, plan: ParallelPlan, matches: Mapping[int, Tensor], cluster: ClusterSpec
) -> PlacedParallel:
    mesh = _mesh_of(plan, cluster)
    in_specs: list[PartitionSpec | None] = []
    for index, aval in enumerate(step.avals):
        if index in matches:
            in_specs.append(plan.spec_of(matches[index]))
        else:
            is_batch = index in step.batch
            in_specs.append(_batch_spec(tuple(aval.shape), plan, mesh) if is_batch else None)
    return PlacedParallel("FollowParallel", mesh, in_specs=tuple(in_specs))


def _batch_spec(
    shape: tuple[int, ...], plan: ParallelPlan, mesh: LogicalMesh
) -> PartitionSpec | None:
    """The first dimension over those of the axes that split training's which divide it."""
    batch = next((t for t in plan.inputs if t.role == "batch" and t.shape), None)
    if batch is None or not shape:
        return None
    axes: list[int] = []
    for axis, entry in enumerate(batch.layout):
        if entry == 0 and shape[0] % prod(mesh.shape[a] for a in (*axes, axis)) == 0:
            axes.append(axis)
    return PartitionSpec(tuple(mesh.axis_names[a] for a in axes) or None)


# -- evaluations beside a pipeline


def _follow_pipeline(
    source: StepSource,
    plan: ParallelPlan,
    matches: Mapping[int, Tensor],
    cluster: ClusterSpec,
    log: PlanningLog,
) -> PlannedStep:
    """`matches`: input of the evaluation, by position -> the same array of the train step. A
    function that reads no batch runs on all devices, to which its arguments then move."""
    try:
        step = _as_loop(source, plan.num_micro_batches, log)
    except TraceError:
        mesh = mesh_of_cluster(cluster, (cluster.num_devices,))
        method = PlacedParallel("FollowParallel", mesh)
        return plan_mesh(ShardingTask(source.whole, cluster, method), log)
    matches = {i: tensor for i, tensor in matches.items() if tensor.role != "batch"}
    chosen = _choose(step, plan, matches)
    stages = [plan.stages[s] for s in chosen.stages]
    meshes = list(dict.fromkeys(stage.mesh for stage in stages))
    number_of = {old: new for new, old in enumerate(chosen.stages)}
    stacks = _parts_on(matches, number_of)
    owners = {
        i: number_of[t.stages[0]]
        for i, t in matches.items()
        if t.split is None and t.stages[0] in number_of
    }
    placement = ExistingPlacement(
        devices=tuple(stage.devices for stage in stages),
        stage_mesh=tuple(meshes.index(stage.mesh) for stage in stages),
        layering=replace(chosen.layering, is_following=True),
        owners=owners,
        specs=held_specs(plan, {i: matches[i] for i in (*owners, *stacks)}),
    )
    specs = [
        StageSpec(layers, stage.submesh, stage.mesh_shape)
        for layers, stage in zip(chosen.ranges, stages, strict=True)
    ]
    method = PipeshardParallel(
        step.num_micro_batches,
        stages=ManualStages(
            [list(range(*spec.layers)) for spec in specs],
            [spec.submesh for spec in specs],
            [spec.mesh_shape for spec in specs],
        ),
        schedule="gpipe" if chosen.looped.has_backward else "inference",
    )
    task = PipelineTask(method, cluster, log, placement, stack_parts=stacks)
    planned = solve_pipeline(task, chosen.looped, specs)
    return replace(planned, plan=replace(planned.plan, method="FollowParallel()"))


def _parts_on(matches: Mapping[int, Tensor], number_of: Mapping[int, int]) -> dict[int, Parts]:
    """The parts of stacks that training has split over its stages, by the stages' new numbers; of
    a stack some of whose stages are not among them, none."""
    stacks: dict[int, Parts] = {}
    for i, tensor in matches.items():
        if tensor.split is not None and all(stage in number_of for stage in tensor.stages):
            parts = parts_of(tensor)
            stacks[i] = tuple(replace(part, stage=number_of[part.stage]) for part in parts)
    return stacks


def _as_loop(source: StepSource, num_micro_batches: int, log: PlanningLog) -> TracedStep:
    """As many micro-batches as training has, unless that is impossible or changes results."""
    if num_micro_batches > 1 and why_not_cut(source.as_loop, num_micro_batches, log) is None:
        step = source.as_loop(num_micro_batches)
        if not step.notes:
            return step
    return source.as_loop(1)


@dataclass(frozen=True)
class _FollowedStages:
    """The layers of an evaluation, and per stage their range and the number it has in training."""

    looped: LoopedStep
    ranges: tuple[tuple[int, int], ...]
    stages: tuple[int, ...]
    layering: Layering


def _choose(step: TracedStep, plan: ParallelPlan, matches: Mapping[int, Tensor]) -> _FollowedStages:
    """Training's own layers, if they leave all parameters where they are."""
    holders = {i: tensor.stages for i, tensor in matches.items() if tensor.split is None}
    layers, stages = layers_by_arguments(step, holders)
    every = tuple((k, k + 1) for k in range(len(stages)))
    held = _FollowedStages(LoopedStep(step, layers), every, stages, BY_ARGUMENTS)
    layering = _training_layering(plan)
    try:
        looped = find_looped(step, layers_of(layering))
        if len(looped.layers) != len(plan.layers):
            layering = Layering(LayerSource.AUTO, len(plan.layers))
            looped = find_looped(step, layers_of(layering))
    except (TraceError, ArgumentError):  # this function has no such layers
        return held
    ranges = tuple(stage.layers for stage in plan.stages)
    same = _FollowedStages(looped, ranges, tuple(range(len(ranges))), layering)
    if len(looped.layers) != len(plan.layers) or _moved_bytes(same, matches):
        return held if stages else same
    return same


def _training_layering(plan: ParallelPlan) -> Layering:
    if plan.layering is None or plan.layering.source is LayerSource.BY_ARGUMENTS:
        return Layering(LayerSource.AUTO, len(plan.layers))
    return replace(plan.layering, is_following=False)


def _moved_bytes(chosen: _FollowedStages, matches: Mapping[int, Tensor]) -> int:
    """Of arguments that would have to be copied to another stage than training has them on."""
    step, attached = chosen.looped.step, chosen.looped.attached
    assert step.loop is not None
    stage_of_layer = [s for s, layers in enumerate(chosen.ranges) for _ in range(*layers)]
    stage_of = [-1 if x < 0 else stage_of_layer[x] for x in attached.layer_of]
    placement = place_stages(step.program, step.loop, stage_of, len(chosen.ranges), step.state)
    read = {v for e in step.program.equations for v in e.inputs}
    split = split_stacks(step, stage_of, len(chosen.ranges))
    parts: dict[int, list[StackPart]] = {}
    for position, (i, rows) in enumerate(split.inputs):
        if rows is not None:
            parts.setdefault(i, []).append(StackPart(rows, split.owners[position]))

    def is_moved(i: int, tensor: Tensor) -> bool:
        if tensor.split is not None:
            return tuple(parts.get(i, ())) != parts_of(tensor)
        return placement.owner[step.program.inputs[i]] not in tensor.stages

    return sum(
        aval_bytes(step.avals[i])
        for i, tensor in matches.items()
        if step.program.inputs[i] in read and is_moved(i, tensor)
    )


# -- initialisers beside a pipeline


def _make_on_stages(
    step: TracedStep,
    plan: ParallelPlan,
    tensors: Sequence[Tensor],
    cluster: ClusterSpec,
    log: PlanningLog,
) -> PlannedStep:
    """`tensors`: where the train step wants each of the results."""
    held = [tensor.holders() for tensor in tensors]
    used = sorted({stage for holders in held for stage in holders})
    made, stages = [], []
    for number in used:
        stage = plan.stages[number]
        positions, rows = _results_on(number, tensors)
        mesh = mesh_of_cluster(submesh_cluster(cluster, stage.submesh), stage.mesh_shape)
        assert stage.plan is not None
        mesh = replace(mesh, axis_names=stage.plan.axis_names)
        specs = [
            spec
            for o, holders in enumerate(held)
            for holder, spec in zip(holders, plan.held_specs(tensors[o]), strict=True)
            if holder == number
        ]
        method = PlacedParallel("CreateStateParallel", mesh, out_specs=tuple(specs))
        results = only_results(step, positions, rows)
        made.append(plan_mesh(ShardingTask(results, cluster, method), log))
        stages.append(stage)
    owners = [(tuple(map(used.index, tensor.holders())), tensor.rows()) for tensor in tensors]
    whole = _made_plan(step, [planned.plan for planned in made], stages, owners, cluster, log)
    return PlannedStep(step, whole, made=tuple(made))


def _results_on(number: int, tensors: Sequence[Tensor]) -> tuple[list[int], list[Rows | None]]:
    """The results that a stage makes, by position, and their rows."""
    made = [
        (position, rows)
        for position, tensor in enumerate(tensors)
        for stage, rows in zip(tensor.holders(), tensor.rows(), strict=True)
        if stage == number
    ]
    return [position for position, _ in made], [rows for _, rows in made]


def _made_plan(
    step: TracedStep,
    plans: Sequence[ParallelPlan],
    stages: Sequence[StagePlan],
    owners: Sequence[tuple[tuple[int, ...], tuple[Rows | None, ...]]],
    cluster: ClusterSpec,
    log: PlanningLog,
) -> ParallelPlan:
    """The plan of a function of which each stage makes some results. `stages`: those of training;
    `owners`: the stages of every result, several for a stack of which each makes its rows, and
    these rows."""
    meshes = list(dict.fromkeys(stage.mesh for stage in stages))
    made = [
        StagePlan(
            layers=(number, number + 1),
            submesh=stage.submesh,
            mesh_shape=plan.mesh_shape,
            cost=plan.estimated_step_s,
            plan=plan,
            devices=stage.devices,
            mesh=meshes.index(stage.mesh),
        )
        for number, (plan, stage) in enumerate(zip(plans, stages, strict=True))
    ]
    outputs = [iter(plan.outputs) for plan in plans]
    tensors = []
    for own, rows in owners:
        parts = [replace(next(outputs[s]), stages=(s,)) for s in own]
        shapes = [plans[s].mesh_shape for s in own]
        boxes = [box for box in rows if box is not None]
        on = [made[s].mesh for s in own]
        tensors.append(joined(parts, boxes, on, shapes) if boxes else parts[0])
    everywhere = tuple(range(len(plans)))
    decision = PipelineDecision(
        inputs=[replace(tensor, stages=everywhere) for tensor in plans[0].inputs],
        outputs=tensors,
        layers=tuple(f"results of stage {number}" for number in range(len(plans))),
        layering=PER_STAGE_OUTPUTS,
        step_s=max(plan.estimated_step_s for plan in plans),
        lower_bound=min(plan.solver.lower_bound for plan in plans),
    )
    return stages_plan(
        step,
        made,
        plans[0].method,
        cluster,
        decision,
        fingerprint_of=step.program,
        seconds=log.seconds,
    )


def bind_made(plan: ParallelPlan, step: TracedStep, cluster: ClusterSpec) -> PlannedStep:
    """An initialiser's plan beside a pipeline, made elsewhere, for this initialiser."""
    bound = bind_plan(plan, step)
    made, stages = [], []
    for number, stage in enumerate(plan.stages):
        positions, rows = _results_on(number, plan.outputs)
        assert stage.plan is not None
        results = only_results(step, positions, rows)
        stage_plan = bind_plan(stage.plan, results)
        if stage_plan.origin is None:
            submesh = submesh_cluster(plan.cluster or cluster, stage.submesh)
            stage_plan = replace(stage_plan, origin=bound_origin(stage_plan, results, submesh))
        made.append(PlannedStep(results, stage_plan))
        stages.append(replace(stage, plan=stage_plan))
    return PlannedStep(step, replace(bound, stages=tuple(stages)), made=tuple(made))
