"""The bodies of a forward scan and of its backward scan as one program, and back.

In a scan of scans, the inner forward scan is in one body and the inner backward scan in another;
the outer scans carry its stacks from one to the other. Here an outer residual is the forward body's
own value, so that a rewrite of pairs of scans finds the inner pair in one program. Afterwards the
outer scans hand over what the new backward body reads: constants and slices that the forward scan
reads too, and stacks of everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program, values_in
from autopar.rewrite.scan_remat import live_equations, plain_params, residuals_of, scan_parts
from autopar.tracer.copy_equations import Copier, rename
from autopar.tracer.costs import aval_bytes


class LinkedBodies:
    """The scans at two indices of a program, of which the second reads stacks of the first.

    program: both bodies, the forward one first; its inputs are those that cost nothing to hand to
             the backward body, which are `free`.
    """

    def __init__(
        self, program: Program, forward: int, backward: int, free: Collection[int], copier: Copier
    ) -> None:
        self.copier = copier
        self.forward, self.backward = program.equations[forward], program.equations[backward]
        (made_in,), (read_in,) = self.forward.bodies, self.backward.bodies
        self.made_in, self.read_in = made_in, read_in
        position_of = {self.forward.results[p]: p for p in residuals_of(program, forward, backward)}
        inside = scan_parts(self.backward, read_in.inputs)
        outside = scan_parts(self.backward, self.backward.operands)
        self.linked: set[int] = set()  # positions of the forward scan's results
        self.renamed: dict[int, int] = {}
        self.xs: list[tuple[int, Operand]] = []  # the backward scan's others, with their slices
        for value, operand in zip(inside.xs, outside.xs, strict=True):
            position = position_of.get(operand) if isinstance(operand, int) else None
            source = None if position is None else made_in.outputs[position]
            if position is None or not isinstance(source, int):
                self.xs.append((value, operand))
                continue
            self.linked.add(position)
            self.renamed[value] = source
        self.consts = list(zip(inside.consts, outside.consts, strict=True))
        self.carry = list(zip(inside.carry, outside.carry, strict=True))
        own = [value for value, _ in (*self.consts, *self.carry, *self.xs)]
        kept = [o for p, o in enumerate(made_in.outputs) if p not in self.linked]
        self.program = Program(
            inputs=(*(v for v in made_in.inputs if v in free), *own),
            outputs=(*kept, *rename(read_in.outputs, self.renamed)),
            equations=(
                *made_in.equations,
                *(replace(e, operands=rename(e.operands, self.renamed)) for e in read_in.equations),
            ),
            avals=copier.avals,
            captured=(*made_in.captured, *read_in.captured),
        )

    def parted(self, equations: Sequence[Equation]) -> tuple[Equation, Equation] | None:
        """The two scans with what became of the program's equations, one for one; None if they
        would stack no less than before."""
        middle = len(self.made_in.equations)
        first, second = list(equations[:middle]), list(equations[middle:])
        outputs = rename(self.read_in.outputs, self.renamed)
        stacks, added, renamed, captured = self._handed_over(second, outputs)
        avals = self.copier.avals
        dropped = [p for p in self.linked if self.forward.results[p] not in stacks]
        lost = sum(aval_bytes(avals[self.forward.results[p]]) for p in dropped)
        if lost <= sum(aval_bytes(avals[stack]) for _, stack in added):
            return None
        kept = [p for p in range(len(self.forward.results)) if p not in dropped]
        made = (*(self.made_in.outputs[p] for p in kept), *(value for value, _ in added))
        results = (*(self.forward.results[p] for p in kept), *(stack for _, stack in added))
        body = replace(self.made_in, outputs=made, equations=live_equations(first, made))
        forward = replace(
            self.forward, results=results, bodies=(body,), params=plain_params(self.forward)
        )
        return forward, self._backward(second, rename(outputs, renamed), renamed, captured)

    def _handed_over(
        self, equations: Sequence[Equation], outputs: Sequence[Operand]
    ) -> tuple[set[int], list[tuple[int, int]], dict[int, int], list[tuple[int, Any]]]:
        """(stacks that the backward scan reads, (value, stack) for those that are new, {value of
        the forward body: value of the backward body}, captured constants)."""
        copier, made_in = self.copier, self.made_in
        inside = scan_parts(self.forward, made_in.inputs)
        outside = scan_parts(self.forward, self.forward.operands)
        const_of = dict(zip(inside.consts, outside.consts, strict=True))
        slice_of = dict(zip(inside.xs, outside.xs, strict=True))
        array_of = dict(made_in.captured)
        num_carry = _jax.scan_sizes(self.forward.params)[1]
        outputs_of_trip = zip(made_in.outputs, self.forward.results, strict=True)
        stack_of = {v: r for v, r in list(outputs_of_trip)[num_carry:] if isinstance(v, int)}
        known = {
            value for value, _ in (*self.consts, *self.carry, *self.xs, *self.read_in.captured)
        }
        known.update(r for e in equations for r in e.results)
        read = (v for e in equations for v in e.inputs)
        stacks: set[int] = set()
        added: list[tuple[int, int]] = []
        renamed: dict[int, int] = {}
        captured: list[tuple[int, Any]] = []
        for value in dict.fromkeys((*read, *values_in(outputs))):
            if value in known:
                continue
            if value in array_of:
                renamed[value] = copier.new_value(copier.avals[value])
                captured.append((renamed[value], array_of[value]))
                continue
            where = self.consts if value in const_of else self.xs
            operand = const_of.get(value, slice_of.get(value, stack_of.get(value)))
            if operand is None:
                length = self.forward.params["length"]
                operand = copier.new_value(_jax.stacked_aval(copier.avals[value], length))
                added.append((value, operand))
            if isinstance(operand, int):
                stacks.add(operand)
            there = (i for i, o in where if isinstance(o, int) and o == operand)
            inner = next(there, None)
            if inner is None:
                inner = copier.new_value(copier.avals[value])
                where.append((inner, operand))
            renamed[value] = inner
        return stacks, added, renamed, captured

    def _backward(
        self,
        equations: Sequence[Equation],
        outputs: tuple[Operand, ...],
        renamed: dict[int, int],
        captured: list[tuple[int, Any]],
    ) -> Equation:
        parts = (*self.consts, *self.carry, *self.xs)
        body = Program(
            inputs=tuple(value for value, _ in parts),
            outputs=outputs,
            equations=tuple(replace(e, operands=rename(e.operands, renamed)) for e in equations),
            avals=self.copier.avals,
            captured=(*self.read_in.captured, *captured),
        )
        params = plain_params(self.backward) | {"num_consts": len(self.consts)}
        operands = tuple(operand for _, operand in parts)
        return replace(self.backward, operands=operands, params=params, bodies=(body,))
