"""From the lists of all meshes to one order for one process, and the live bytes on each mesh.

Meshes take turns, one stage program at a time, so that a stage program is dispatched soon after
what it waits for. A list waits at a `Recv` whose `Send` is still to come. Buffers have numbers of
their own throughout a step, so a `Send` can fill the receiver's buffers at once, and a `Recv` has
nothing left to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from autopar.ir.pipeline import Free, PipelinePrograms, Recv, Run, Send


class Ordered(NamedTuple):
    """An instruction of a mesh; for a `Send`, the buffers that its `Recv` fills."""

    mesh: int
    instruction: Run | Send | Free
    received: tuple[int, ...] = ()


Buffer = tuple[int, int]  # mesh, number


def interleave(programs: PipelinePrograms) -> list[Ordered]:
    """All instructions of all meshes, each after those that it waits for."""
    receivers = {
        (recv.from_mesh, mesh, recv.tag): recv
        for mesh, program in enumerate(programs.meshes)
        for recv in program.instructions
        if isinstance(recv, Recv)
    }
    lists = [list(program.instructions) for program in programs.meshes]
    next_at = [0] * len(lists)
    sent: set[tuple[int, int, int]] = set()
    order: list[Ordered] = []
    while any(at < len(instructions) for at, instructions in zip(next_at, lists, strict=True)):
        progress = sum(next_at)
        for mesh, instructions in enumerate(lists):
            has_run = False
            while next_at[mesh] < len(instructions):
                instruction = instructions[next_at[mesh]]
                if isinstance(instruction, Recv):
                    if (instruction.from_mesh, mesh, instruction.tag) not in sent:
                        break
                elif isinstance(instruction, Send):
                    key = (mesh, instruction.to_mesh, instruction.tag)
                    sent.add(key)
                    order.append(Ordered(mesh, instruction, receivers[key].buffers))
                elif isinstance(instruction, Run) and has_run:
                    break
                else:
                    has_run |= isinstance(instruction, Run)
                    order.append(Ordered(mesh, instruction))
                next_at[mesh] += 1
        assert progress < sum(next_at), "the lists wait for each other"
    return order


class Moment(NamedTuple):
    """Live bytes per device on a mesh, after an instruction that changed them."""

    mesh: int
    step: Ordered
    live_bytes: int


def live_bytes_over_time(
    order: Sequence[Ordered],
    programs: PipelinePrograms,
    bytes_of: Callable[[Buffer], int],
) -> Iterator[Moment]:
    """Live bytes after each instruction, on the mesh whose buffers it changes. A donated buffer is
    gone after its run, unless the run writes it again."""
    live = [set(buffer for _, buffer in program.inputs) for program in programs.meshes]
    total = [
        sum(bytes_of((mesh, buffer)) for buffer in buffers) for mesh, buffers in enumerate(live)
    ]

    def change(mesh: int, gone: Sequence[int], new: Sequence[int]) -> None:
        for buffer in set(gone) & live[mesh]:
            total[mesh] -= bytes_of((mesh, buffer))
        live[mesh] -= set(gone)
        for buffer in set(new) - live[mesh]:
            total[mesh] += bytes_of((mesh, buffer))
        live[mesh] |= set(new)

    for step in order:
        instruction = step.instruction
        if isinstance(instruction, Run):
            used_up = [instruction.reads[i] for i in programs.donated[instruction.stage_program]]
            change(step.mesh, used_up, instruction.writes)
            yield Moment(step.mesh, step, total[step.mesh])
        elif isinstance(instruction, Send):
            change(instruction.to_mesh, (), step.received)
            yield Moment(instruction.to_mesh, step, total[instruction.to_mesh])
        else:
            change(step.mesh, instruction.buffers, ())
            yield Moment(step.mesh, step, total[step.mesh])


def peak_live_bytes(
    order: Sequence[Ordered], programs: PipelinePrograms, bytes_of: Callable[[Buffer], int]
) -> tuple[int, ...]:
    """Peak bytes in the buffers of each mesh, between instructions."""
    peaks = [
        sum(bytes_of((mesh, buffer)) for _, buffer in program.inputs)
        for mesh, program in enumerate(programs.meshes)
    ]
    for moment in live_bytes_over_time(order, programs, bytes_of):
        peaks[moment.mesh] = max(peaks[moment.mesh], moment.live_bytes)
    return tuple(peaks)


def peak_bytes(
    order: Sequence[Ordered],
    programs: PipelinePrograms,
    bytes_of: Callable[[Buffer], int],
    program_bytes: Sequence[int],
) -> tuple[int, ...]:
    """Peak bytes by mesh: while a stage program runs, its `program_bytes` (arguments, results and
    temporaries) plus the buffers that it does not touch."""
    peaks = list(peak_live_bytes(order, programs, bytes_of))
    for moment in live_bytes_over_time(order, programs, bytes_of):
        run = moment.step.instruction
        if not isinstance(run, Run):
            continue
        used_up = {run.reads[i] for i in programs.donated[run.stage_program]}
        left = (set(run.reads) - used_up) | set(run.writes)
        others = moment.live_bytes - sum(bytes_of((moment.mesh, b)) for b in left)
        peaks[moment.mesh] = max(peaks[moment.mesh], others + program_bytes[run.stage_program])
    return tuple(peaks)
