"""In which order one process goes through the lists of several meshes."""

from __future__ import annotations

import pytest

from autopar.ir.pipeline import Free, Instruction, MeshProgram, PipelinePrograms, Recv, Run, Send
from autopar.runtime.order import interleave, live_bytes_over_time


def programs(*lists: list[Instruction], donated: tuple[tuple[int, ...], ...] = ((),) * 3):
    meshes = tuple(MeshProgram(tuple(own), ((mesh, 0),), (), 9) for mesh, own in enumerate(lists))
    return PipelinePrograms(meshes, donated)


def test_meshes_take_turns_stage_program_by_stage_program() -> None:
    order = interleave(
        programs(
            [Run(0, 0, (0,), (1,)), Free((1,)), Run(0, 1, (0,), (2,)), Run(0, 2, (0,), (3,))],
            [Run(1, 0, (0,), (1,)), Run(1, 1, (0,), (2,))],
        )
    )
    assert [(step.mesh, type(step.instruction)) for step in order] == [
        (0, Run), (0, Free), (1, Run), (0, Run), (1, Run), (0, Run),
    ]  # fmt: skip


def test_a_mesh_waits_for_what_it_receives() -> None:
    there, back = 7, 7  # tags count between two meshes
    order = interleave(
        programs(
            [Recv((1,), (0,), None, 1, back), Run(0, 0, (1,), (2,))],
            [
                Run(1, 0, (0,), (1,)),
                Send((1,), (0,), None, 0, back),
                Send((1,), (1,), None, 2, there),
            ],
            [Recv((5,), (1,), None, 1, there), Run(2, 0, (5,), (6,))],
        )
    )
    assert [(step.mesh, type(step.instruction)) for step in order] == [
        (1, Run), (1, Send), (1, Send), (2, Run), (0, Run),
    ]  # fmt: skip
    assert [step.received for step in order] == [(), (1,), (5,), (), ()]


def test_lists_that_wait_for_each_other() -> None:
    one = [Recv((1,), (0,), None, 1, 0), Send((1,), (1,), None, 1, 0)]
    other = [Recv((1,), (1,), None, 0, 0), Send((1,), (0,), None, 0, 0)]
    with pytest.raises(AssertionError, match="wait for each other"):
        interleave(programs(one, other))


def test_bytes_that_lie_on_meshes() -> None:
    """Buffer b has 10**b bytes. Stage program 0 uses up what it reads; what is sent lies there at
    once."""
    lists = programs(
        [Run(0, 0, (0,), (1,)), Send((1,), (0,), 0, 1, 0), Free((1,))],
        [Run(1, 0, (0,), (0,)), Recv((2,), (0,), 0, 0, 0), Run(2, 0, (0, 2), (3,)), Free((2,))],
        donated=((0,), (0,), ()),
    )
    moments = live_bytes_over_time(interleave(lists), lists, lambda buffer: 10 ** buffer[1])
    assert [(moment.mesh, moment.live_bytes) for moment in moments] == [
        (0, 10), (1, 101), (0, 0), (1, 101), (1, 1101), (1, 1001),
    ]  # fmt: skip
