"""The body of the accumulation loop: from a step's `Equation`s to those of one micro-batch.

Equations are copied from the micro-batch's trace with three changes, in inner loops too:

- A reduction over the rows of one micro-batch replaces that over the whole batch unless it is
  simply summed up after the loop: readers that make rows from it, or are not linear in it, get it
  times the number of micro-batches.
- Random bits are those of the whole batch's program in these rows.
- A scatter-add adds to zeros; its first operand is added afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program
from autopar.rewrite import micro_batch_rows
from autopar.rewrite.batch_dependence import (
    AFFINE,
    NONLINEAR,
    ROWS,
    SAME,
    SCATTER_ADD,
    SUM,
    WHOLE,
    ZERO,
    BatchDependence,
    RowShapes,
    loop_dependence,
    operand_dependence,
    output_dependence,
    result_dependence,
    slice_dependence,
)
from autopar.rewrite.program_writer import Env, ProgramWriter, add
from autopar.rewrite.row_uses import RowUses
from autopar.tracer.regions import BACKWARD, region_by_name


def times(value: jax.Array, *, num: int) -> jax.Array:
    return value * np.asarray(num, value.dtype)


def zeros_like(value: jax.Array) -> jax.Array:
    return jnp.zeros_like(value)


@dataclass
class Notes:
    """Warnings for the plan, one per kind and line of the user's code."""

    by_line: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, about: str, equation: Equation, text: str) -> None:
        # A derivative repeats the warnings of its forward pass.
        if region_by_name(equation.scope) != BACKWARD or not self.by_line:
            line = equation.source_line
            self.by_line.setdefault((about, line), f"{line}: {text}")

    def texts(self) -> tuple[str, ...]:
        return tuple(self.by_line.values())


@dataclass(frozen=True)
class MicroBatches:
    """How the batch is divided: `rows` of each micro-batch come in so many `blocks`."""

    num: int
    rows: int
    blocks: int
    shapes: RowShapes
    uses: RowUses
    notes: Notes


class Scope:
    """One body of the program being written: the loop's body, or a body inside it."""

    def __init__(
        self,
        micro_batches: MicroBatches,
        writer: ProgramWriter,
        dependence: dict[int, BatchDependence],
        index: Operand,
        is_body: bool = False,
    ) -> None:
        self.micro_batches = micro_batches
        self.writer = writer
        self.dependence = dependence  # of the values of the program being copied
        self.index = index  # of the micro-batch, in this scope
        self.env: Env = {}
        self.is_body = is_body
        self.scaled: dict[int, Operand] = {}
        self.made_by: dict[int, Equation] = {}

    def kind(self, operand: Operand) -> BatchDependence:
        return operand_dependence(operand, self.dependence)

    def read(self, operand: Operand, as_kind: BatchDependence = SUM) -> Operand:
        """An operand for a reader of the given dependence."""
        if not isinstance(operand, int):
            return operand
        if as_kind in (SUM, SAME, ZERO, WHOLE) or self.kind(operand) is not SUM:
            return self.env[operand]
        if operand not in self.scaled:
            like = self.made_by.get(operand)
            self.scaled[operand] = self.writer.emit(
                times, [self.env[operand]], like, num=self.micro_batches.num
            )
        return self.scaled[operand]

    def copy(self, equation: Equation) -> None:
        self.made_by.update((r, equation) for r in equation.results)
        if equation.name == "scan":
            self.scan(equation)
        elif equation.name == "while":
            self.while_loop(equation)
        elif equation.name == "cond":
            self.cond(equation)
        elif equation.name == "random_bits" and self.draws_rows(equation):
            self.random_bits(equation)
        else:
            self.operation(equation)

    def operation(self, equation: Equation) -> None:
        self.note_uses(equation)
        kinds = [self.kind(o) for o in equation.operands]
        made = result_dependence(equation, kinds, self.micro_batches.shapes)
        crosses = ROWS in made and SUM in kinds
        if {ROWS, WHOLE}.intersection(made) and {AFFINE, NONLINEAR}.intersection(kinds):
            crosses = True
        if self.is_body and crosses:
            self.note_crossing(equation)
        one_to_one = equation.name == "optimization_barrier"
        as_kinds = made if one_to_one else (made[0] if made else ROWS,) * len(kinds)
        if equation.name == "ragged_dot_general":  # sizes of groups count a micro-batch's own rows
            as_kinds = (*as_kinds[:2], SUM)
        operands = [self.read(o, k) for o, k in zip(equation.operands, as_kinds, strict=True)]
        adds_to_rest = (
            equation.name in SCATTER_ADD
            and ROWS in kinds
            and made[0] is not ROWS
            and kinds[0] not in (ZERO, SUM)
        )
        if adds_to_rest:
            rest = operands[0]
            operands[0] = self.writer.emit(zeros_like, [rest], equation)
            part = self.bind(equation, operands)[0]
            whole = self.writer.emit(times, [part], equation, num=self.micro_batches.num)
            self.env[equation.results[0]] = self.writer.emit(add, [rest, whole], equation)
            return
        results = self.bind(equation, operands)
        self.env.update(zip(equation.results, results, strict=True))

    def bind(self, equation: Equation, operands: Sequence[Operand], **changed: Any) -> list[int]:
        writer, micro = self.writer, self.micro_batches.shapes.micro
        results = [writer.new_value(micro[r]) for r in equation.results]
        writer.equations.append(equation.of_values(tuple(operands), tuple(results), **changed))
        return results

    def note_uses(self, equation: Equation) -> None:
        """Notes what the equation does with rows that a micro-batch does with its own alone."""
        uses, num = self.micro_batches.uses, self.micro_batches.num
        name, results = equation.name, equation.results
        if not uses.unknown.isdisjoint(results):
            self.micro_batches.notes.add(
                "mixed",
                equation,
                f"whether {name} combines different rows of the batch is not known; with {num} "
                "micro-batches it sees those of one micro-batch only",
            )
        elif not uses.orders.regrouped.isdisjoint(results):
            self.micro_batches.notes.add(
                "regrouped",
                equation,
                f"{name} puts rows of the batch that are far apart into groups; with {num} "
                "micro-batches a group has rows of one micro-batch",
            )
        elif uses.mixes(equation) or self.groups_by_number(equation):
            self.micro_batches.notes.add(
                "mixed",
                equation,
                f"{name} combines different rows of the batch; with {num} micro-batches it "
                "combines those of one micro-batch only",
            )
        if not uses.placed.isdisjoint(results):
            self.micro_batches.notes.add(
                "places",
                equation,
                f"{name} uses the place of rows in the batch; with {num} micro-batches each counts "
                "its own rows from zero",
            )

    def note_crossing(self, equation: Equation) -> None:
        """Notes that rows read a sum over rows, in a body (outside: `MicroBatchPlacement`)."""
        if equation.name in ("optimization_barrier", "ragged_dot_general"):
            return
        self.micro_batches.notes.add(
            "crossing",
            equation,
            f"{equation.name} of every row uses what a loop made of all rows of the batch; with "
            f"{self.micro_batches.num} micro-batches it is made of those of one micro-batch",
        )

    def groups_by_number(self, equation: Equation) -> bool:
        """Whether sizes of groups of rows are not counted from the rows themselves."""
        if equation.name != "ragged_dot_general":
            return False
        has_rows = any(map(self.micro_batches.shapes.has_rows, equation.operands[:2]))
        return has_rows and self.kind(equation.operands[2]) is not SUM

    # -- random numbers

    def draws_rows(self, equation: Equation) -> bool:
        """Whether it draws bits with a batch dimension from a key common to all rows."""
        (key,) = equation.operands
        return self.micro_batches.shapes.has_rows(equation.results[0]) and self.kind(key) in (
            SAME,
            ZERO,
        )

    def random_bits(self, equation: Equation) -> None:
        (key,), (result,) = equation.operands, equation.results
        aval = self.writer.aval(self.read(key))
        dims = self.micro_batches.shapes.dims(result)
        width, shape = equation.params["bit_width"], tuple(equation.params["shape"])
        if _jax.draws_bits_by_position(aval.dtype) and len(dims) == 1:
            self.env[result] = self.writer.emit(
                micro_batch_rows.bits_of_rows,
                [self.read(key), self.index],
                equation,
                shape=shape,
                dim=dims[0] - len(aval.shape),
                num=self.micro_batches.num,
                blocks=self.micro_batches.blocks * (self.micro_batches.uses.orders.of(result) or 1),
                bit_width=width,
            )
            return
        self.micro_batches.notes.add(
            "random",
            equation,
            "random numbers from this kind of key cannot be drawn row by row; each micro-batch "
            "draws its own, so they differ from those of the whole batch",
        )
        self.env[result] = self.writer.emit(
            micro_batch_rows.bits_of_micro_batch,
            [self.read(key), self.index],
            equation,
            shape=shape,
            bit_width=width,
        )

    # -- loops

    def body(
        self, program: Program, kinds: Sequence[BatchDependence], wanted: Sequence[BatchDependence]
    ) -> Program:
        """A body for inputs of the given kinds, then the index of the micro-batch; its outputs are
        of the wanted kinds."""
        writer = self.writer.inner()
        _, dependence = output_dependence(program, kinds, self.micro_batches.shapes)
        micro = self.micro_batches.shapes.micro
        inputs = [writer.new_value(micro[v]) for v in program.inputs]
        index = writer.new_value(self.writer.aval(self.index))
        scope = Scope(self.micro_batches, writer, dependence, index, is_body=True)
        for value, array in program.captured:
            scope.env[value] = writer.capture(array, micro[value])
        scope.env.update(zip(program.inputs, inputs, strict=True))
        for equation in program.equations:
            scope.copy(equation)
        outputs = [scope.read(o, k) for o, k in zip(program.outputs, wanted, strict=True)]
        return writer.program([*inputs, index], outputs)

    def scan(self, equation: Equation) -> None:
        (body,) = equation.bodies
        num_consts, num_carry = _jax.scan_sizes(equation.params)
        first_x = num_consts + num_carry
        kinds = [self.kind(o) for o in equation.operands]
        carries, stacked = loop_dependence(equation, kinds, self.micro_batches.shapes)
        slices = slice_dependence(equation, kinds[first_x:], self.micro_batches.shapes)
        as_kind = SUM
        if WHOLE in slices:  # a trip has a row, which needs of a constant what all rows made
            as_kind = NONLINEAR
            kinds[:num_consts] = [as_kind if k is SUM else k for k in kinds[:num_consts]]
        inside = [*kinds[:num_consts], *carries, *slices]
        written = self.body(body, inside, (*carries, *stacked))
        written = _with_index_at(written, num_consts)  # a constant of the loop
        old = equation.operands
        operands = [
            *(self.read(o, as_kind) for o in old[:num_consts]),
            self.index,
            *(self.read(o, k) for o, k in zip(old[num_consts:first_x], carries, strict=True)),
            *(self.read(o) for o in old[first_x:]),
        ]
        params = {**equation.params, "num_consts": num_consts + 1, "num_carry": num_carry}
        self.loop(equation, operands, (written,), params)

    def while_loop(self, equation: Equation) -> None:
        condition, body = equation.bodies
        num_cond = equation.params["cond_nconsts"]
        num_body = equation.params["body_nconsts"]
        kinds = [self.kind(o) for o in equation.operands]
        carries, _ = loop_dependence(equation, kinds, self.micro_batches.shapes)
        first = num_cond + num_body
        self.note_trips(equation, [*kinds[:num_cond], *carries])
        test = self.body(condition, [*kinds[:num_cond], *carries], [SUM])
        test = _with_index_at(test, num_cond)
        written = self.body(body, [*kinds[num_cond:first], *carries], carries)
        written = _with_index_at(written, num_body)
        old = equation.operands
        operands = [
            *(self.read(o) for o in old[:num_cond]),
            self.index,
            *(self.read(o) for o in old[num_cond:first]),
            self.index,
            *(self.read(o, k) for o, k in zip(old[first:], carries, strict=True)),
        ]
        params = {**equation.params, "cond_nconsts": num_cond + 1, "body_nconsts": num_body + 1}
        self.loop(equation, operands, (test, written), params)

    def note_trips(self, equation: Equation, kinds: Sequence[BatchDependence]) -> None:
        """Notes a while loop that goes on for other rows' sake. If each row has a condition of its
        own, as `jax.vmap` makes it, a row that is done stays as it is."""
        condition, _ = equation.bodies
        (predicate,), _ = output_dependence(condition, kinds, self.micro_batches.shapes)
        if predicate in (ROWS, SAME, ZERO):
            return
        self.micro_batches.notes.add(
            "trips",
            equation,
            f"the rows of the batch decide when this {equation.name} loop ends; with "
            f"{self.micro_batches.num} micro-batches those of each end their own",
        )

    def cond(self, equation: Equation) -> None:
        kinds = [self.kind(o) for o in equation.operands]
        made = result_dependence(equation, kinds, self.micro_batches.shapes)
        branches = tuple(self.body(branch, kinds[1:], made) for branch in equation.bodies)
        operands = [*(self.read(o) for o in equation.operands), self.index]
        self.loop(equation, operands, branches, equation.params)

    def loop(
        self,
        equation: Equation,
        operands: Sequence[Operand],
        bodies: tuple[Program, ...],
        params: dict[str, Any],
    ) -> None:
        self.note_uses(equation)
        kinds = result_dependence(
            equation, [self.kind(o) for o in equation.operands], self.micro_batches.shapes
        )
        if NONLINEAR in kinds:
            self.micro_batches.notes.add(
                "averaged",
                equation,
                f"in this {equation.name}, nonlinear functions of sums over the batch are computed "
                f"for each of {self.micro_batches.num} micro-batches and then averaged",
            )
        results = self.bind(equation, operands, bodies=bodies, params=params)
        self.env.update(zip(equation.results, results, strict=True))


def _with_index_at(body: Program, position: int) -> Program:
    """The body with the index of the micro-batch, its last input, at another position."""
    *inputs, index = body.inputs
    return replace(body, inputs=(*inputs[:position], index, *inputs[position:]))
