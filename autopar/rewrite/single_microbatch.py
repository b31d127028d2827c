"""A step as a loop of one trip: from a traced step to one in the form that micro-batches give.

Pipelines are made of loops over micro-batches. With one micro-batch nothing has to be cut or summed
up: the loop holds the forward and backward pass as they are, before it stands what is made of
parameters alone, after it the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from autopar import _jax
from autopar.errors import TraceError
from autopar.ir.program import Equation, Operand, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.program_writer import Env, ProgramWriter
from autopar.tracer.regions import UPDATE, equation_regions


def looped_once(step: TracedStep) -> TracedStep:
    writer = _Writer(step.program, step.batch)
    if not any(writer.inside):
        raise TraceError(
            f"{step.name}: a pipeline is what is done to a batch, and nothing in it reads one. "
            "Pass the batch as argument 1, or name it with batch_argnums."
        )
    program, loop = writer.written()
    return replace(step, program=program, loop=loop)


def _stacked(array: Any) -> Any:
    return array[None]


def _zeros(*, shape: tuple[int, ...], dtype: Any) -> Any:
    return jnp.zeros(shape, dtype)


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
        """Passes over the data. What depends on no data is made before the loop."""
        moving = set(self.data)
        found = []
        for equation, region in zip(self.program.equations, self.regions, strict=True):
            reads = equation.inputs
            is_inside = region != UPDATE and (equation.has_effect or not moving.isdisjoint(reads))
            if is_inside:
                moving.update(equation.results)
            found.append(is_inside)
        return found

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
        outputs = [env[o] if isinstance(o, int) else o for o in program.outputs]
        return outer.program(inputs, outputs), loop

    def write_loop(self, results: Sequence[int]) -> int:
        outer, inner = self.outer, self.outer.inner()
        own = [e for e, at in zip(self.program.equations, self.inside, strict=True) if at]
        inside: Env = {}
        made = {r for e in own for r in e.results}
        consts: list[tuple[Operand, int]] = []
        xs: list[tuple[Operand, int]] = []
        for value in dict.fromkeys(v for e in own for v in e.inputs):
            if value in made:
                continue
            number = inner.new_value(self.avals[value])
            inside[value] = number
            if value in self.data:
                xs.append((outer.emit(_stacked, [self.env[value]]), number))
            else:
                consts.append((self.env[value], number))
        for equation in own:
            inner.copy(equation, self.avals, inside)
        inits = [
            outer.emit(_zeros, [], shape=tuple(self.avals[v].shape), dtype=self.avals[v].dtype)
            for v in results
        ]
        carries = [inner.new_value(self.avals[v]) for v in results]
        body = inner.program(
            [*(n for _, n in consts), *carries, *(n for _, n in xs)],
            [inside[v] for v in results],
        )
        after = [outer.new_value(self.avals[v]) for v in results]
        self.env.update(zip(results, after, strict=True))
        outer.equations.append(
            Equation(
                primitive=_jax.scan_primitive(),
                params={
                    "length": 1,
                    "reverse": False,
                    "unroll": 1,
                    "num_consts": len(consts),
                    "num_carry": len(carries),
                },
                operands=(*(o for o, _ in consts), *inits, *(o for o, _ in xs)),
                results=tuple(after),
                scope="",
                name_stack=_jax.empty_name_stack(),
                source_info=own[0].source_info,
                context=own[0].context,
                bodies=(body,),
            )
        )
        return len(outer.equations) - 1
