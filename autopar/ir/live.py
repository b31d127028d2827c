"""From lists of instructions to the buffers and bytes that are live over time.

Bytes are of buffers between stage programs, without the temporaries of a running stage program.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.ir.pipeline import (
    Free,
    MeshProgram,
    Pipeline,
    PipelinePrograms,
    Recv,
    Ref,
    Run,
    Slot,
    slots_of,
)


def buffer_slots(pipeline: Pipeline, program: MeshProgram) -> dict[int, Slot]:
    """The slot that each buffer of a mesh holds."""
    slots = {}
    for position, buffer in program.inputs:
        place = pipeline.inputs[position]
        slots[buffer] = Slot(place.stage, Ref(place.value, None))
    for instruction in program.instructions:
        match instruction:
            case Run():
                stage_program = pipeline.stage_programs[instruction.stage_program]
                written = slots_of(
                    stage_program.stage, stage_program.writes, instruction.micro_batch
                )
                slots.update(zip(instruction.writes, written, strict=True))
            case Recv():
                for buffer, number in zip(instruction.buffers, instruction.transfers, strict=True):
                    transfer = pipeline.transfers[number]
                    ref = transfer.ref.of(instruction.micro_batch)
                    slots[buffer] = Slot(transfer.target, ref)
    return slots


def live_buffers(programs: PipelinePrograms) -> tuple[tuple[int, ...], ...]:
    """Per mesh, the number of live buffers during each instruction, its reads and writes included;
    after it, for a `Free`."""
    return tuple(sizes_over_time(program, lambda _: 1) for program in programs.meshes)


def bytes_over_time(
    pipeline: Pipeline, programs: PipelinePrograms, bytes_of: Callable[[int, Ref], int]
) -> tuple[tuple[int, ...], ...]:
    """The same in bytes, where a buffer has `bytes_of(stage, ref)`. A buffer that is updated in
    place counts once; other donated buffers count beside the buffers written."""
    per_mesh = []
    for program in programs.meshes:
        size = {b: bytes_of(*slot) for b, slot in buffer_slots(pipeline, program).items()}
        per_mesh.append(sizes_over_time(program, size.__getitem__))
    return tuple(per_mesh)


def live_bytes(
    pipeline: Pipeline, programs: PipelinePrograms, bytes_of: Callable[[int, Ref], int]
) -> tuple[int, ...]:
    """Per mesh, the peak of live bytes, the inputs before the first instruction included."""
    peaks = []
    for program, line in zip(
        programs.meshes, bytes_over_time(pipeline, programs, bytes_of), strict=True
    ):
        places = [pipeline.inputs[position] for position, _ in program.inputs]
        at_start = sum(bytes_of(place.stage, Ref(place.value, None)) for place in places)
        peaks.append(max((at_start, *line)))
    return tuple(peaks)


def sizes_over_time(program: MeshProgram, size_of: Callable[[int], int]) -> tuple[int, ...]:
    """The total size of live buffers during each instruction of a mesh."""
    live = {buffer for _, buffer in program.inputs}
    total = sum(map(size_of, live))
    sizes = []
    for instruction in program.instructions:
        match instruction:
            case Run(writes=new) | Recv(buffers=new):
                appeared = set(new) - live
                live |= appeared
                total += sum(map(size_of, appeared))
            case Free(buffers=gone):
                live -= set(gone)
                total -= sum(map(size_of, gone))
        sizes.append(total)
    return tuple(sizes)
