"""Copies of equations under new value numbers, for recomputation: `Equation` → `Equation`.

A program numbers the values of all its bodies in one sequence, so a copied loop needs new numbers
inside as well. The scope of a copy is marked: `regions.region_by_name` takes it for a backward
equation, and `regions.module_name` still finds its module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program

MARK = "rematted_computation"  # JAX writes it too, for `jax.checkpoint`


class Copier:
    """Copies equations of a program with the given `avals`, to which it appends new values."""

    def __init__(self, avals: list[ShapedArray]) -> None:
        self.avals = avals

    def new_value(self, aval: ShapedArray) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def equation(self, equation: Equation, renamed: dict[int, int]) -> Equation:
        """The equation with renamed operands and new results; adds the results to `renamed`."""
        operands = rename(equation.operands, renamed)
        bodies = tuple(self.body(body) for body in equation.bodies)
        results = tuple(self.new_value(self.avals[r]) for r in equation.results)
        renamed.update(zip(equation.results, results, strict=True))
        return replace(
            equation,
            operands=operands,
            results=results,
            bodies=bodies,
            scope=f"transpose({MARK})/{equation.scope}",
            name_stack=_jax.below_name(MARK, equation.name_stack),
        )

    def body(self, body: Program) -> Program:
        renamed: dict[int, int] = {}
        captured = tuple((self.new_value(self.avals[v]), const) for v, const in body.captured)
        renamed.update(
            (old, new) for (old, _), (new, _) in zip(body.captured, captured, strict=True)
        )
        inputs = tuple(self.new_value(self.avals[v]) for v in body.inputs)
        renamed.update(zip(body.inputs, inputs, strict=True))
        equations = tuple(self.equation(e, renamed) for e in body.equations)
        return Program(inputs, rename(body.outputs, renamed), equations, self.avals, captured)

    def barrier(self, operands: Iterable[int], like: Equation, renamed: dict[int, int]) -> Equation:
        """One barrier for all operands: readers of its results have to wait for all of them, and
        the compiler cannot merge them with readers of the operands."""
        operands = tuple(operands)
        results = tuple(self.new_value(self.avals[o]) for o in operands)
        renamed.update(zip(operands, results, strict=True))
        return Equation(
            primitive=_jax.optimization_barrier_primitive(),
            params={},
            operands=operands,
            results=results,
            scope=f"transpose({MARK})/{like.scope}",
            name_stack=_jax.below_name(MARK, like.name_stack),
            source_info=like.source_info,
            context=like.context,
            callers=like.callers,
        )


def rename(operands: Iterable[Operand], renamed: Mapping[int, int]) -> tuple[Operand, ...]:
    return tuple(renamed.get(o, o) if isinstance(o, int) else o for o in operands)


def with_avals(equation: Equation, avals: list[ShapedArray]) -> Equation:
    """The equation with the avals of a new program in its bodies."""
    if not equation.bodies:
        return equation
    bodies = tuple(
        replace(body, equations=tuple(with_avals(e, avals) for e in body.equations), avals=avals)
        for body in equation.bodies
    )
    return replace(equation, bodies=bodies)


def needed_equations(
    equations: Iterable[Equation], wanted: set[int], known: set[int]
) -> tuple[list[Equation], set[int]]:
    """The equations that compute the wanted values, in order, and the values that they read from
    others. `known` values are not computed again, nor are results of equations with effects."""
    chosen: list[Equation] = []
    wanted = wanted - known
    for equation in reversed(list(equations)):
        if equation.has_effect or wanted.isdisjoint(equation.results):
            continue
        chosen.append(equation)
        wanted.update(v for v in equation.inputs if v not in known)
    chosen.reverse()
    made = {r for e in chosen for r in e.results}
    read = {o for e in chosen for o in e.inputs}
    return chosen, read - made
