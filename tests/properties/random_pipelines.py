"""Random pipelines, and two ways to run them on symbols: one stage program at a time, and by their
instruction lists.

Every value is a number: a stage program writes a hash of itself and of everything it reads, and
adds such a hash to what it updates in place, as a sum does. So a buffer that is mixed up, missing
or stale changes the results.
"""

from __future__ import annotations

import random

from autopar.ir.pipeline import (
    EACH,
    PER_MICRO_BATCH,
    Free,
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

SUM_MODULUS = 2**61 - 1


def random_pipeline(
    rng: random.Random,
    num_micro_batches: int,
    stage_mesh: tuple[int, ...],
    phases: tuple[Phase, ...] = PER_MICRO_BATCH,
) -> Pipeline:
    """A pipeline whose micro-batches have the given phases, though not on every stage."""
    maker = _Maker(rng, num_micro_batches, stage_mesh)
    stages = range(len(stage_mesh))
    for _ in range(rng.randint(1, 5)):
        maker.add_input(rng.choice(stages))
    order = [stage for stage in stages for _ in range(rng.randint(0, 2))]
    rng.shuffle(order)
    for stage in order:
        maker.add_once(Phase.PREPARE, stage)
    sums = [maker.new_sum(stage) for stage in stages for _ in range(rng.randint(0, 2))]
    maker.start_micro_batch()
    for phase in phases:
        for stage in stages if phase is Phase.FORWARD else reversed(stages):
            if rng.random() < 0.9:
                maker.add_each(phase, stage, sums)
    maker.end_micro_batches()
    order = [stage for stage in stages for _ in range(rng.randint(0, 3))]
    rng.shuffle(order)
    for stage in order:
        maker.add_once(Phase.UPDATE, stage)
    return maker.finished()


class _Maker:
    """Adds stage programs in a valid order; each reads some existing values from any stage."""

    def __init__(
        self, rng: random.Random, num_micro_batches: int, stage_mesh: tuple[int, ...]
    ) -> None:
        self.rng, self.num_micro_batches, self.stage_mesh = rng, num_micro_batches, stage_mesh
        self.stage_programs: list[StageProgram] = []
        self.transfers: list[Transfer] = []
        self.inputs: list[Place] = []
        self.num_values = 0
        self.holders: dict[Ref, list[int]] = {}  # stages that have it; its producer comes first
        self.made_by: dict[Ref, tuple[Phase, int]] = {}  # phase and stage
        self.sums: set[Ref] = set()  # not complete yet

    def add_input(self, stage: int) -> None:
        self.inputs.append(Place(self.num_values, stage))
        self._new(stage, None)

    def new_sum(self, stage: int) -> Ref:
        """A sum over micro-batches, starting as zeros from a PREPARE stage program."""
        total = self._new(stage, None)
        self._add(
            StageProgram(stage, Phase.PREPARE, (), (total,), self._next_part(stage, Phase.PREPARE))
        )
        self.sums.add(total)
        return total

    def add_once(self, phase: Phase, stage: int) -> None:
        there = self._complete()
        if phase is Phase.PREPARE:  # parts of a batch are sent for EACH micro-batch later
            there = [r for r in there if r.micro_batch is None or stage in self.holders[r]]
        reads = [self._fetched(ref, stage) for ref in self._some(there, 4)]
        writes = [self._new(stage, None) for _ in range(self.rng.randint(1, 2))]
        if phase is Phase.PREPARE and self.rng.random() < 0.5:  # a batch that is cut
            value = self._value()
            refs = [Ref(value, i) for i in range(self.num_micro_batches)]
            self.rng.shuffle(refs)
            for ref in refs:
                self.holders[ref] = [stage]
            writes += refs
        self._add(
            StageProgram(stage, phase, tuple(reads), tuple(writes), self._next_part(stage, phase))
        )

    def start_micro_batch(self) -> None:
        """From now on, EACH refers to a micro-batch's part of what was cut."""
        for value, i in list(self.holders):
            if i is not None:
                if i == 0:
                    self.holders[Ref(value, EACH)] = self.holders[Ref(value, i)][:1]
                del self.holders[Ref(value, i)]

    def add_each(self, phase: Phase, stage: int, sums: list[Ref]) -> None:
        there = [ref for ref in self._complete() if self._may_read(phase, stage, ref)]
        reads = [self._fetched(ref, stage) for ref in self._some(there, 5)]
        writes = [self._new(stage, EACH) for _ in range(self.rng.randint(0, 3))]
        own = [ref for ref in sums if self.holders[ref][0] == stage]
        in_place = self._some(own, len(own))
        reads, writes = [*reads, *in_place], [*writes, *in_place]
        self.rng.shuffle(reads)
        self.rng.shuffle(writes)
        for ref in writes:
            if ref not in in_place:
                self.made_by[ref] = phase, stage
        self._add(StageProgram(stage, phase, tuple(reads), tuple(writes)))

    def end_micro_batches(self) -> None:
        """From now on, every micro-batch's part exists under its number."""
        self.sums.clear()
        for value, i in list(self.holders):
            if i == EACH:
                holders = self.holders.pop(Ref(value, EACH))
                for number in range(self.num_micro_batches):
                    self.holders[Ref(value, number)] = list(holders)

    def finished(self) -> Pipeline:
        once = [ref for ref in self.holders if ref.micro_batch is None]
        outputs = [Place(ref.value, self.rng.choice(self.holders[ref])) for ref in once]
        chosen = self.rng.sample(outputs, self.rng.randint(1, len(outputs)))
        donated = frozenset(n for n in range(len(self.inputs)) if self.rng.random() < 0.5)
        self.rng.shuffle(self.transfers)
        return Pipeline(
            self.num_micro_batches,
            self.stage_mesh,
            tuple(self.stage_programs),
            tuple(self.transfers),
            tuple(self.inputs),
            tuple(chosen),
            donated,
        )

    def _value(self) -> int:
        self.num_values += 1
        return self.num_values - 1

    def _new(self, stage: int, micro_batch: int | None) -> Ref:
        ref = Ref(self._value(), micro_batch)
        self.holders[ref] = [stage]
        return ref

    def _add(self, stage_program: StageProgram) -> None:
        self.stage_programs.append(stage_program)

    def _next_part(self, stage: int, phase: Phase) -> int:
        return sum(
            stage_program.stage == stage and stage_program.phase is phase
            for stage_program in self.stage_programs
        )

    def _some(self, refs: list[Ref], most: int) -> list[Ref]:
        return self.rng.sample(refs, min(len(refs), self.rng.randint(0, most)))

    def _complete(self) -> list[Ref]:
        return [ref for ref in self.holders if ref not in self.sums]

    def _may_read(self, phase: Phase, stage: int, ref: Ref) -> bool:
        """Gradients of weights wait only for the backward pass of their own stage."""
        if ref not in self.made_by or phase is not Phase.WEIGHTS:
            return True
        made_in, made_at = self.made_by[ref]
        return made_in is not Phase.WEIGHTS and (made_in is Phase.FORWARD or made_at >= stage)

    def _fetched(self, ref: Ref, stage: int) -> Ref:
        """Makes the stage receive the ref from a stage that has it, or a copy of it."""
        holders = self.holders[ref]
        if stage not in holders:
            source = self.rng.choice(holders)
            self.transfers.append(Transfer(ref, source, stage))
            holders.append(stage)
        return ref


# -- running


def arguments(pipeline: Pipeline) -> list[int]:
    return [hash(("argument", n)) for n in range(len(pipeline.inputs))]


def run_stage_programs(pipeline: Pipeline) -> list[int]:
    """The results of running one stage program after another, with one memory for all stages."""
    memory = {
        Ref(place.value, None): symbol
        for place, symbol in zip(pipeline.inputs, arguments(pipeline), strict=True)
    }

    def run(p: int, micro_batch: int | None) -> None:
        stage_program = pipeline.stage_programs[p]
        values = [memory[ref.of(micro_batch)] for ref in stage_program.reads]
        for ref, value in zip(stage_program.writes, _results(pipeline, p, values), strict=True):
            memory[ref.of(micro_batch)] = value

    stage_programs = list(enumerate(pipeline.stage_programs))
    for p, stage_program in stage_programs:
        if stage_program.phase is Phase.PREPARE:
            run(p, None)
    for i in range(pipeline.num_micro_batches):
        for phase in PER_MICRO_BATCH:
            for p, stage_program in stage_programs:
                if stage_program.phase is phase:
                    run(p, i)
    for p, stage_program in stage_programs:
        if stage_program.phase is Phase.UPDATE:
            run(p, None)
    return [memory[Ref(place.value, None)] for place in pipeline.outputs]


def run_lists(pipeline: Pipeline, programs: PipelinePrograms, rng: random.Random) -> list[int]:
    """The results of running the instruction lists, with a memory per mesh; meshes alternate at
    random."""
    symbols = arguments(pipeline)
    memories = [{buffer: symbols[n] for n, buffer in program.inputs} for program in programs.meshes]
    positions = [0] * len(memories)
    post: dict[int, list[int]] = {}
    while True:
        able = [
            mesh
            for mesh, program in enumerate(programs.meshes)
            if _can_go_on(program, positions[mesh], post)
        ]
        if not able:
            break
        mesh = rng.choice(able)
        memory = memories[mesh]
        instruction = programs.meshes[mesh].instructions[positions[mesh]]
        positions[mesh] += 1
        match instruction:
            case Run(stage_program=p):
                written = _results(pipeline, p, [memory[b] for b in instruction.reads])
                for n in programs.donated[p]:
                    memory[instruction.reads[n]] = -1
                memory.update(zip(instruction.writes, written, strict=True))
            case Send():
                post[instruction.tag] = [memory[b] for b in instruction.buffers]
            case Recv():
                sent = post.pop(instruction.tag)
                memory.update(zip(instruction.buffers, sent, strict=True))
            case Free():
                for buffer in instruction.buffers:
                    del memory[buffer]
    results = {
        n: memories[mesh][buffer]
        for mesh, program in enumerate(programs.meshes)
        for n, buffer in program.outputs
    }
    return [results[n] for n in range(len(pipeline.outputs))]


def _can_go_on(program: MeshProgram, position: int, post: dict[int, list[int]]) -> bool:
    if position == len(program.instructions):
        return False
    instruction = program.instructions[position]
    return not isinstance(instruction, Recv) or instruction.tag in post


def _results(pipeline: Pipeline, p: int, values: list[int]) -> list[int]:
    stage_program = pipeline.stage_programs[p]
    read = dict(zip(stage_program.reads, values, strict=True))
    in_place = set(stage_program.writes) & set(stage_program.reads)
    rest = tuple(value for ref, value in read.items() if ref not in in_place)
    return [
        (read.get(ref, 0) + hash((p, n, rest))) % SUM_MODULUS
        for n, ref in enumerate(stage_program.writes)
    ]
