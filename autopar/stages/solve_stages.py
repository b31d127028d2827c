"""From the stages of a pipeline to a plan for each: `StageSpec`s → `SolvedStages`.

A stage that does not fit is planned once more with its layers recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from jax.sharding import PartitionSpec

from autopar.errors import ArgumentError, MemoryBudgetError
from autopar.ir.mesh import ClusterSpec
from autopar.ir.plan import is_one_array
from autopar.ir.rows import Rows
from autopar.lower.schedules import in_flight_bound
from autopar.methods import ShardingOptions
from autopar.progress import Progress
from autopar.rewrite.stage_slices import SlicedStep, StageSlice
from autopar.sharding.budget import GOOD_GAP, Enough
from autopar.stages.looped import LoopedStep, StageSpec
from autopar.stages.pipeline_task import ExistingPlacement, PipelineTask, StageMisfit
from autopar.stages.stage_plans import (
    SolvedStage,
    StageTask,
    StageTooLarge,
    plan_stage,
)
from autopar.stages.submeshes import place_submeshes


@dataclass(frozen=True)
class SolvedStages:
    """The stages of a pipeline as they are solved."""

    specs: list[StageSpec]
    devices: list[tuple[int, ...]]
    stage_mesh: list[int]
    sliced: SlicedStep
    solved: list[SolvedStage]


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


def solve_stages(task: PipelineTask, looped: LoopedStep, specs: list[StageSpec]) -> SolvedStages:
    """Plan every stage; recompute the layers of stages that do not fit otherwise."""
    devices, stage_mesh = _devices(task, specs)
    options = task.method.options
    may_recompute = task.may_recompute and options.remat == "auto" and looped.has_backward
    leads = [0]
    while True:
        sliced = task.sliced(looped, specs)
        try:
            solved = _solve_each(task, looped, sliced, specs, stage_mesh, leads[-1])
        except StageTooLarge as miss:
            spec = specs[miss.stage]
            shared = _shared_stacks(sliced, specs, stage_mesh)
            if miss.stage not in leads and not shared.isdisjoint(sliced.stages[miss.stage].inputs):
                leads.append(miss.stage)  # it may fit in a layout of its own choice
                continue
            frees = bool(looped.worth_recomputing(range(*spec.layers)))
            if spec.remat or not may_recompute or not frees:
                number = looped.step.num_micro_batches
                in_flight = in_flight_bound(
                    task.method.schedule,
                    len(specs),
                    number,
                    miss.stage,
                    num_meshes=max(stage_mesh) + 1,
                )
                task.misfits.append(StageMisfit(spec, in_flight, miss.error.peak_bytes))
                raise _too_large(miss, specs, looped, options) from miss.error
            specs[miss.stage] = replace(spec, remat=True)
        else:
            return SolvedStages(specs, devices, stage_mesh, sliced, solved)


def _solve_each(
    task: PipelineTask,
    looped: LoopedStep,
    sliced: SlicedStep,
    specs: Sequence[StageSpec],
    stage_mesh: Sequence[int],
    lead: int = 0,
) -> list[SolvedStage]:
    """A solution per stage. Stages that share a stack (`_shared_stacks`) have it in the layout, and
    on the mesh, that the one solved first has chosen; `lead` is solved first. Else those with the
    most work come first: what is not the slowest stage need not be solved so well."""
    method = task.method
    solved: dict[int, SolvedStage] = {}
    chosen: dict[int, tuple[tuple[int, ...], PartitionSpec]] = {}  # stack -> mesh shape, spec
    number = sliced.stages[0].step.num_micro_batches
    order = (lead, *(k for k in range(len(specs)) if k != lead))
    shared = _shared_stacks(sliced, specs, stage_mesh)
    if not shared:
        order = sorted(order, key=lambda k: -_work(looped, specs[k]))
    with Progress("solving stages", len(specs)) as progress:
        for k in order:
            cut, spec = sliced.stages[k], specs[k]
            stacks = [n for n, i in enumerate(cut.inputs) if i in shared]
            stage = task.reuse.get(k)
            if stage is None:
                in_flight = in_flight_bound(
                    method.schedule, len(specs), number, k, num_meshes=max(stage_mesh) + 1
                )
                known = {n: chosen[cut.inputs[n]] for n in stacks if cut.inputs[n] in chosen}
                in_specs = _input_specs(
                    cut, task.placement, {n: spec for n, (_, spec) in known.items()}
                )
                shapes = [shape for shape, _ in known.values()]
                stage_task = StageTask(
                    cut,
                    spec.submesh,
                    shapes[0] if shapes else spec.mesh_shape,
                    in_flight,
                    in_specs,
                    task.graph_of(cut),
                    _enough(solved.values(), len(specs), number),
                )
                left = len(specs) - len(solved)
                with task.log.sharing(2 / (left + 1)):  # the first are the slowest
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


def _shared_stacks(
    sliced: SlicedStep, specs: Sequence[StageSpec], stage_mesh: Sequence[int]
) -> set[int]:
    """Inputs that are stacks over layers, split over stages so much alike that they can be one
    array."""
    parts: dict[int, list[tuple[Rows, int]]] = {}  # input -> (rows, stage)
    for k, cut in enumerate(sliced.stages):
        for i, rows in zip(cut.inputs, cut.input_rows, strict=True):
            if rows is not None:
                parts.setdefault(i, []).append((rows, k))
    shared = set()
    for i, held in parts.items():
        rows, stages = zip(*held, strict=True)
        shapes = [(*specs[k].submesh, *(specs[k].mesh_shape or ())) for k in stages]
        if is_one_array(rows, [stage_mesh[k] for k in stages], shapes):
            shared.add(i)
    return shared


def _work(looped: LoopedStep, spec: StageSpec) -> float:
    """Flops of a micro-batch on each device; a recomputed layer runs three passes for two."""
    flops = sum(looped.layer_flops[slice(*spec.layers)]) / prod(spec.submesh)
    return round(flops * (4 / 3 if spec.remat else 1.0), -3)


def _enough(solved: Iterable[SolvedStage], num_stages: int, number: int) -> Enough | None:
    """When a stage needs no better: it takes no longer than one that is known, so it waits for that
    one, and of a step with n micro-batches it makes up one of S + n − 1 parts."""
    slowest = max((stage.objective for stage in solved), default=None)
    if slowest is None:
        return None
    return Enough(slowest, GOOD_GAP * (num_stages + number - 1) / num_stages)


def _input_specs(
    cut: StageSlice,
    placement: ExistingPlacement | None,
    chosen: Mapping[int, PartitionSpec],
) -> tuple[PartitionSpec | None, ...]:
    """Specs of a stage's inputs: of the user's arguments as they are, of the rest None. `chosen`:
    those of stacks that other stages share, by position among the stage's inputs."""
    if placement is None and not chosen:
        return ()
    known = placement.specs if placement is not None else {}
    held = zip(cut.inputs, cut.input_rows, strict=True)
    given = [chosen.get(n, known.get(one)) for n, one in enumerate(held)]
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
        argument_bytes=error.argument_bytes,
    )
