"""Functions beside a pipelined train step: from its plan to a pipeline on the same stages.

evaluations    each argument that training has too stays where it is, stage and layout; layers
               are those of training if they are found again, and else what each stage can do
               with the parameters that it holds
initialisers   one program per stage, which makes that stage's part of the state and nothing else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.errors import AutoparError, TraceError
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.ir.plan import FOLLOWING, HELD, ParallelPlan, Tensor
from autopar.ir.program import values_in
from autopar.ir.traced_step import TracedStep
from autopar.lower.planned_step import PlannedStep
from autopar.methods import PlacedParallel
from autopar.rewrite.layers_by_input import layers_by_arguments
from autopar.rewrite.stage_placement import find_homes
from autopar.sharding.assemble import bind_plan, made_plan
from autopar.sharding.origin import bound_origin
from autopar.sharding.plan_mesh import PassTimer, plan_traced
from autopar.stages.layer_tables import submesh_cluster
from autopar.stages.looped import Loop, LoopedStep, StageSpec, find_looped, layers_of
from autopar.stages.plan_pipeline import ExistingPlacement, plan_following
from autopar.tracer.costs import aval_bytes

# -- evaluations


def follow_pipeline(
    traced: TracedStep,
    plan: ParallelPlan,
    matches: Mapping[int, Tensor],
    loop: Loop,
    cluster: ClusterSpec,
    timer: PassTimer,
) -> PlannedStep:
    """`matches`: input of the evaluation, by position -> the same array of the train step. What
    reads no batch is planned on all devices, to which its arguments are then moved."""
    try:
        step = _looped(loop, plan.num_micro_batches)
    except TraceError:
        mesh = mesh_of_cluster(cluster, (cluster.num_devices,))
        method = PlacedParallel("FollowParallel", mesh)
        return plan_traced(traced, cluster=cluster, method=method, timer=timer)
    matches = {i: tensor for i, tensor in matches.items() if tensor.role != "batch"}
    chosen = _choose(step, plan, matches)
    stages = [plan.stages[s] for s in chosen.stages]
    meshes = list(dict.fromkeys(stage.mesh for stage in stages))
    number_of = {old: new for new, old in enumerate(chosen.stages)}
    owners = {i: number_of[t.stages[0]] for i, t in matches.items() if t.stages[0] in number_of}
    lying = ExistingPlacement(
        devices=tuple(stage.devices for stage in stages),
        stage_mesh=tuple(meshes.index(stage.mesh) for stage in stages),
        layering=FOLLOWING + chosen.layering,
        owners=owners,
        specs={i: plan.spec_of(matches[i]) for i in owners},
    )
    specs = [
        StageSpec(layers, stage.submesh, stage.mesh_shape)
        for layers, stage in zip(chosen.ranges, stages, strict=True)
    ]
    planned = plan_following(chosen.looped, specs, lying, cluster, timer)
    return replace(planned, plan=replace(planned.plan, method="FollowParallel()"))


def _looped(loop: Loop, num_micro_batches: int) -> TracedStep:
    """As many micro-batches as training has, unless they cannot be had or change results."""
    if num_micro_batches > 1:
        try:
            step = loop(num_micro_batches)
        except AutoparError:
            return loop(1)
        if not step.notes:
            return step
    return loop(1)


@dataclass(frozen=True)
class _Stages:
    """The layers of an evaluation, and per stage their range and the number it has in training."""

    looped: LoopedStep
    ranges: tuple[tuple[int, int], ...]
    stages: tuple[int, ...]
    layering: str


def _choose(step: TracedStep, plan: ParallelPlan, matches: Mapping[int, Tensor]) -> _Stages:
    """Training's own layers, if they leave all parameters where they are."""
    holders = {i: tensor.stages for i, tensor in matches.items()}
    layers, stages = layers_by_arguments(step, holders)
    every = tuple((k, k + 1) for k in range(len(stages)))
    held = _Stages(LoopedStep(step, layers), every, stages, HELD)
    layering = _own_layering(plan)
    try:
        looped = find_looped(step, layers_of(layering))
        if len(looped.layers) != len(plan.layers):
            layering = str(len(plan.layers))
            looped = find_looped(step, layers_of(layering))
    except AutoparError:
        return held
    ranges = tuple(stage.layers for stage in plan.stages)
    same = _Stages(looped, ranges, tuple(range(len(ranges))), layering)
    if len(looped.layers) != len(plan.layers) or _moved_bytes(same, matches):
        return held if stages else same
    return same


def _own_layering(plan: ParallelPlan) -> str:
    layering = plan.layering.removeprefix(FOLLOWING)
    return str(len(plan.layers)) if layering == HELD else layering


def _moved_bytes(chosen: _Stages, matches: Mapping[int, Tensor]) -> int:
    """Of arguments that would have to be copied to another stage than training has them on."""
    step, attached = chosen.looped.step, chosen.looped.attached
    assert step.loop is not None
    stage_of_layer = [s for s, layers in enumerate(chosen.ranges) for _ in range(*layers)]
    stage_of = [-1 if x < 0 else stage_of_layer[x] for x in attached.layer_of]
    homes = find_homes(step.program, step.loop, stage_of, len(chosen.ranges), step.state)
    read = {v for e in step.program.equations for v in e.inputs}
    return sum(
        aval_bytes(step.avals[i])
        for i, tensor in matches.items()
        if (value := step.program.inputs[i]) in read and homes.owner[value] not in tensor.stages
    )


# -- initialisers


def make_on_stages(
    traced: TracedStep,
    plan: ParallelPlan,
    tensors: Sequence[Tensor],
    cluster: ClusterSpec,
    timer: PassTimer,
) -> PlannedStep:
    """`tensors`: where the train step wants each of the results."""
    used = sorted({tensor.stages[0] for tensor in tensors})
    parts, stages = [], []
    for stage in (plan.stages[s] for s in used):
        own = [o for o, t in enumerate(tensors) if plan.stages[t.stages[0]] is stage]
        mesh = mesh_of_cluster(submesh_cluster(cluster, stage.submesh), stage.mesh_shape)
        assert stage.plan is not None
        mesh = replace(mesh, axis_names=stage.plan.axis_names)
        specs = tuple(plan.spec_of(tensors[o]) for o in own)
        method = PlacedParallel("CreateStateParallel", mesh, out_specs=specs)
        part = only_results(traced, own)
        parts.append(plan_traced(part, cluster=cluster, method=method, timer=timer))
        stages.append(stage)
    owners = [used.index(tensor.stages[0]) for tensor in tensors]
    whole = made_plan(traced, [p.plan for p in parts], stages, owners, dict(timer.seconds), cluster)
    return PlannedStep(traced, whole, made=tuple(parts))


def bind_made(plan: ParallelPlan, traced: TracedStep, cluster: ClusterSpec) -> PlannedStep:
    """A plan of `make_on_stages` that was made elsewhere, for this initialiser."""
    bound = bind_plan(plan, traced)
    parts, stages = [], []
    for number, stage in enumerate(plan.stages):
        own = [o for o, tensor in enumerate(plan.outputs) if tensor.stages[0] == number]
        assert stage.plan is not None
        part = only_results(traced, own)
        own_plan = bind_plan(stage.plan, part)
        if own_plan.origin is None:
            whole = submesh_cluster(plan.cluster or cluster, stage.submesh)
            own_plan = replace(own_plan, origin=bound_origin(own_plan, part, whole))
        parts.append(PlannedStep(part, own_plan))
        stages.append(replace(stage, plan=parts[-1].plan))
    return PlannedStep(traced, replace(bound, stages=tuple(stages)), made=tuple(parts))


def only_results(traced: TracedStep, positions: Sequence[int]) -> TracedStep:
    """The same function as far as these of its results need it. What has an effect goes with the
    first of all results."""
    program, flat_fn = traced.program, traced.flat_fn
    outputs = tuple(program.outputs[o] for o in positions)
    needed = set(values_in(outputs))
    kept = []
    for equation in reversed(program.equations):
        if (equation.has_effect and 0 in positions) or not needed.isdisjoint(equation.results):
            kept.append(equation)
            needed.update(equation.inputs)
    captured = tuple((v, array) for v, array in program.captured if v in needed)
    return replace(
        traced,
        program=replace(program, outputs=outputs, equations=tuple(kept[::-1]), captured=captured),
        out_paths=tuple(traced.out_paths[o] for o in positions),
        out_avals=tuple(traced.out_avals[o] for o in positions),
        state=(),
        donated=(),
        flat_fn=lambda *leaves: [flat_fn(*leaves)[o] for o in positions],
    )
