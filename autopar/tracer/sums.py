"""Sums that a loop may carry as partial sums: from a scan `Equation` to its `LoopSums`.

A loop that adds a value to its carry every trip (gradient accumulation, the gradient of a weight
that all trips share) need not reduce the value's partial sums: it can add them up, and one
reduction after the loop suffices. That holds if the carry starts at zero, only its own addition
reads it, and the terms come from reductions through linear ops that nothing but the sum reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from autopar import _jax
from autopar.ir.program import Constant, Equation, Operand, Program

ADDITIONS = ("add", "add_any")
# Linear ops of one operand, through which partial sums may flow.
LINEAR_UNARY = ("convert_element_type", "neg", "transpose", "reshape", "copy", "squeeze")
_REDUCTIONS = ("dot_general", "conv_general_dilated", "reduce_sum")
_SCATTER_ADD = ("scatter-add", "scatter_add")


@dataclass(frozen=True)
class LoopSums:
    """carries: position -> the last addition; values: those that may hold partial sums."""

    carries: dict[int, Equation]
    values: frozenset[int]


def is_zero(operand: Operand, zeros: Collection[int]) -> bool:
    if isinstance(operand, Constant):
        return bool(np.ndim(operand.value) == 0 and operand.value == 0)
    return operand in zeros


def zeros_made(equation: Equation, zeros: Collection[int]) -> tuple[int, ...]:
    """Results that are known to be zero."""
    same = ("broadcast_in_dim", "convert_element_type")
    if equation.name in same and is_zero(equation.operands[0], zeros):
        return equation.results
    return ()


def loop_sums(scan: Equation, zeros: Collection[int]) -> LoopSums:
    """The carries of a scan that only add up; `zeros` are values outside known to be zero."""
    (body,) = scan.bodies
    num_consts, num_carry = _jax.scan_sizes(scan.params)
    finder = _body_finder(scan, zeros)
    carries: dict[int, Equation] = {}
    values: set[int] = set()
    for position in range(num_carry):
        init = scan.operands[num_consts + position]
        carry, out = body.inputs[num_consts + position], body.outputs[position]
        if not is_zero(init, zeros) or not isinstance(out, int):
            continue
        summed = finder.summed_into(out, carry) if finder.num_reads[carry] == 1 else None
        if summed is not None and finder.reads_alone(summed, out):
            carries[position] = finder.made_by[out]
            values |= {carry, *summed}
    return LoopSums(carries, frozenset(values))


def _body_finder(scan: Equation, zeros: Collection[int]) -> _SumFinder:
    """A finder for the body of a scan that knows which of its constants are zero."""
    num_consts, _ = _jax.scan_sizes(scan.params)
    consts = list(zip(scan.operands, scan.bodies[0].inputs, strict=True))[:num_consts]
    return _SumFinder(scan.bodies[0], {v for o, v in consts if isinstance(o, int) and o in zeros})


class _SumFinder:
    def __init__(self, body: Program, zeros: set[int]) -> None:
        self.made_by = {r: e for e in body.equations for r in e.results}
        self.num_reads = body.num_reads()
        self.zeros = set(zeros)
        for equation in body.equations:
            self.zeros.update(zeros_made(equation, self.zeros))

    def reads_alone(self, summed: Collection[int], out: int) -> bool:
        """Whether nothing but the sum itself, which is the output `out`, reads its values."""
        reads = Counter((out,))
        for equation in {id(e): e for v in summed if (e := self.made_by.get(v))}.values():
            reads.update(v for v in equation.inputs if v in summed)
        return all(self.num_reads[value] == reads[value] for value in summed)

    def summed_into(self, value: Operand, carry: int) -> set[int] | None:
        """The values on the way from a carry to its new value, if that takes additions alone, and
        the terms added; None if anything else happens to it."""
        if value == carry:
            return set()
        if not isinstance(value, int) or value not in self.made_by:
            return None
        addition = self.made_by[value]
        if addition.name not in ADDITIONS:
            return None
        for carried, term in (addition.operands, addition.operands[::-1]):
            before = self.summed_into(carried, carry)
            added = None if before is None else self.unfinished(term)
            if before is not None and added is not None:
                return {value, *before, *added}
        return None

    def unfinished(self, value: Operand) -> set[int] | None:
        """The values from reductions up to this one, inclusive, if all may stay partial sums."""
        if not isinstance(value, int) or value not in self.made_by:
            return None
        equation = self.made_by[value]
        name, operands = equation.name, equation.operands
        if name == "scan":
            return self.of_inner_loop(equation, equation.results.index(value))
        if name in _REDUCTIONS:
            return set(equation.results)
        if name in _SCATTER_ADD:
            return set(equation.results) if is_zero(operands[0], self.zeros) else None
        if name in LINEAR_UNARY and len(operands) == 1:
            before = self.unfinished(operands[0])
            return None if before is None else {*before, *equation.results}
        if name in ADDITIONS:
            terms = [self.unfinished(o) for o in operands]
            if None not in terms:
                return {*equation.results, *(v for t in terms if t for v in t)}
        return None

    def of_inner_loop(self, scan: Equation, position: int) -> set[int] | None:
        """A result of an inner scan: a sum of its own, or a stack of partial sums."""
        num_carry = _jax.scan_sizes(scan.params)[1]
        if position < num_carry:
            is_sum = position in loop_sums(scan, self.zeros).carries
            return {scan.results[position]} if is_sum else None
        finder, out = _body_finder(scan, self.zeros), scan.bodies[0].outputs[position]
        inside = finder.unfinished(out)
        is_alone = inside is not None and isinstance(out, int) and finder.reads_alone(inside, out)
        return {*inside, scan.results[position]} if inside is not None and is_alone else None
