"""Scans that take their layers' rows by the number of the trip: a step → one whose scans slice.

    def body(i, x): return layer(x, jax.tree.map(lambda w: w[i], weights))
    lax.fori_loop(0, num_layers, body, x)

What a scan reads as slices has a row per layer; an array that all trips read, and of which each
takes a row, is one array for every pass that looks for layers. JAX's derivative then adds a whole
array of zeros with one row to the gradient in every trip. So rows that are taken in order become
slices, and gradients that are made row by row become stacks. The index is known before the step
runs (`rewrite.known_integers`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from jax import Array, lax
from jax.core import ShapedArray

from autopar import _jax
from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite.known_integers import (
    Known,
    as_integers,
    known_in_body,
    note_integers,
    read_integer,
)
from autopar.rewrite.program_writer import ProgramWriter, add
from autopar.rewrite.prune_scans import pruned
from autopar.rewrite.scan_remat import plain_params, scan_parts
from autopar.tracer.copy_equations import rename, with_avals


def slice_rows(step: TracedStep) -> TracedStep:
    """The step itself if no scan takes rows by index."""
    if not any(e.name == "scan" for e in step.program.equations):
        return step
    avals = list(step.program.avals)
    changed = _Body(step.program, avals, {}, set()).rewritten()
    if changed is step.program:
        return step
    equations = tuple(with_avals(e, avals) for e in changed.equations)
    program = pruned(replace(changed, equations=equations, avals=avals))
    return step.with_program(program, is_thinned=True)


class _Body:
    """A program, or the body of a loop. `known`, `zeros`: of its inputs."""

    def __init__(
        self, program: Program, avals: list[ShapedArray], known: Known, zeros: set[int]
    ) -> None:
        self.program, self.avals = program, avals
        self.known, self.zeros = dict(known), set(zeros)
        for value, array in program.captured:
            integers = as_integers(array) if np.ndim(array) <= 1 else None
            if integers is not None:
                self.known[value] = integers

    def rewritten(self) -> Program:
        equations, is_changed = [], False
        for equation in self.program.equations:
            new = self.scan(equation) if equation.name == "scan" else equation
            is_changed |= new is not equation
            equations.append(new)
            note_integers(equation, self.known)
            self.note_zeros(equation)
        return replace(self.program, equations=tuple(equations)) if is_changed else self.program

    def note_zeros(self, equation: Equation) -> None:
        if equation.name == "broadcast_in_dim" and self.is_zero(equation.operands[0]):
            self.zeros.add(equation.results[0])

    def is_zero(self, operand: Operand) -> bool:
        if isinstance(operand, Constant):
            return np.shape(operand.value) == () and not np.any(np.asarray(operand.value))
        return operand in self.zeros

    def scan(self, scan: Equation) -> Equation:
        (body,) = scan.bodies
        inside, outside = scan_parts(scan, body.inputs), scan_parts(scan, scan.operands)
        trips = known_in_body(scan, self.known)
        shared = list(zip(inside.consts, outside.consts, strict=True))
        known = {i: x for i, o in shared if (x := read_integer(o, self.known)) is not None}
        inner = _Body(body, self.avals, known, {i for i, o in shared if self.is_zero(o)})
        new_body = inner.rewritten()
        scan_now = scan if new_body is body else replace(scan, bodies=(new_body,))
        self.note_stacks(scan, trips)
        rows = _Rows(scan_now, trips, inner.zeros, self.avals)
        zeros = {n for n, init in enumerate(outside.carry) if self.is_zero(init)}
        return rows.sliced(zeros) or scan_now

    def note_stacks(self, scan: Equation, trips: Known) -> None:
        """Known integers that the scan stacks."""
        num_carry = _jax.scan_sizes(scan.params)[1]
        outputs = scan.bodies[0].outputs[num_carry:]
        for output, result in zip(outputs, scan.results[num_carry:], strict=True):
            if isinstance(output, int) and output in trips:
                self.known[result] = trips[output]


class _Rows:
    """A scan, and which rows each trip takes."""

    def __init__(
        self, scan: Equation, trips: Known, zeros: set[int], avals: list[ShapedArray]
    ) -> None:
        self.scan, self.trips, self.zeros, self.avals = scan, trips, zeros, avals
        (self.body,) = scan.bodies
        self.length = scan.params["length"]
        self.inside = scan_parts(scan, self.body.inputs)
        self.outside = scan_parts(scan, scan.operands)
        self.made = self.body.producers()
        self.readers = self.body.readers()
        self.writer = ProgramWriter(avals)
        self.renamed: dict[int, int] = {}
        self.slices: dict[int, int] = {}  # array that all trips read -> the trip's row
        self.row_in: dict[int, int] = {}  # array of one row -> the row

    def sliced(self, zero_carries: Collection[int]) -> Equation | None:
        """The scan with slices for rows, and stacks for carries that sum up rows; None if there is
        nothing of the kind. `zero_carries`: those that begin as zeros."""
        taken = [e for e in self.body.equations if self.takes_row(e)]
        sums = {n: rows for n in sorted(zero_carries) if (rows := self.rows_summed(n))}
        return self.written(taken, sums) if taken or sums else None

    def is_row(self, array: ShapedArray, size: Sequence[int], indices: Sequence[Operand]) -> bool:
        """Whether the indices are those of the trip's row of an array, and the size that of one."""
        if not array.shape or array.shape[0] != self.length:
            return False
        if tuple(size) != (1, *array.shape[1:]):
            return False
        first, *others = (read_integer(index, self.trips) for index in indices)
        if first is None or not np.array_equal(np.ravel(first), np.arange(self.length)):
            return False
        return all(other is not None and not np.any(other) for other in others)

    def takes_row(self, equation: Equation) -> bool:
        if equation.name != "dynamic_slice":
            return False
        array, *indices = equation.operands
        if not isinstance(array, int) or array not in self.inside.consts:
            return False
        return self.is_row(self.avals[array], equation.params["slice_sizes"], indices)

    def rows_summed(self, carry_index: int) -> list[Equation]:
        """The updates of zeros with the trip's row that a trip adds to a carry; none if the carry
        is anything else."""
        carry, output = self.inside.carry[carry_index], self.body.outputs[carry_index]
        rows: list[Equation] = []
        others: list[Operand] = []
        queue: list[Operand] = [output]
        while queue:
            value = queue.pop()
            maker = self.maker(value)
            is_shared = value != output and self.num_reads(value) != 1
            if maker is not None and maker.name in ("add_any", "add") and not is_shared:
                queue += maker.operands
            elif maker is not None and self.sets_row(maker) and not is_shared:
                rows.append(maker)
            else:
                others.append(value)
        is_sum = others == [carry] and self.num_reads(carry) == 1
        return rows if is_sum and self.body.outputs.count(output) == 1 else []

    def maker(self, value: Operand) -> Equation | None:
        position = self.made.get(value) if isinstance(value, int) else None
        return None if position is None else self.body.equations[position]

    def num_reads(self, value: Operand) -> int:
        if not isinstance(value, int):
            return 0
        return len(self.readers.get(value, ())) + self.body.outputs.count(value)

    def sets_row(self, equation: Equation) -> bool:
        if equation.name != "dynamic_update_slice":
            return False
        array, row, *indices = equation.operands
        if not isinstance(array, int) or not isinstance(row, int) or array not in self.zeros:
            return False
        return self.is_row(self.avals[array], self.avals[row].shape, indices)

    # -- writing

    def written(self, taken: list[Equation], sums: dict[int, list[Equation]]) -> Equation:
        for equation in self.body.equations:
            equation = replace(equation, operands=rename(equation.operands, self.renamed))
            if equation.results in {e.results for e in taken}:
                self.write_row(equation)
            elif self.is_squeezed_row(equation):
                self.renamed[equation.results[0]] = self.row_in[equation.inputs[0]]
            else:
                self.writer.equations.append(equation)
        stacked = [self.write_sum(rows) for rows in sums.values()]
        return self.assembled(list(sums), stacked)

    def write_row(self, equation: Equation) -> None:
        array, (result,) = equation.inputs[0], equation.results
        aval = self.avals[array]
        if array not in self.slices:
            self.slices[array] = self.writer.new_value(ShapedArray(aval.shape[1:], aval.dtype))
        row = self.writer.emit(_one_row, [self.slices[array]], equation)
        assert isinstance(row, int)
        self.renamed[result], self.row_in[row] = row, self.slices[array]

    def is_squeezed_row(self, equation: Equation) -> bool:
        if equation.name != "squeeze" or tuple(equation.params["dimensions"]) != (0,):
            return False
        return not self.row_in.keys().isdisjoint(equation.inputs)

    def write_sum(self, rows: list[Equation]) -> Operand:
        """The sum of the trip's rows."""
        total: Operand | None = None
        for equation in rows:
            (row,) = rename(equation.operands[1:2], self.renamed)
            row = self.writer.emit(_first, [row], equation)
            total = row if total is None else self.writer.emit(add, [total, row], equation)
        assert total is not None
        return total

    def assembled(self, gone: list[int], stacked: list[Operand]) -> Equation:
        """The scan without the carries that are gone; what they summed is stacked."""
        inside, outside, results = self.inside, self.outside, self.scan.results
        operand_of = dict(zip(inside.consts, outside.consts, strict=True))
        num_carry = len(inside.carry)
        kept = [n for n in range(num_carry) if n not in gone]
        carry = tuple(inside.carry[n] for n in kept)
        starts = tuple(outside.carry[n] for n in kept)
        outputs = rename(self.body.outputs, self.renamed)
        body = replace(
            self.body,
            inputs=(*inside.consts, *carry, *inside.xs, *self.slices.values()),
            outputs=(*(outputs[n] for n in kept), *outputs[num_carry:], *stacked),
            equations=tuple(self.writer.equations),
            captured=(*self.body.captured, *self.writer.captured),
        )
        sliced = tuple(operand_of[array] for array in self.slices)
        sums = tuple(results[n] for n in gone)
        return replace(
            self.scan,
            operands=(*outside.consts, *starts, *outside.xs, *sliced),
            results=(*(results[n] for n in kept), *results[num_carry:], *sums),
            params=plain_params(self.scan) | {"num_carry": len(kept)},
            bodies=(body,),
        )


def _one_row(row: Array) -> Array:
    return lax.expand_dims(row, (0,))


def _first(rows: Array) -> Array:
    return lax.squeeze(rows, (0,))
