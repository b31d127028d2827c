"""Pipelines whose stages are known: plans solved again with other pins, plans from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

from autopar.errors import PlanError
from autopar.ir.layering import LayerSource
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import ParallelPlan
from autopar.ir.xla_options import compiler_options
from autopar.lower.planned_step import PlannedStep
from autopar.lower.schedules import in_flight_bound
from autopar.methods import PipeshardParallel, ShardingOptions
from autopar.rewrite.layers_by_input import layers_by_arguments
from autopar.rewrite.step_source import StepSource
from autopar.sharding.assemble import bind_plan
from autopar.sharding.origin import Pins, bound_origin, pins_of
from autopar.sharding.planning_log import PlanningLog
from autopar.stages.layer_tables import submesh_cluster
from autopar.stages.looped import (
    LoopedStep,
    StageSpec,
    find_looped,
    layers_of,
    slice_into,
)
from autopar.stages.pipeline_task import ExistingPlacement, PipelineOrigin, PipelineTask
from autopar.stages.solve_pipeline import solve_pipeline
from autopar.stages.stage_memory import in_flight_of
from autopar.stages.stage_plans import pins_for
from autopar.stages.stage_tensors import held_specs, stacks_of


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
        sliced = slice_into(origin.looped, specs, task.owners, task.stack_parts)
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
    options = ShardingOptions(
        memory_budget_bytes=budget, xla_options=compiler_options(plan.xla_options) or {}
    )
    method = PipeshardParallel(plan.num_micro_batches, schedule=plan.schedule, options=options)
    placement = ExistingPlacement(
        devices=tuple(stage.devices for stage in plan.stages),
        stage_mesh=tuple(stage.mesh for stage in plan.stages),
        layering=plan.layering,
        owners=owners,
        specs=held_specs(plan, {i: plan.inputs[i] for i in owners}),
    )
    return PipelineOrigin(looped, method, cluster, placement, (), pins_of(plan))
