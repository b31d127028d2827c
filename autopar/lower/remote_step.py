"""Lowering for workers: from a `PlannedStep` to a `LoweredStep` for the meshes of a cluster.

Every step becomes stage programs and lists of instructions, so workers know of nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding

from autopar.ir.live import buffer_slots
from autopar.ir.pipeline import stage_program_names
from autopar.ir.remote import BoundBuffer, LoweredProgram, LoweredStep, RemoteTransfer, ShardedType
from autopar.ir.spec import from_partition_spec
from autopar.lower.lower_step import AbstractDevices, LoweredPipeline, lower_pipeline
from autopar.lower.planned_step import PlannedStep
from autopar.lower.raw_keys import on_raw_keys, raw_type
from autopar.lower.tiles import plan_transfers


def lower_for_workers(planned: PlannedStep, devices: AbstractDevices) -> LoweredStep:
    lowered = lower_pipeline(planned, devices)
    pipeline, stage_devices = lowered.pipeline, lowered.stage_devices
    meshes = tuple(
        tuple(
            sorted(
                {
                    d
                    for s, m in enumerate(pipeline.stage_mesh)
                    if m == mesh
                    for d in stage_devices[s]
                }
            )
        )
        for mesh in range(pipeline.num_meshes)
    )
    raw = {key: raw_type(buffer) for key, buffer in lowered.buffers.items()}
    types = {
        (stage, value): _sharded_type(
            buffer, stage_devices[stage], meshes[pipeline.stage_mesh[stage]]
        )
        for (stage, value), buffer in raw.items()
    }
    tile_plans = plan_transfers(pipeline, raw)
    arguments, results = _bound_buffers(lowered, types)
    return LoweredStep(
        name=planned.plan.name,
        meshes=meshes,
        stage_programs=_stage_programs(planned, lowered, types),
        stage_program_mesh=tuple(pipeline.stage_mesh[p.stage] for p in pipeline.stage_programs),
        programs=lowered.programs,
        transfers={
            number: RemoteTransfer(
                types[transfer.source, transfer.ref.value],
                types[transfer.target, transfer.ref.value],
                tile_plans.get(number),
                transfer.source,
                transfer.target,
            )
            for number, transfer in enumerate(pipeline.transfers)
        },
        stage_mesh=pipeline.stage_mesh,
        arguments=arguments,
        results=results,
        donated=frozenset(pipeline.argument_of_input[n] for n in pipeline.donated),
        state_results=frozenset(output for _, output in planned.traced.state),
    )


_Types = dict[tuple[int, int], ShardedType]  # by stage and value


def _sharded_type(
    raw: jax.ShapeDtypeStruct, stage_devices: Sequence[int], mesh_devices: Sequence[int]
) -> ShardedType:
    sharding = raw.sharding
    assert isinstance(sharding, NamedSharding)
    names, sizes = tuple(sharding.mesh.axis_names), tuple(sharding.mesh.axis_sizes)
    layout = from_partition_spec(sharding.spec, raw.shape, names, sizes, "a buffer")
    grid = tuple(mesh_devices.index(device) for device in stage_devices)
    return ShardedType(tuple(raw.shape), raw.dtype, sizes, names, layout, grid)


def _stage_programs(
    planned: PlannedStep, lowered: LoweredPipeline, types: _Types
) -> tuple[LoweredProgram, ...]:
    pipeline = lowered.pipeline
    names = stage_program_names(pipeline) if planned.plan.is_pipeline else ["step"]
    return tuple(
        LoweredProgram(
            name,
            one.stage,
            on_raw_keys(function, [lowered.buffers[one.stage, ref.value] for ref in one.reads]),
            tuple(types[one.stage, ref.value] for ref in one.reads),
            tuple(types[one.stage, ref.value] for ref in one.writes),
            donated,
            one.phase,
        )
        for name, one, function, donated in zip(
            names,
            pipeline.stage_programs,
            lowered.functions,
            lowered.programs.donated,
            strict=True,
        )
    )


def _bound_buffers(
    lowered: LoweredPipeline, types: _Types
) -> tuple[tuple[BoundBuffer, ...], tuple[BoundBuffer, ...]]:
    """The buffers of arguments and of results, mesh by mesh."""
    pipeline = lowered.pipeline
    argument_of, result_of = pipeline.argument_of_input, pipeline.result_of_output
    arguments, results = [], []
    for mesh, program in enumerate(lowered.programs.meshes):
        slots = buffer_slots(pipeline, program)
        type_of = {buffer: types[stage, ref.value] for buffer, (stage, ref) in slots.items()}
        arguments += [
            BoundBuffer(argument_of[n], mesh, b, type_of[b], pipeline.inputs[n].rows)
            for n, b in program.inputs
        ]
        results += [
            BoundBuffer(result_of[n], mesh, b, type_of[b], pipeline.outputs[n].rows)
            for n, b in program.outputs
        ]
    return tuple(arguments), tuple(results)
