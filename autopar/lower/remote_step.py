"""A planned step for the meshes of a cluster: from `PlannedStep` to `LoweredStep`.

A pipeline, a step on one mesh, and a function of which every stage makes some results all become
stage programs and lists of instructions, so that workers know of nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from autopar.ir.live import buffer_slots
from autopar.ir.pipeline import (
    Free,
    Instruction,
    MeshProgram,
    PipelinePrograms,
    Run,
    stage_program_names,
)
from autopar.ir.remote import Bound, LoweredProgram, LoweredStep, RemoteTransfer, ShardedType
from autopar.ir.spec import from_partition_spec
from autopar.lower.lower_step import AbstractDevices, annotate, check_devices, lower_pipeline
from autopar.lower.planned_step import PlannedStep
from autopar.lower.raw_keys import on_raw_keys, raw_type
from autopar.lower.tiles import plan_transfers


def lower_for_workers(planned: PlannedStep, devices: AbstractDevices) -> LoweredStep:
    check_devices(planned.plan, devices)
    if planned.made:
        stages = planned.plan.stages
        numbers = [stage.devices for stage in stages]
        meshes = [stage.mesh for stage in stages]
        return _side_by_side(planned, planned.made, numbers, meshes, devices.platform)
    if planned.plan.is_pipeline:
        return _pipeline(planned, devices)
    numbers = tuple(range(planned.plan.num_devices))
    return _side_by_side(planned, (planned,), [numbers], [0], devices.platform)


def _held(buffer: Any, numbers: Sequence[int], mesh: Sequence[int]) -> ShardedType:
    """`numbers`: the cluster's devices in the order of the buffer's own mesh."""
    raw = raw_type(buffer)
    sharding = raw.sharding
    assert isinstance(sharding, NamedSharding)
    names, sizes = tuple(sharding.mesh.axis_names), tuple(sharding.mesh.axis_sizes)
    layout = from_partition_spec(sharding.spec, raw.shape, names, sizes, "a buffer")
    places = {number: place for place, number in enumerate(mesh)}
    grid = tuple(places[number] for number in numbers)
    return ShardedType(tuple(raw.shape), raw.dtype, sizes, names, layout, grid)


def _pipeline(planned: PlannedStep, devices: AbstractDevices) -> LoweredStep:
    lowered = lower_pipeline(planned, devices)
    pipeline, programs, stages = lowered.pipeline, lowered.programs, planned.plan.stages
    meshes = tuple(
        tuple(sorted({d for s in stages if s.mesh == m for d in s.devices}))
        for m in range(pipeline.num_meshes)
    )

    def held(stage: int, value: int) -> ShardedType:
        numbers, mesh = stages[stage].devices, meshes[stages[stage].mesh]
        return _held(lowered.buffers[stage, value], numbers, mesh)

    stage_programs = []
    for number, (name, stage_program, function) in enumerate(
        zip(stage_program_names(pipeline), pipeline.stage_programs, lowered.functions, strict=True)
    ):
        reads = [lowered.buffers[stage_program.stage, ref.value] for ref in stage_program.reads]
        stage_programs.append(
            LoweredProgram(
                name,
                stage_program.stage,
                on_raw_keys(function, reads),
                tuple(held(stage_program.stage, ref.value) for ref in stage_program.reads),
                tuple(held(stage_program.stage, ref.value) for ref in stage_program.writes),
                programs.donated[number],
            )
        )
    raw = {key: raw_type(buffer) for key, buffer in lowered.buffers.items()}
    tile_plans = plan_transfers(pipeline, raw)
    crossings = {
        number: RemoteTransfer(
            held(transfer.source, transfer.ref.value),
            held(transfer.target, transfer.ref.value),
            tile_plans.get(number),
        )
        for number, transfer in enumerate(pipeline.transfers)
    }
    arguments, results = [], []
    for mesh, program in enumerate(programs.meshes):
        slots = buffer_slots(pipeline, program)
        for position, buffer in program.inputs:
            slot = slots[buffer]
            arguments.append(Bound(position, mesh, buffer, held(slot.stage, slot.ref.value)))
        for position, buffer in program.outputs:
            slot = slots[buffer]
            results.append(Bound(position, mesh, buffer, held(slot.stage, slot.ref.value)))
    return LoweredStep(
        planned.plan.name,
        meshes,
        tuple(stage_programs),
        tuple(
            pipeline.stage_mesh[stage_program.stage] for stage_program in pipeline.stage_programs
        ),
        programs,
        crossings,
        pipeline.stage_mesh,
        tuple(arguments),
        tuple(results),
        pipeline.donated,
        {n: (t.source, t.target) for n, t in enumerate(pipeline.transfers)},
    )


def _side_by_side(
    whole: PlannedStep,
    parts: Sequence[PlannedStep],
    devices: Sequence[tuple[int, ...]],
    stage_mesh: Sequence[int],
    platform: str,
) -> LoweredStep:
    """Programs that take all arguments, each on its stage's mesh, and give results of their own."""
    meshes = tuple(
        tuple(
            sorted(
                {d for own, m in zip(devices, stage_mesh, strict=True) if m == mesh for d in own}
            )
        )
        for mesh in range(max(stage_mesh) + 1)
    )
    owners = [tensor.stages[0] for tensor in whole.plan.outputs] if whole.made else None
    stage_programs, arguments, results = [], [], []
    instructions: list[list[Instruction]] = [[] for _ in meshes]
    num_buffers = [0] * len(meshes)
    for stage, (part, numbers, mesh) in enumerate(zip(parts, devices, stage_mesh, strict=True)):
        traced, plan = part.traced, part.plan
        function, jax_mesh = annotate(part, AbstractDevices(len(numbers), platform))
        types = {
            "reads": zip(traced.avals, plan.inputs, strict=True),
            "writes": zip(traced.out_avals, plan.outputs, strict=True),
        }
        held = {
            way: tuple(
                _held(
                    _placed(aval, NamedSharding(jax_mesh, plan.spec_of(t))), numbers, meshes[mesh]
                )
                for aval, t in pairs
            )
            for way, pairs in types.items()
        }
        donated = tuple(sorted(traced.donated))
        stage_programs.append(
            LoweredProgram(
                f"stage{stage}_results" if whole.made else "step",
                stage,
                on_raw_keys(function, traced.avals),
                held["reads"],
                held["writes"],
                donated,
            )
        )
        first = num_buffers[mesh]
        reads = tuple(range(first, first + len(traced.avals)))
        after = first + len(reads)
        writes = tuple(range(after, after + len(traced.out_avals)))
        num_buffers[mesh] += len(reads) + len(writes)
        instructions[mesh].append(Run(stage, None, reads, writes))
        if donated:
            instructions[mesh].append(Free(tuple(reads[i] for i in donated)))
        arguments += [Bound(i, mesh, buffer, held["reads"][i]) for i, buffer in enumerate(reads)]
        own = (
            range(len(writes))
            if owners is None
            else [position for position, owner in enumerate(owners) if owner == stage]
        )
        results += [
            Bound(position, mesh, buffer, one)
            for position, buffer, one in zip(own, writes, held["writes"], strict=True)
        ]
    programs = PipelinePrograms(
        tuple(
            MeshProgram(
                tuple(instructions[mesh]),
                tuple((a.position, a.buffer) for a in arguments if a.mesh == mesh),
                tuple((r.position, r.buffer) for r in results if r.mesh == mesh),
                num_buffers[mesh],
            )
            for mesh in range(len(meshes))
        ),
        tuple(stage_program.donated for stage_program in stage_programs),
    )
    return LoweredStep(
        whole.plan.name,
        meshes,
        tuple(stage_programs),
        tuple(stage_mesh),
        programs,
        {},
        tuple(stage_mesh),
        tuple(arguments),
        tuple(results),
        frozenset(whole.traced.donated) if not whole.made else frozenset(),
    )


def _placed(aval: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
