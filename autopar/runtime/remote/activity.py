"""From an instruction to words: what a worker was doing, for error messages."""

from __future__ import annotations

from autopar.ir.pipeline import Free, Recv, Run, Send
from autopar.ir.remote import LoweredStep


def describe_instruction(lowered: LoweredStep, mesh: int, place: int) -> tuple[int | None, str]:
    """(stage, words) for an instruction of a mesh's list; -1 is before the first."""
    instructions = lowered.programs.meshes[mesh].instructions
    if place == -1:
        return _stage_on(lowered, mesh), "taking the arguments of a step"
    if not 0 <= place < len(instructions):
        return None, ""
    match instructions[place]:
        case Run(stage_program=number, micro_batch=micro_batch):
            stage_program = lowered.stage_programs[number]
            of = "" if micro_batch is None else f" of micro-batch {micro_batch}"
            return stage_program.stage, f"running {stage_program.name}{of}"
        case Send(buffers=buffers, to_mesh=other, micro_batch=micro_batch):
            of = "" if micro_batch is None else f" of micro-batch {micro_batch}"
            return _stage_on(lowered, mesh), f"sending {len(buffers)} arrays{of} to mesh {other}"
        case Recv(buffers=buffers, from_mesh=other, micro_batch=micro_batch):
            of = "" if micro_batch is None else f" of micro-batch {micro_batch}"
            words = f"receiving {len(buffers)} arrays{of} from mesh {other}"
            return _stage_on(lowered, mesh), words
        case Free(buffers=buffers):
            return _stage_on(lowered, mesh), f"freeing {len(buffers)} arrays"


def _stage_on(lowered: LoweredStep, mesh: int) -> int | None:
    stages = [stage for stage, other in enumerate(lowered.stage_mesh) if other == mesh]
    return stages[0] if len(stages) == 1 else None
