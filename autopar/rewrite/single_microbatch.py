"""A step as a loop over a single micro-batch: from a `TracedStep` to a looped one.

Pipelines are cut from loops over micro-batches. With a single micro-batch nothing has to be split
or summed up: the loop holds the forward and backward pass as they are. Equations that depend on
parameters alone come before it, the update after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax

from autopar.errors import TraceError
from autopar.ir.program import Equation, Operand, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.program_writer import Env, ProgramWriter, read_all, zeros
from autopar.tracer.regions import UPDATE, equation_regions


def loop_single_microbatch(step: TracedStep) -> TracedStep:
    writer = _Writer(step.program, step.batch)
    if not any(writer.inside):
        raise TraceError(
            f"{step.name}: a pipeline runs over a batch, but nothing in the step reads one. "
            "Pass the batch as argument 1, or name it with batch_argnums."
        )
    program, loop = writer.written()
    return replace(step, program=program, loop=loop)


def _stacked(array: jax.Array) -> jax.Array:
    return array[None]


class _Writer:
    def __init__(self, program: Program, batch: Sequence[int]) -> None:
        self.program = program
        self.avals = program.avals
        self.data = {program.inputs[i] for i in batch if program.avals[program.inputs[i]].shape}
        self.regions = equation_regions(program)
        self.inside = self.find_inside()
        self.outer = ProgramWriter()
        self.env: Env = {}

    def find_inside(self) -> list[bool]:
        """Per equation, whether it belongs to the passes over the data."""
        moving = set(self.data)
        inside = []
        for equation, region in zip(self.program.equations, self.regions, strict=True):
            reads = equation.inputs
            is_inside = region != UPDATE and (equation.has_effect or not moving.isdisjoint(reads))
            if is_inside:
                moving.update(equation.results)
            inside.append(is_inside)
        self.add_updates_between(inside)
        return inside

    def add_updates_between(self, inside: list[bool]) -> None:
        """Take in what lies between passes over the data: the update of one part of the state (the
        discriminator), where a later pass reads the updated one (to train the generator)."""
        equations = self.program.equations
        after: set[int] = set()  # values that depend on the passes
        depends = []
        for equation, at in zip(equations, inside, strict=True):
            is_after = at or not after.isdisjoint(equation.inputs)
            if is_after:
                after.update(equation.results)
            depends.append(is_after)
        read: set[int] = set()  # by the passes
        for index in reversed(range(len(equations))):
            equation = equations[index]
            inside[index] |= depends[index] and not read.isdisjoint(equation.results)
            if inside[index]:
                read.update(equation.inputs)

    def written(self) -> tuple[Program, int]:
        outer, env, program = self.outer, self.env, self.program
        inputs = [outer.new_value(self.avals[v]) for v in program.inputs]
        env.update(zip(program.inputs, inputs, strict=True))
        for value, array in program.captured:
            env[value] = outer.capture(array, self.avals[value])
        made = {
            r for e, at in zip(program.equations, self.inside, strict=True) if at for r in e.results
        }
        rest: list[Equation] = []
        ready = set(env)
        for equation, at in zip(program.equations, self.inside, strict=True):
            if at:
                continue
            if ready.issuperset(equation.inputs):
                ready.update(equation.results)
                outer.copy(equation, self.avals, env)
            else:
                rest.append(equation)
        read = {v for e in rest for v in e.inputs} | set(program.output_values)
        loop = self.write_loop(sorted(made & read))
        for equation in rest:
            outer.copy(equation, self.avals, env)
        return outer.program(inputs, read_all(program.outputs, env)), loop

    def write_loop(self, results: Sequence[int]) -> int:
        outer, inner = self.outer, self.outer.inner()
        equations = [e for e, at in zip(self.program.equations, self.inside, strict=True) if at]
        inside: Env = {}
        made = {r for e in equations for r in e.results}
        consts: list[tuple[Operand, int]] = []
        xs: list[tuple[Operand, int]] = []
        for value in dict.fromkeys(v for e in equations for v in e.inputs):
            if value in made:
                continue
            number = inner.new_value(self.avals[value])
            inside[value] = number
            if value in self.data:
                xs.append((outer.emit(_stacked, [self.env[value]]), number))
            else:
                consts.append((self.env[value], number))
        for equation in equations:
            inner.copy(equation, self.avals, inside)
        inits = [
            outer.emit(zeros, [], shape=tuple(self.avals[v].shape), dtype=self.avals[v].dtype)
            for v in results
        ]
        carries = [inner.new_value(self.avals[v]) for v in results]
        body = inner.program(
            [*(n for _, n in consts), *carries, *(n for _, n in xs)],
            [inside[v] for v in results],
        )
        after = [outer.new_value(self.avals[v]) for v in results]
        self.env.update(zip(results, after, strict=True))
        outer.scan(
            body,
            length=1,
            consts=[o for o, _ in consts],
            inits=inits,
            xs=[o for o, _ in xs],
            results=after,
            like=equations[0],
        )
        return len(outer.equations) - 1
