"""Lowering: from a `PlannedStep` and devices to functions for `jax.jit` and instruction lists.

annotate         a step on one mesh → one function with its shardings written on it
lower_pipeline   any step → a function per stage program, and the list that each mesh runs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar import _jax
from autopar.errors import MeshError, PlanError
from autopar.ir.checks import check_programs
from autopar.ir.host_programs import HostPrograms
from autopar.ir.pipeline import Phase, Pipeline, PipelinePrograms, Place, Ref, StageProgram
from autopar.ir.plan import ParallelPlan
from autopar.ir.schedule import Schedule
from autopar.ir.spec import to_partition_spec
from autopar.lower.annotate import annotated_function
from autopar.lower.host_programs import lower_with_host_memory
from autopar.lower.instructions import emit_programs
from autopar.lower.kernel_platforms import check_kernels
from autopar.lower.planned_step import PlannedStep
from autopar.lower.roll_layers import roll_layers
from autopar.lower.schedules import make_schedule
from autopar.lower.stage_bodies import stage_program_function
from autopar.lower.stage_programs import cut_into_stage_programs
from autopar.lower.unreduced import AnyMesh, partial_axes, unreduced_layout


@dataclass(frozen=True)
class AbstractDevices:
    """Devices of other processes, by number: programs can be lowered for them but not compiled."""

    num_devices: int
    platform: str

    def __len__(self) -> int:
        return self.num_devices


def mesh_of(
    devices: Sequence[Any] | AbstractDevices,
    numbers: Sequence[int],
    shape: tuple[int, ...],
    axis_names: tuple[str, ...],
) -> AnyMesh:
    """The mesh of the devices with these numbers, row by row."""
    if isinstance(devices, AbstractDevices):
        return _jax.abstract_mesh(shape, axis_names)
    grid = np.array([devices[d] for d in numbers], dtype=object)
    return _jax.fresh_mesh(grid.reshape(shape), axis_names)


def platform_of(devices: Sequence[Any] | AbstractDevices) -> str:
    return devices.platform if isinstance(devices, AbstractDevices) else devices[0].platform


@dataclass(frozen=True)
class LoweredPipeline:
    """Everything that runs a step as stage programs.

    functions:     one per stage program, from what it reads to what it writes.
    stage_devices: per stage, the numbers of its devices in the order of its mesh.
    meshes:        per mesh, how its first stage arranges the devices.
    buffers:       (stage, value) -> type and sharding of the buffer that holds the value there.
    """

    pipeline: Pipeline
    programs: PipelinePrograms
    functions: tuple[Callable[..., list[Any]], ...]
    stage_devices: tuple[tuple[int, ...], ...]
    meshes: tuple[AnyMesh, ...]
    buffers: dict[tuple[int, int], jax.ShapeDtypeStruct]


def lower_pipeline(
    planned: PlannedStep, devices: Sequence[Any] | AbstractDevices
) -> LoweredPipeline:
    """A step as stage programs, and the lists of instructions that run them. A step on one mesh is
    a pipeline of one stage and one phase."""
    plan, platform = planned.plan, platform_of(devices)
    if planned.traced.host is not None:
        raise PlanError(
            f"the plan for {plan.name} keeps state in host memory, which works on the devices of "
            "one process only, and not where plans are compiled for devices that are absent. Plan "
            "with ShardingOptions(host_memory='never')."
        )
    check_devices(plan, devices)
    check_kernels(plan.name, planned.traced.program, platform)
    every = tuple(range(plan.num_devices))
    stage_devices = tuple(stage.devices or every for stage in plan.stages)
    # Stages that share devices may arrange them differently.
    stage_plans = [stage.plan or plan for stage in plan.stages]
    stage_meshes = [
        mesh_of(devices, numbers, stage_plan.mesh_shape, stage_plan.axis_names)
        for numbers, stage_plan in zip(stage_devices, stage_plans, strict=True)
    ]
    if planned.sliced is None:
        pipeline, functions, buffers = _one_phase(planned, stage_meshes, platform)
        schedule = Schedule("one phase", 1, pipeline.stage_mesh, ())
    else:
        pipeline, functions, buffers = _all_phases(planned, stage_meshes, platform)
        schedule = make_schedule(
            plan.schedule,
            len(plan.stages),
            plan.num_micro_batches,
            stage_mesh=pipeline.stage_mesh,
        )
    programs = emit_programs(pipeline, schedule)
    check_programs(pipeline, programs)
    first = [pipeline.stage_mesh.index(mesh) for mesh in range(pipeline.num_meshes)]
    meshes = tuple(stage_meshes[stage] for stage in first)
    return LoweredPipeline(pipeline, programs, tuple(functions), stage_devices, meshes, buffers)


_Stages = tuple[
    Pipeline, list[Callable[..., list[Any]]], dict[tuple[int, int], jax.ShapeDtypeStruct]
]


def _all_phases(planned: PlannedStep, meshes: Sequence[AnyMesh], platform: str) -> _Stages:
    """Stages cut into the phases of a train step or an evaluation."""
    plan, sliced = planned.plan, planned.sliced
    assert sliced is not None
    written_out = cut_into_stage_programs(
        sliced.stages,
        [stage.plan.program for stage in plan.stages if stage.plan is not None],
        plan.num_micro_batches,
        stage_mesh=tuple(stage.mesh for stage in plan.stages),
        split_weights=plan.schedule == "zero_bubble",
        donated=planned.traced.donated,
    )
    staged = roll_layers(written_out)
    buffers = {}
    for (stage, value), layout in staged.layouts.items():
        mesh, aval = meshes[stage], sliced.program.avals[value]
        layout = (-1,) * len(mesh.axis_names) if layout is None else layout
        lanes = [mesh.axis_sizes[axis] for axis in partial_axes(layout)]
        shape = (*lanes, *getattr(aval, "shape", ()))
        spec = to_partition_spec(unreduced_layout(layout), len(shape), mesh.axis_names)
        buffers[stage, value] = _buffer(shape, aval, NamedSharding(mesh, spec))
    functions = [
        stage_program_function(body, meshes[body.stage_program.stage], platform)
        for body in staged.programs
    ]
    return staged.pipeline, functions, buffers


def _one_phase(planned: PlannedStep, meshes: Sequence[AnyMesh], platform: str) -> _Stages:
    """Each stage runs one program, which takes all arguments and makes the stage's results. The
    values are numbered: first the arguments, then the results, by part if they have several."""
    steps = planned.made or (planned,)
    arguments = range(len(planned.traced.avals))
    held = [
        (position, stage, rows)
        for position, tensor in enumerate(planned.plan.outputs)
        for stage, rows in zip(tensor.stages, tensor.rows(), strict=False)
    ]
    made = [
        (position, Place(len(arguments) + number, stage, rows))
        for number, (position, stage, rows) in enumerate(held)
    ]
    outputs = tuple(place for _, place in made)
    stage_programs, functions, buffers = [], [], {}
    for stage, (step, mesh) in enumerate(zip(steps, meshes, strict=True)):
        traced, plan = step.traced, step.plan
        results = [place.value for place in outputs if place.stage == stage]
        avals, tensors = (*traced.avals, *traced.out_avals), (*plan.inputs, *plan.outputs)
        for value, aval, tensor in zip((*arguments, *results), avals, tensors, strict=True):
            sharding = NamedSharding(mesh, plan.spec_of(tensor))
            buffers[stage, value] = _buffer(aval.shape, aval, sharding)
        reads, writes = (
            tuple(Ref(value, None) for value in values) for values in (arguments, results)
        )
        stage_programs.append(StageProgram(stage, Phase.RESULTS, reads, writes))
        functions.append(_function_on(step, mesh, platform))
    pipeline = Pipeline(
        num_micro_batches=1,
        stage_mesh=tuple(stage.mesh for stage in planned.plan.stages),
        stage_programs=tuple(stage_programs),
        transfers=(),
        inputs=tuple(Place(value, stage) for stage in range(len(steps)) for value in arguments),
        outputs=outputs,
        donated=frozenset() if planned.made else frozenset(planned.traced.donated),
        arguments=tuple(arguments) * len(steps),
        results=tuple(position for position, _ in made),
    )
    return pipeline, functions, buffers


def _buffer(shape: Sequence[int], aval: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, sharding=sharding, weak_type=weak_type)


def check_devices(plan: ParallelPlan, devices: Sequence[Any] | AbstractDevices) -> None:
    if len(devices) < plan.num_devices:
        raise MeshError(
            f"the plan's mesh {plan.mesh_shape} needs {plan.num_devices} devices, "
            f"got {len(devices)}. Use more devices or a smaller mesh."
        )


def annotate(
    planned: PlannedStep, devices: Sequence[Any] | AbstractDevices
) -> tuple[Callable[..., list[Any]], AnyMesh]:
    """(flat function for `jax.jit`, its mesh) of a planned step on the given devices."""
    plan = planned.plan
    check_devices(plan, devices)
    check_kernels(plan.name, planned.traced.program, platform_of(devices))
    mesh = mesh_of(devices, range(plan.num_devices), plan.mesh_shape, plan.axis_names)
    return _function_on(planned, mesh, platform_of(devices)), mesh


def annotate_with_host_memory(
    planned: PlannedStep, devices: Sequence[Any]
) -> tuple[HostPrograms, AnyMesh]:
    """(programs, their mesh) of a step that keeps state in host memory."""
    plan = planned.plan
    check_devices(plan, devices)
    check_kernels(plan.name, planned.traced.program, platform_of(devices))
    mesh = mesh_of(devices, range(plan.num_devices), plan.mesh_shape, plan.axis_names)
    return lower_with_host_memory(planned, mesh, platform_of(devices)), mesh


def _function_on(planned: PlannedStep, mesh: AnyMesh, platform: str) -> Callable[..., list[Any]]:
    traced, plan = planned.traced, planned.plan
    is_changed = traced.num_micro_batches > 1 or plan.remat or traced.is_thinned
    is_changed = is_changed or traced.is_unrolled or traced.is_reordered
    if plan.num_devices == 1 and not is_changed and isinstance(mesh, Mesh):
        return traced.flat_fn  # nothing to annotate: jit the step itself
    return annotated_function(traced.program, plan.program, mesh, platform)
