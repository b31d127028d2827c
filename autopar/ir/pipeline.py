"""Pipelines as data: stage programs of a step, the buffers between them, and what each mesh runs.

A step on several meshes is cut into *stage programs*, programs that one mesh runs at once. A
`Pipeline` says what stage programs there are, which buffers they read and write, and what is sent
from stage to stage. With a schedule it becomes one static list of instructions per mesh
(`PipelinePrograms`), the same for every step, which a runtime follows without deciding anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from autopar.ir.rows import Rows

EACH = -1  # in place of a micro-batch's number: the one that is being run


class Ref(NamedTuple):
    """A buffer of a stage, by the program's value that it holds.

    micro_batch: None for what there is once per step, `EACH` for that of the micro-batch which is
                 being run, or a micro-batch's number (where a batch is cut, or put together).
    """

    value: int
    micro_batch: int | None

    def of(self, micro_batch: int | None) -> Ref:
        """The buffer that is meant while that micro-batch is being run."""
        return Ref(self.value, micro_batch) if self.micro_batch == EACH else self


class Slot(NamedTuple):
    """A buffer of a step: its stage, and a ref that does not say `EACH`."""

    stage: int
    ref: Ref


def slots_of(stage: int, refs: Iterable[Ref], micro_batch: int | None) -> tuple[Slot, ...]:
    """What refs of a stage mean while that micro-batch is being run. There are millions of them,
    and made like this they take a third of the time."""
    new = tuple.__new__
    return tuple(
        [
            new(Slot, (stage, new(Ref, (ref[0], micro_batch)) if ref[1] == EACH else ref))
            for ref in refs
        ]
    )


class Phase(Enum):
    """When a stage program runs: once before all micro-batches, for each of them, or once after
    all."""

    PREPARE = "prepare"
    FORWARD = "forward"
    BACKWARD = "backward"  # all of it, or what other stages wait for if the weights are apart
    WEIGHTS = "weights"  # the rest of the backward pass, which no other stage waits for
    UPDATE = "update"
    RESULTS = "results"  # all of it, where a stage makes its results in one program


PER_MICRO_BATCH = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS)


@dataclass(frozen=True)
class StageProgram:
    """A program of one stage. What it both reads and writes (sums over micro-batches) is updated
    in place; nothing else is written twice. A stage has at most one stage program per phase and
    part. Parts are run in order, those of PREPARE and UPDATE with transfers between them."""

    stage: int
    phase: Phase
    reads: tuple[Ref, ...]
    writes: tuple[Ref, ...]
    part: int = 0


@dataclass(frozen=True)
class Transfer:
    """A buffer of one stage that is copied to another, where it is known by the same ref, once it
    is complete: an argument, or when the last stage program that writes it has run. A ref with
    `EACH` is copied for every micro-batch."""

    ref: Ref
    source: int
    target: int


class Place(NamedTuple):
    """Where an argument or a result of the step is: its value, the stage that holds it, and which
    rows of it the stage holds; None for all."""

    value: int
    stage: int
    rows: Rows | None = None


@dataclass(frozen=True)
class Pipeline:
    """A step in stage programs. `stage_mesh` gives the mesh of each stage: several stages may share
    one. `donated` are positions of inputs whose buffers the step may use up. A result may be an
    argument that is handed on as it is. `arguments` is empty where each argument is one input, in
    order; an argument that several stages hold from the start, all of it or rows, is an input of
    each. So are `results`: a stack of which several stages make rows is an output of each."""

    num_micro_batches: int
    stage_mesh: tuple[int, ...]
    stage_programs: tuple[StageProgram, ...]
    transfers: tuple[Transfer, ...]
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    donated: frozenset[int] = frozenset()
    arguments: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    @property
    def result_of_output(self) -> Sequence[int]:
        """Per output, the position of the step's result that it holds."""
        return self.results or range(len(self.outputs))

    @property
    def argument_of_input(self) -> Sequence[int]:
        """Per input, the position of the step's argument that it holds."""
        return self.arguments or range(len(self.inputs))

    @property
    def num_stages(self) -> int:
        return len(self.stage_mesh)

    @property
    def num_meshes(self) -> int:
        return max(self.stage_mesh) + 1


def stage_program_names(pipeline: Pipeline) -> list[str]:
    """`stage0_forward`, and `stage0_update_1` for the second part of a phase."""
    return [
        f"stage{stage_program.stage}_{stage_program.phase.value}"
        + (f"_{stage_program.part}" if stage_program.part else "")
        for stage_program in pipeline.stage_programs
    ]


# -- instructions


@dataclass(frozen=True)
class Run:
    """Run a stage program (its number in `Pipeline.stage_programs`) on buffers, which are numbered
    per mesh. What is updated in place is among both, under one number."""

    stage_program: int
    micro_batch: int | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Send:
    """Send buffers to another stage's mesh, all together. `transfers` are numbers in
    `Pipeline.transfers`, one per buffer; `tag` names the pair of `Send` and `Recv`."""

    buffers: tuple[int, ...]
    transfers: tuple[int, ...]
    micro_batch: int | None
    to_mesh: int
    tag: int


@dataclass(frozen=True)
class Recv:
    buffers: tuple[int, ...]
    transfers: tuple[int, ...]
    micro_batch: int | None
    from_mesh: int
    tag: int


@dataclass(frozen=True)
class Free:
    """Let buffers go: nothing reads them any more. Every buffer that is neither a result nor an
    argument of the caller's has one `Free`, also if the last stage program that read it may use it
    up."""

    buffers: tuple[int, ...]


Instruction = Run | Send | Recv | Free


@dataclass(frozen=True)
class MeshProgram:
    """What one mesh does in a step, in this order. A `Send` waits for nothing, a `Recv` for its
    `Send`. Arguments are in their buffers when it starts, and results when it ends: (position
    among the step's inputs or outputs, buffer). A buffer's number is never given to another
    buffer."""

    instructions: tuple[Instruction, ...]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    num_buffers: int


@dataclass(frozen=True)
class PipelinePrograms:
    """The lists of all meshes. `donated[p]` are the positions in the reads of stage program p whose
    buffers it may use up, in every run of it alike."""

    meshes: tuple[MeshProgram, ...]
    donated: tuple[tuple[int, ...], ...]
