"""Equal arithmetic once, as XLA computes it: `Program` → `Program` without repetitions.

Derivatives of derivatives, and losses that apply a model several times, repeat products with the
same operands. XLA merges them, unless their layouts differ; so they are merged before layouts are
chosen, by numbering values: two equations with equal parameters and equally numbered operands have
one number, in a program or in one body of a loop.

Only arithmetic that comes after a product is merged, and products themselves. Masks, tables of
positions and casts of parameters are cheap where they are read, and one for all layers would tie
the layers together. Moves are left too: kernels read through them.

It comes after micro-batches are made: two means may be equal for a micro-batch, and differ for the
whole batch.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from autopar import _jax
from autopar.ir.program import Constant, Equation, Operand, Program, values_in
from autopar.tracer.costs import UNFUSED, VIEWS

_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
_NEVER = (UNFUSED | VIEWS | {"broadcast_in_dim", "convert_element_type", "transpose"}) - _PRODUCTS
_UNKNOWN = frozenset((_jax.CONSTRAIN, "optimization_barrier"))  # may differ with equal operands


def merge_equal(program: Program) -> Program:
    """The program itself if nothing in it is computed twice."""
    return _Merging(program).merged()


class _Merging:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbers: dict[int, int] = {}  # of values that equal an earlier one
        self.known: dict[Hashable, list[Equation]] = {}  # the first of each kind, by what is quick
        self.replaced: dict[int, int] = {}  # values → those that are read in their place
        self.follows: set[int] = set()  # values that are products, or computed from some

    def merged(self) -> Program:
        kept: list[Equation] = []
        is_new = False
        for equation in self.program.equations:
            if self._is_known(equation):
                continue
            bodies = tuple(map(merge_equal, equation.bodies))
            operands = tuple(map(self._read, equation.operands))
            if operands != equation.operands or any(
                body is not old for body, old in zip(bodies, equation.bodies, strict=True)
            ):
                equation, is_new = equation.of_values(operands, bodies=bodies), True
            kept.append(equation)
        if not self.replaced and not is_new:
            return self.program
        outputs = tuple(map(self._read, self.program.outputs))
        return replace(self.program, outputs=outputs, equations=self._needed(kept, outputs))

    def _read(self, operand: Operand) -> Operand:
        return operand if isinstance(operand, Constant) else self.replaced.get(operand, operand)

    def _is_known(self, equation: Equation) -> bool:
        """Whether its results are there already and may be read in its place."""
        is_product = equation.name in _PRODUCTS
        if is_product or not self.follows.isdisjoint(equation.inputs):
            self.follows.update(equation.results)
        equal = self._earlier(equation)
        if equal is None:
            return False
        first = equal.results
        self.numbers.update(zip(equation.results, first, strict=True))
        is_merged = equation.name not in _NEVER and self.follows.issuperset(equation.results)
        if is_merged:
            same = (self.replaced.get(value, value) for value in first)
            self.replaced.update(zip(equation.results, same, strict=True))
        return is_merged

    def _earlier(self, equation: Equation) -> Equation | None:
        """An equal one before it. Few are alike in name and operands, so the rest is compared for
        these alone."""
        is_marked = bool(equation.marks or equation.inner_marks)
        is_pure = not (equation.has_effect or equation.bodies or is_marked)
        if not is_pure or not equation.operands or equation.name in _UNKNOWN:
            return None
        numbers = self.numbers
        values = (numbers.get(o, o) if isinstance(o, int) else None for o in equation.operands)
        alike = self.known.setdefault((equation.name, *values), [])
        key = self._key(equation) if alike else None
        for one in alike if key is not None else ():
            if self._key(one) == key:
                return one
        alike.append(equation)
        return None

    def _key(self, equation: Equation) -> Hashable:
        """The same for equal equations; None if it has parameters that cannot be compared."""
        try:
            key = (
                equation.primitive,
                frozenset(equation.params.items()),
                tuple(map(self._number, equation.operands)),
                repr(_jax.context_settings(equation.context)),
            )
            hash(key)
        except TypeError:
            return None
        return key

    def _number(self, operand: Operand) -> Hashable:
        if isinstance(operand, int):
            return self.numbers.get(operand, operand)
        value: Any = np.asarray(operand.value)
        return str(operand.aval), value.dtype.str, value.tobytes()

    def _needed(self, kept: list[Equation], outputs: tuple[Operand, ...]) -> tuple[Equation, ...]:
        """Without those that only merged equations read."""
        before = self.program.num_reads()
        read = set(values_in(outputs))
        needed: list[Equation] = []
        for equation in reversed(kept):
            was_read = any(before[value] for value in equation.results)
            if equation.has_effect or not was_read or not read.isdisjoint(equation.results):
                needed.append(equation)
                read.update(equation.inputs)
        return tuple(needed[::-1])
