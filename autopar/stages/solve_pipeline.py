"""From stages to the plan of a pipeline: a looped step and `StageSpec`s → `PlannedStep`.

slice      the step, stages → a step per stage              (rewrite.stage_slices)
stages     a step per stage → a plan per stage              (stages.solve_stages, stage_plans)
simulate   plans of stages, a schedule → seconds of a step  (stages.simulate)
plan       all of the above → ParallelPlan                  (sharding.assemble)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import ArgumentError
from autopar.ir.layering import Layering, LayerSource
from autopar.ir.plan import ParallelPlan, StagePlan
from autopar.ir.stages import SearchReport
from autopar.ir.text import format_bytes
from autopar.ir.timeline import PipelineTimes
from autopar.lower.planned_step import PlannedStep
from autopar.lower.schedules import make_schedule
from autopar.methods import AutoLayers, ManualStages, ShardParallel
from autopar.rewrite.stage_slices import SlicedStep
from autopar.sharding.assemble import PipelineDecision, stages_plan
from autopar.sharding.constraints import method_constraints
from autopar.sharding.method_text import method_text
from autopar.stages.looped import LoopedStep, StageSpec, find_looped, launch_s
from autopar.stages.pipeline_task import PipelineOrigin, PipelineTask
from autopar.stages.simulate import mesh_hosts, predicted_s, stage_times
from autopar.stages.solve_stages import SolvedStages, solve_stages
from autopar.stages.stage_plans import SolvedStage
from autopar.stages.stage_tensors import step_tensors
from autopar.tracer.costs import aval_bytes

_MUCH_COPIED = 2**20  # bytes of other stages' parameters that a stage may get without a warning


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
    stages = solve_stages(task, looped, list(specs))
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


# -- the plan


def _plan(
    task: PipelineTask, looped: LoopedStep, stages: SolvedStages, report: SearchReport | None
) -> ParallelPlan:
    recomputed = [i for spec in stages.specs if spec.remat for i in range(*spec.layers)]
    step = looped.recomputing(recomputed).step
    times, step_s = _simulated(task, stages, step.num_micro_batches)
    inputs, outputs = step_tensors(stages)
    sent = [t.num_bytes * (step.num_micro_batches if t.phase else 1) for t in times.crossings]
    decision = PipelineDecision(
        inputs=inputs,
        outputs=outputs,
        layers=tuple(layer.name for layer in looped.layers),
        layering=_layering(task, looped),
        step_s=step_s,
        gap=pipeline_gap(stages.solved, step.num_micro_batches),
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


def pipeline_gap(stages: Sequence[SolvedStage], number: int) -> float:
    """What is proven of all stages together: with n micro-batches, each counts once, and the
    slowest n − 1 times more."""

    def step_s(seconds: Sequence[float]) -> float:
        return sum(seconds) + (number - 1) * max(seconds)

    best = step_s([stage.objective for stage in stages])
    bound = step_s([min(stage.lower_bound, stage.objective) for stage in stages])
    return (best - bound) / best if best > 0 else 0.0


def _simulated(
    task: PipelineTask, stages: SolvedStages, num_micro_batches: int
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


def _used_devices(stages: SolvedStages) -> list[tuple[int, ...]]:
    return [
        devices[: stage.plan.num_devices]
        for devices, stage in zip(stages.devices, stages.solved, strict=True)
    ]


def _stage_plans(
    stages: SolvedStages, times: PipelineTimes, num_micro_batches: int
) -> list[StagePlan]:
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
