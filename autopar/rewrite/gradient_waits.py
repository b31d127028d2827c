"""Recomputed layers that wait for gradients of later ones: `TracedStep` → `TracedStep`.

A layer is recomputed once its cotangent is there: one barrier takes that and the layer's inputs,
whether `jax.checkpoint` put it there or `rewrite.remat`. On several devices XLA runs the products
for gradients of parameters late, to hide collectives under them, and so keeps their operands: the
recomputed activations of about half of the layers. Here the barrier also takes the gradients that
later layers have made by then, so that one layer's activations are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autopar.ir.program import Program
from autopar.ir.traced_step import TracedStep
from autopar.tracer.copy_equations import Copier, rename, with_avals
from autopar.tracer.regions import BACKWARD, equation_regions

_BARRIER = "optimization_barrier"


def await_gradients(step: TracedStep) -> TracedStep:
    """The step whose barriers in the backward pass wait for the gradients before them; in a loop
    over micro-batches, those of its body. Not for stages: gradients may be on other devices."""
    if step.loop is None:
        program = _awaiting(step.program)
        return step if program is step.program else step.with_program(program)
    (body,) = step.program.equations[step.loop].bodies
    waiting = _awaiting(body)
    return step if waiting is body else step.with_loop_body(waiting)


def _ready_gradients(
    program: Program, regions: Sequence[str], firsts: Sequence[int]
) -> dict[int, list[int]]:
    """For each of these barriers: what the backward pass made since the one before, is read later,
    and no barrier depends on. Not what it made of constants alone."""
    needed = {v for i in firsts for v in program.equations[i].inputs}
    needed |= program.made_of_constants()
    for index in range(len(program.equations) - 1, -1, -1):
        equation = program.equations[index]
        if regions[index] == BACKWARD and not needed.isdisjoint(equation.results):
            needed.update(equation.inputs)
    last_read = {v: i for i, e in enumerate(program.equations) for v in e.inputs}
    last_read.update(dict.fromkeys(program.output_values, len(program.equations)))
    return {
        first: [
            value
            for index in range(before, first)
            if regions[index] == BACKWARD and program.equations[index].name != _BARRIER
            for value in program.equations[index].results
            if value not in needed and last_read.get(value, -1) >= first
        ]
        for before, first in pairwise((0, *firsts))
    }


def _awaiting(program: Program) -> Program:
    barriers = [i for i, e in enumerate(program.equations) if e.name == _BARRIER]
    if not barriers:
        return program
    regions = equation_regions(program)
    firsts = [i for i in barriers if regions[i] == BACKWARD]
    gradients = _ready_gradients(program, regions, firsts)
    if not any(gradients.values()):
        return program
    copier = Copier(list(program.avals))
    renamed: dict[int, int] = {}
    equations = []
    for index, equation in enumerate(program.equations):
        operands, results = rename(equation.operands, renamed), equation.results
        if ready := gradients.get(index):
            made = [copier.new_value(program.avals[v]) for v in ready]
            operands, results = (*operands, *rename(ready, renamed)), (*results, *made)
            renamed.update(zip(ready, made, strict=True))
        equations.append(with_avals(equation.of_values(operands, results), copier.avals))
    outputs = rename(program.outputs, renamed)
    return replace(program, outputs=outputs, equations=tuple(equations), avals=copier.avals)
