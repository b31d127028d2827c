"""What a worker was doing, in words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.ir.pipeline import Free, Recv, Run, Send
from autopar.runtime.remote.activity import describe_instruction

INSTRUCTIONS = (
    Recv(buffers=(3,), transfers=(0,), micro_batch=2, from_mesh=0, tag=0),
    Run(stage_program=0, micro_batch=2, reads=(3,), writes=(4, 5)),
    Send(buffers=(4, 5), transfers=(1, 2), micro_batch=None, to_mesh=0, tag=1),
    Free((3,)),
)
WORDS = {
    -1: (1, "taking the arguments of a step"),
    0: (1, "receiving 1 arrays of micro-batch 2 from mesh 0"),
    1: (7, "running stage7_forward of micro-batch 2"),
    2: (1, "sending 2 arrays to mesh 0"),
    3: (1, "freeing 1 arrays"),
    4: (None, ""),
}


@pytest.mark.parametrize("place", WORDS)
def test_every_instruction_has_words(place: int) -> None:
    lowered: Any = SimpleNamespace(
        programs=SimpleNamespace(meshes=[None, SimpleNamespace(instructions=INSTRUCTIONS)]),
        stage_programs=[SimpleNamespace(name="stage7_forward", stage=7)],
        stage_mesh=(0, 1),
    )
    assert describe_instruction(lowered, 1, place) == WORDS[place]
