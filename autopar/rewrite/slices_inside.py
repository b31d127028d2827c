"""Layers' rows taken out of stacks inside of the loop: looped `TracedStep` → looped `TracedStep`.

Each layer reads its row of a stage's part of a stack (`split_stacks`). Slices before the loop over
micro-batches would each be a copy that lives as long as the loop does, beside the part itself. In
the loop they live as long as the layer runs, and XLA fuses most of them into what reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from autopar import _jax
from autopar.ir.program import Equation, Operand, values_in
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.program_writer import ProgramWriter

_SLICES = ("slice", "squeeze", "reshape")


def with_slices_inside(
    step: TracedStep, stage_of: Sequence[int], pieces: Collection[int]
) -> tuple[TracedStep, Sequence[int]]:
    """(the step, the stage of every equation of its body). `pieces`: values that are parts of
    stacks."""
    return _SliceMover(step, stage_of, pieces).moved() if pieces else (step, stage_of)


class _SliceMover:
    def __init__(self, step: TracedStep, stage_of: Sequence[int], pieces: Collection[int]) -> None:
        assert step.loop is not None
        self.step, self.position, self.program = step, step.loop, step.program
        self.stage_of, self.pieces = stage_of, pieces
        self.loop = self.program.equations[step.loop]
        (self.body,) = self.loop.bodies
        self.num_consts, _ = _jax.scan_sizes(self.loop.params)
        self.readers, self.made = self.program.readers(), self.program.producers()
        self.num_reads = Counter(values_in(self.loop.operands))
        self.kept = {*self.program.output_values, *values_in(self.loop.operands[self.num_consts :])}
        self.read_by: dict[int, set[int]] = {}  # value of the body -> stages
        self.first_reader: dict[int, int] = {}
        for index, (equation, stage) in enumerate(zip(self.body.equations, stage_of, strict=True)):
            for value in equation.inputs:
                self.read_by.setdefault(value, set()).add(stage)
                self.first_reader.setdefault(value, index)
        self.writer = ProgramWriter(self.program.avals)
        self.before: dict[int, list[Equation]] = {}  # equation of the body -> slices made for it
        self.stages: list[int] = []  # of the new body's equations
        self.consts: list[tuple[Operand, int]] = []  # (operand outside, input inside)
        self.inside: dict[int, int] = {}  # part -> input of the body

    def moved(self) -> tuple[TracedStep, Sequence[int]]:
        gone: set[int] = set()
        consts = zip(self.loop.operands, self.body.inputs[: self.num_consts], strict=False)
        for operand, value in consts:
            chain = self.chain(operand)
            stages = self.read_by.get(value, set())
            if not chain or len(stages) != 1 or min(stages) < 0:
                self.consts.append((operand, value))
            else:
                self.write(chain, value)
                gone.update(chain)
        if not gone:
            return self.step, self.stage_of
        equations = [
            self.new_loop() if index == self.position else equation
            for index, equation in enumerate(self.program.equations)
            if index not in gone
        ]
        program = replace(self.program, equations=tuple(equations))
        step = replace(self.step, program=program, loop=self.position - len(gone))
        return step, self.stages

    def chain(self, operand: Operand) -> list[int]:
        """The equations that take an operand of the loop, and nothing else, out of a part; the last
        one first."""
        chain: list[int] = []
        while isinstance(operand, int) and operand not in self.pieces:
            index = self.made.get(operand)
            reader = chain[-1] if chain else self.position
            is_shared = self.num_reads[operand] > 1 or set(self.readers[operand]) != {reader}
            if index is None or is_shared or operand in self.kept:
                return []
            equation = self.program.equations[index]
            if equation.name not in _SLICES:
                return []
            chain.append(index)
            operand = equation.operands[0]
        return chain if isinstance(operand, int) else []

    def write(self, chain: Sequence[int], target: int) -> None:
        """The equations of a chain, inside of the loop, so that the last makes `target` for its
        first reader."""
        first = self.program.equations[chain[-1]].operands[0]
        assert isinstance(first, int)
        if first not in self.inside:
            self.inside[first] = self.writer.new_value(self.program.avals[first])
            self.consts.append((first, self.inside[first]))
        value = self.inside[first]
        own = self.before.setdefault(self.first_reader[target], [])
        for index in reversed(chain):
            equation = self.program.equations[index]
            aval = self.program.avals[equation.results[0]]
            result = target if index == chain[0] else self.writer.new_value(aval)
            own.append(replace(equation, operands=(value,), results=(result,)))
            value = result

    def new_loop(self) -> Equation:
        equations: list[Equation] = []
        for index, (equation, stage) in enumerate(
            zip(self.body.equations, self.stage_of, strict=True)
        ):
            own = [*self.before.get(index, ()), equation]
            equations += own
            self.stages += [stage] * len(own)
        body = replace(
            self.body,
            inputs=(*(v for _, v in self.consts), *self.body.inputs[self.num_consts :]),
            equations=tuple(equations),
        )
        return replace(
            self.loop,
            operands=(*(o for o, _ in self.consts), *self.loop.operands[self.num_consts :]),
            params={**self.loop.params, "num_consts": len(self.consts)},
            bodies=(body,),
        )
