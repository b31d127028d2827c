"""From a `TracedStep` to one whose light branches are computed all, and one of them selected.

`lax.cond` takes state as a whole, so a stack that is replaced inside of one could not be split over
the stages of a pipeline: `optax.apply_if_finite` updates state, or leaves it as it was. Written as
a selection, each branch is work of the update like any other, row by row, and XLA fuses it with the
selection. What the other branch has computed is dropped, be it a number or not.

Only conditions that read state, with branches of elementwise operations and reductions, are light:
the branch that is not taken costs no more than an update does.
"""

from __future__ import annotations

from dataclasses import replace

from jax import Array, lax

from autopar.ir.program import Equation, Operand, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.program_writer import Env, ProgramWriter, read_all
from autopar.rewrite.residuals import is_cheap
from autopar.tracer.costs import REDUCTIONS


def select_branches(step: TracedStep) -> TracedStep:
    """The step with its light conditions selected; the step itself if it has none."""
    program = step.program
    state = {value for i, value in enumerate(program.inputs) if i not in step.batch}
    chosen = {
        index
        for index, one in enumerate(program.equations)
        if _is_light(one) and not state.isdisjoint(one.inputs)
    }
    return replace(step, program=_selected(program, chosen)) if chosen else step


def _is_light(equation: Equation) -> bool:
    if equation.name != "cond" or equation.has_effect:
        return False
    inside = (one for body in equation.bodies for one in body.equations)
    return all(is_cheap(one) or one.name in REDUCTIONS or _is_light(one) for one in inside)


def _selected(program: Program, chosen: set[int]) -> Program:
    writer, env = ProgramWriter(), Env()
    inputs = [writer.new_value(program.avals[v]) for v in program.inputs]
    env.update(zip(program.inputs, inputs, strict=True))
    for value, array in program.captured:
        env[value] = writer.capture(array, program.avals[value])
    for index, equation in enumerate(program.equations):
        if index in chosen:
            _select(equation, program, writer, env)
        else:
            writer.copy(equation, program.avals, env)
    return writer.program(inputs, read_all(program.outputs, env))


def _select(cond: Equation, program: Program, writer: ProgramWriter, env: Env) -> None:
    index, *operands = read_all(cond.operands, env)
    results = [_branch(body, cond, operands, program, writer) for body in cond.bodies]
    for result, *cases in zip(cond.results, *results, strict=True):
        is_known = isinstance(cases[0], int) and cases.count(cases[0]) == len(cases)
        env[result] = cases[0] if is_known else writer.emit(_case, [index, *cases], cond)


def _branch(
    body: Program,
    cond: Equation,
    operands: list[Operand],
    program: Program,
    writer: ProgramWriter,
) -> list[Operand]:
    """Writes a branch in place of its condition; returns its results."""
    inside: Env = dict(zip(body.inputs, operands, strict=True))
    for value, array in body.captured:
        inside[value] = writer.capture(array, program.avals[value])
    for equation in body.equations:
        below = cond.name_stack + equation.name_stack
        named = replace(equation, name_stack=below, scope=str(below))
        if equation.bodies:
            _select(named, program, writer, inside)
        else:
            writer.copy(named, program.avals, inside)
    return read_all(body.outputs, inside)


def _case(index: Array, *cases: Array) -> Array:
    """JAX gives a condition the number of its branch, and clamps it."""
    number = lax.clamp(index.dtype.type(0), index, index.dtype.type(len(cases) - 1))
    return lax.select_n(lax.broadcast(number, cases[0].shape), *cases)
