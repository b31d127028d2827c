"""What the checker of programs must find: every way in which a right list can be made wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.ir.checks import check_programs
from autopar.ir.pipeline import (
    EACH,
    Free,
    Instruction,
    MeshProgram,
    Phase,
    Pipeline,
    PipelinePrograms,
    Place,
    Recv,
    Ref,
    Run,
    Send,
    StageProgram,
    Transfer,
)

W, TOTAL, H, NEW = 0, 1, 2, 3

# One micro-batch on two meshes: zeros, h = f(w) which is sent, a sum of it, and the new w.
PIPELINE = Pipeline(
    num_micro_batches=1,
    stage_mesh=(0, 1),
    stage_programs=(
        StageProgram(0, Phase.FORWARD, (Ref(W, None),), (Ref(H, EACH),)),
        StageProgram(1, Phase.PREPARE, (), (Ref(TOTAL, None),)),
        StageProgram(1, Phase.FORWARD, (Ref(H, EACH), Ref(TOTAL, None)), (Ref(TOTAL, None),)),
        StageProgram(1, Phase.UPDATE, (Ref(TOTAL, None),), (Ref(NEW, None),)),
    ),
    transfers=(Transfer(Ref(H, EACH), 0, 1),),
    inputs=(Place(W, 0),),
    outputs=(Place(NEW, 1), Place(W, 0)),
)
FIRST = (
    Run(0, 0, reads=(0,), writes=(1,)),
    Send((1,), (0,), 0, to_mesh=1, tag=7),
    Free((1,)),
)
SECOND = (
    Run(1, None, reads=(), writes=(0,)),
    Recv((1,), (0,), 0, from_mesh=0, tag=7),
    Run(2, 0, reads=(1, 0), writes=(0,)),
    Free((1,)),
    Run(3, None, reads=(0,), writes=(2,)),
    Free((0,)),
)
DONATED = ((), (), (0, 1), (0,))


def programs(
    first: tuple[Instruction, ...] = FIRST,
    second: tuple[Instruction, ...] = SECOND,
    donated: tuple[tuple[int, ...], ...] = DONATED,
    outputs: tuple[tuple[int, int], ...] = ((0, 2),),
    inputs: tuple[tuple[int, int], ...] = ((0, 0),),
    num_buffers: int = 3,
) -> PipelinePrograms:
    return PipelinePrograms(
        (
            MeshProgram(first, inputs, ((1, 0),), 2),
            MeshProgram(second, (), outputs, num_buffers),
        ),
        donated,
    )


def edited(
    instructions: tuple[Instruction, ...], *edits: Callable[[list[Instruction]], object]
) -> tuple[Instruction, ...]:
    changed = list(instructions)
    for edit in edits:
        edit(changed)
    return tuple(changed)


def at(position: int, *new: Instruction) -> Callable[[list[Instruction]], None]:
    """Puts instructions in place of the one at a position."""

    def edit(instructions: list[Instruction]) -> None:
        instructions[position : position + 1] = new

    return edit


def test_a_right_program_passes():
    check_programs(PIPELINE, programs())


WRONG = {
    # what is run
    "mesh 1, instruction 1, Run.*: runs before stage program 2": programs(
        second=(SECOND[0], *SECOND[4:])
    ),
    "runs before stage program 1": programs(second=(*SECOND[1:3], SECOND[0], *SECOND[3:])),
    "runs a second time": programs(first=(FIRST[0], *FIRST)),
    "on another mesh": programs(first=(SECOND[0], *FIRST)),
    "no micro-batch 1 of": programs(first=edited(FIRST, at(0, Run(0, 1, (0,), (1,))))),
    "no micro-batch None of": programs(first=edited(FIRST, at(0, Run(0, None, (0,), (1,))))),
    "reads 1 and writes 1 buffers": programs(first=edited(FIRST, at(0, Run(0, 0, (), (1,))))),
    # what is read
    "needs .*value=2.* but has buffer 1 .empty": programs(
        second=edited(SECOND, at(1), at(2, Free((0,))))
    ),
    "needs .*value=2.* but has buffer 0 .Slot": programs(
        second=edited(SECOND, at(2, Run(2, 0, (0, 1), (1,))))
    ),
    "instruction 2, Send.*needs .* but has buffer 1 .*freed": programs(
        first=edited(FIRST, at(1), at(1, FIRST[2], FIRST[1]))
    ),
    "Run.stage_program=3.*needs .* but has buffer 0 .*freed": programs(
        second=edited(SECOND, at(3, Free((0, 1))))
    ),
    # what is written
    "cannot write .* to buffer 0": programs(first=edited(FIRST, at(0, Run(0, 0, (0,), (0,))))),
    "cannot write .* to buffer 2": programs(num_buffers=2),
    "to be updated in place, not in buffer 2": programs(
        second=edited(SECOND, at(2, Run(2, 0, (1, 0), (2,))))
    ),
    # what is used up
    "is updated in place, but not used up": programs(donated=((), (), (0,), (0,))),
    "is used up, but the caller's": programs(donated=((0,), (), (0, 1), (0,))),
    # what is sent
    "waits for ever": programs(first=edited(FIRST, at(1))),
    "sent, but never received": programs(
        first=edited(FIRST, at(2, Send((1,), (0,), 0, 1, 8), FIRST[2]))
    ),
    "tags are used twice": programs(first=edited(FIRST, at(2, FIRST[1], FIRST[2]))),
    "is to another mesh": programs(first=edited(FIRST, at(1, Send((1,), (0,), 0, 0, 7)))),
    "a transfer per buffer": programs(first=edited(FIRST, at(1, Send((), (0,), 0, 1, 7)))),
    "is not of micro-batch None": programs(
        first=edited(FIRST, at(1, Send((1,), (0,), None, 1, 7)))
    ),
    "does not match Send": programs(second=edited(SECOND, at(1, Recv((1,), (0,), 0, 1, 7)))),
    "Recv.*a transfer per buffer": programs(
        second=edited(SECOND, at(1, Recv((1, 2), (0,), 0, 0, 7)))
    ),
    # what is freed
    "the end: never freed: buffer 1": programs(first=FIRST[:2]),
    "never freed: buffer 0 .*used up": programs(second=SECOND[:-1]),
    "cannot free buffer 1 .*freed": programs(first=(*FIRST, FIRST[2])),
    "cannot free buffer 9 .empty": programs(first=(*FIRST, Free((9,)))),
    "Free.*buffer 0 .* is the caller's, or a result": programs(first=(*FIRST, Free((0,)))),
    "Free.*buffer 2 .* is the caller's, or a result": programs(second=(*SECOND, Free((2,)))),
    # what comes in and out
    "result 0 is not in buffer 0": programs(
        second=edited(SECOND, at(5, Free((2,)))), outputs=((0, 0),)
    ),
    "outputs at .1., not each once": programs(outputs=()),
    "inputs at .0, 0., not each once": programs(inputs=((0, 0), (0, 1))),
    "an entry per stage program": programs(donated=DONATED[:2]),
    "one list per mesh": replace(programs(), meshes=programs().meshes[:1]),
}


@pytest.mark.parametrize(("message", "wrong"), WRONG.items(), ids=WRONG.keys())
def test_a_wrong_program_is_found(message: str, wrong: PipelinePrograms):
    with pytest.raises(AssertionError, match=message):
        check_programs(PIPELINE, wrong)


def test_a_stage_program_that_is_never_run_is_found():
    idle = StageProgram(0, Phase.BACKWARD, (Ref(W, None),), ())
    pipeline = replace(PIPELINE, stage_programs=(*PIPELINE.stage_programs, idle))
    with pytest.raises(AssertionError, match="stage program 4 is never run for micro-batch 0"):
        check_programs(pipeline, programs(donated=(*DONATED, ())))


def test_a_result_that_was_used_up_is_found():
    pipeline = replace(PIPELINE, outputs=(Place(TOTAL, 1), Place(W, 0)))
    second = (*SECOND[:5], Free((2,)))
    with pytest.raises(AssertionError, match=r"result 0 is not in buffer 0.*used up"):
        check_programs(pipeline, programs(second=second, outputs=((0, 0),)))
    check_programs(
        pipeline,
        programs(second=second, outputs=((0, 0),), donated=((), (), (0, 1), ())),
    )


def test_a_sum_that_is_sent_before_it_is_complete_is_found():
    stage_programs = (
        StageProgram(0, Phase.PREPARE, (), (Ref(TOTAL, None),)),
        StageProgram(0, Phase.FORWARD, (Ref(TOTAL, None),), (Ref(TOTAL, None),)),
    )
    transfers = (Transfer(Ref(TOTAL, None), 0, 1),)
    pipeline = Pipeline(1, (0, 1), stage_programs, transfers, (), (Place(TOTAL, 1),))
    zeros, add = Run(0, None, (), (0,)), Run(1, 0, (0,), (0,))
    send, free = Send((0,), (0,), None, 1, 0), Free((0,))
    second = MeshProgram((Recv((0,), (0,), None, 0, 0),), (), ((0, 0),), 1)

    def check(*first: Instruction) -> None:
        meshes = MeshProgram(first, (), (), 1), second
        check_programs(pipeline, PipelinePrograms(meshes, ((), (0,))))

    check(zeros, add, send, free)
    with pytest.raises(AssertionError, match="was sent before it was complete"):
        check(zeros, send, add, free)


def test_parts_run_in_order():
    stage_programs = (
        StageProgram(0, Phase.UPDATE, (Ref(W, None),), (Ref(1, None),), part=0),
        StageProgram(0, Phase.UPDATE, (Ref(W, None),), (Ref(2, None),), part=1),
    )
    outputs = (Place(1, 0), Place(2, 0))
    pipeline = Pipeline(1, (0,), stage_programs, (), (Place(W, 0),), outputs)
    runs = Run(0, None, (0,), (1,)), Run(1, None, (0,), (2,))

    def check(*order: Instruction) -> None:
        mesh = MeshProgram(order, ((0, 0),), ((0, 1), (1, 2)), 3)
        check_programs(pipeline, PipelinePrograms((mesh,), ((), ())))

    check(*runs)
    with pytest.raises(AssertionError, match="runs before stage program 0 for micro-batch None"):
        check(*reversed(runs))
