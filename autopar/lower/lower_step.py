"""Lowering: from a `PlannedStep` and devices to functions for `jax.jit` and instruction lists.

annotate         a step on one mesh → one function with its shardings written on it
lower_pipeline   a pipeline → a function per stage program, and the list that each mesh runs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar import _jax
from autopar.errors import MeshError
from autopar.ir.checks import check_programs
from autopar.ir.pipeline import Pipeline, PipelinePrograms
from autopar.ir.plan import ParallelPlan
from autopar.ir.spec import to_partition_spec
from autopar.ir.tiles import TilePlan
from autopar.lower.annotate import annotated_function
from autopar.lower.instructions import emit_programs
from autopar.lower.planned_step import PlannedStep
from autopar.lower.schedules import make_schedule
from autopar.lower.stage_programs import cut_into_stage_programs, stage_program_function
from autopar.lower.tiles import plan_transfers
from autopar.lower.unreduced import AnyMesh, lane_axes, with_lanes


@dataclass(frozen=True)
class AbstractDevices:
    """Devices of other processes, by number: programs can be lowered for them, not compiled."""

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
    """The mesh that some of the devices form, row by row."""
    if isinstance(devices, AbstractDevices):
        return _jax.abstract_mesh(shape, axis_names)
    grid = np.array([devices[d] for d in numbers], dtype=object)
    return _jax.fresh_mesh(grid.reshape(shape), axis_names)


def platform_of(devices: Sequence[Any] | AbstractDevices) -> str:
    return devices.platform if isinstance(devices, AbstractDevices) else devices[0].platform


@dataclass(frozen=True)
class LoweredPipeline:
    """What runs a pipeline. `buffers`: (stage, value) -> type and sharding of what holds it;
    `tile_plans`: of transfers by number, for devices with memory of their own."""

    pipeline: Pipeline
    programs: PipelinePrograms
    functions: tuple[Callable[..., list[Any]], ...]
    meshes: tuple[Any, ...]
    buffers: dict[tuple[int, int], jax.ShapeDtypeStruct]
    tile_plans: dict[int, TilePlan]


def lower_pipeline(
    planned: PlannedStep, devices: Sequence[Any] | AbstractDevices
) -> LoweredPipeline:
    """The stage programs of a pipeline as functions, and the lists that run them."""
    plan, sliced = planned.plan, planned.sliced
    assert sliced is not None
    check_devices(plan, devices)
    shardings, own = [], []  # by stage: those that share devices may arrange them otherwise
    for stage in plan.stages:
        assert stage.plan is not None
        shardings.append(stage.plan.program)
        own.append(mesh_of(devices, stage.devices, stage.mesh_shape, stage.plan.axis_names))
    stage_mesh = tuple(stage.mesh for stage in plan.stages)
    meshes = tuple(own[stage_mesh.index(m)] for m in range(max(stage_mesh) + 1))
    stage_programs = cut_into_stage_programs(
        sliced.stages,
        shardings,
        plan.num_micro_batches,
        stage_mesh=stage_mesh,
        split_weights=plan.schedule == "zero_bubble",
        donated=planned.traced.donated,
    )
    schedule = make_schedule(
        plan.schedule, len(plan.stages), plan.num_micro_batches, stage_mesh=stage_mesh
    )
    programs = emit_programs(stage_programs.pipeline, schedule)
    check_programs(stage_programs.pipeline, programs)
    avals = sliced.program.avals
    buffers: dict[tuple[int, int], jax.ShapeDtypeStruct] = {}
    for (stage, value), layout in stage_programs.layouts.items():
        mesh, aval = own[stage], avals[value]
        shape = getattr(aval, "shape", ())
        layout = (-1,) * len(mesh.axis_names) if layout is None else layout
        lanes = [mesh.axis_sizes[axis] for axis in lane_axes(layout)]
        ndim = len(lanes) + len(shape)
        spec = to_partition_spec(with_lanes(layout), ndim, mesh.axis_names)
        buffers[stage, value] = jax.ShapeDtypeStruct(
            (*lanes, *shape),
            aval.dtype,
            sharding=NamedSharding(mesh, spec),
            weak_type=getattr(aval, "weak_type", False),
        )
    platform = platform_of(devices)
    functions = tuple(
        stage_program_function(p, own[p.stage_program.stage], platform)
        for p in stage_programs.programs
    )
    in_one_memory = platform == "cpu" and not isinstance(devices, AbstractDevices)
    tile_plans = {} if in_one_memory else plan_transfers(stage_programs.pipeline, buffers)
    return LoweredPipeline(
        stage_programs.pipeline, programs, functions, meshes, buffers, tile_plans
    )


def check_devices(plan: ParallelPlan, devices: Sequence[Any] | AbstractDevices) -> None:
    if len(devices) < plan.num_devices:
        raise MeshError(
            f"the plan's mesh {plan.mesh_shape} needs {plan.num_devices} devices; "
            f"{len(devices)} were given. Use more devices or a smaller mesh."
        )


def annotate(
    planned: PlannedStep, devices: Sequence[Any] | AbstractDevices
) -> tuple[Callable[..., list[Any]], Any]:
    """(flat function for `jax.jit`, jax mesh) of a planned step on the given devices."""
    plan = planned.plan
    check_devices(plan, devices)
    mesh = mesh_of(devices, range(plan.num_devices), plan.mesh_shape, plan.axis_names)
    as_traced = planned.traced.num_micro_batches == 1 and not plan.remat
    if plan.num_devices == 1 and as_traced and not isinstance(devices, AbstractDevices):
        # Nothing to annotate: the step is simply jitted.
        return planned.traced.flat_fn, mesh
    program, platform = planned.traced.program, platform_of(devices)
    return annotated_function(program, plan.program, mesh, platform), mesh
