"""The body of the accumulation loop: a step's equations, written for one micro-batch.

Equations are copied as the micro-batch's trace has them, with three changes, made in the bodies of
inner loops too:

- A reduction over the rows of one micro-batch stands for that over the whole batch where it is not
  simply summed up after the loop: readers that make rows of it, or anything that is not linear,
  get it times the number of micro-batches.
- Random bits are those that the whole batch's program has in these rows.
- A scatter-add adds to zeros; what it would have added to is added after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar import _jax
from autopar.ir.program import Equation, Operand, Program
from autopar.rewrite import micro_batch_rows
from autopar.rewrite.additive import (
    AFFINE,
    OWN,
    ROWS,
    SAME,
    SCATTER_ADD,
    SUM,
    ZERO,
    Makeup,
    RowShapes,
    loop_makeup,
    of_operand,
    outputs_of,
    results_of,
)
from autopar.rewrite.program_writer import Env, ProgramWriter
from autopar.tracer.regions import BACKWARD, region_by_name

# Ops that move data along a dimension, and the parameter that names it.
_ALONG = {
    "sort": "dimension",
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumlogsumexp": "axis",
    "concatenate": "dimension",
    "rev": "dimensions",
}


def times(value: Any, *, num: int) -> Any:
    return value * np.asarray(num, value.dtype)


def zeros_like(value: Any) -> Any:
    return jnp.zeros_like(value)


def add(first: Any, second: Any) -> Any:
    return first + second


@dataclass
class Notes:
    """What the plan should warn of, once per line of the user's code."""

    found: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, about: str, equation: Equation, text: str) -> None:
        # A derivative repeats what its forward pass did already.
        if region_by_name(equation.scope) != BACKWARD or not self.found:
            line = equation.source_line
            self.found.setdefault((about, line), f"{line}: {text}")

    def texts(self) -> tuple[str, ...]:
        return tuple(self.found.values())


@dataclass(frozen=True)
class MicroBatches:
    """How the batch is divided. `blocks` are the blocks of rows of one micro-batch."""

    num: int
    blocks: int
    shapes: RowShapes
    notes: Notes


class Scope:
    """One scope of the program that is written: the loop's body, or a body inside of it."""

    def __init__(
        self,
        of: MicroBatches,
        writer: ProgramWriter,
        makeup: dict[int, Makeup],
        index: Operand,
    ) -> None:
        self.of = of
        self.writer = writer
        self.makeup = makeup  # of the values of the program that is copied
        self.index = index  # of the micro-batch, in this scope
        self.env: Env = {}
        self.scaled: dict[int, Operand] = {}
        self.made_by: dict[int, Equation] = {}

    def kind(self, operand: Operand) -> Makeup:
        return of_operand(operand, self.makeup)

    def read(self, operand: Operand, as_kind: Makeup = SUM) -> Operand:
        """An operand for a reader of the given kind."""
        if not isinstance(operand, int):
            return operand
        if as_kind in (SUM, SAME, ZERO) or self.kind(operand) is not SUM:
            return self.env[operand]
        if operand not in self.scaled:
            like = self.made_by.get(operand)
            self.scaled[operand] = self.writer.emit(
                times, [self.env[operand]], like, num=self.of.num
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
        self.note_mixed_rows(equation)
        kinds = [self.kind(o) for o in equation.operands]
        made = results_of(equation, kinds, self.of.shapes)
        one_to_one = equation.name == "optimization_barrier"
        as_kinds = made if one_to_one else (made[0] if made else ROWS,) * len(kinds)
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
            whole = self.writer.emit(times, [part], equation, num=self.of.num)
            self.env[equation.results[0]] = self.writer.emit(add, [rest, whole], equation)
            return
        results = self.bind(equation, operands)
        self.env.update(zip(equation.results, results, strict=True))

    def bind(self, equation: Equation, operands: Sequence[Operand], **changed: Any) -> list[int]:
        writer, micro = self.writer, self.of.shapes.micro
        results = [writer.new_value(micro[r]) for r in equation.results]
        writer.equations.append(
            replace(equation, operands=tuple(operands), results=tuple(results), **changed)
        )
        return results

    def note_mixed_rows(self, equation: Equation) -> None:
        """Ops that move rows to other rows do so within a micro-batch."""
        shapes = self.of.shapes
        along = equation.params.get(_ALONG.get(equation.name, ""), ())
        along = along if isinstance(along, tuple) else (along,)
        batch_dims = {d for r in equation.results for d in shapes.dims(r)}
        pairs = any(len(shapes.dims(r)) > 1 for r in equation.results)
        if batch_dims & set(along) or (pairs and equation.name == "dot_general"):
            self.of.notes.add(
                "mixed",
                equation,
                f"{equation.name} combines different rows of the batch; with "
                f"{self.of.num} micro-batches it combines those of one micro-batch only",
            )

    # -- random numbers

    def draws_rows(self, equation: Equation) -> bool:
        """Random bits with a batch dimension, from a key that is the same for all rows."""
        (key,) = equation.operands
        return self.of.shapes.has_rows(equation.results[0]) and self.kind(key) in (SAME, ZERO)

    def random_bits(self, equation: Equation) -> None:
        (key,), (result,) = equation.operands, equation.results
        aval = self.writer.aval(self.read(key))
        dims = self.of.shapes.dims(result)
        width, shape = equation.params["bit_width"], tuple(equation.params["shape"])
        if _jax.draws_bits_by_position(aval.dtype) and len(dims) == 1:
            self.env[result] = self.writer.emit(
                micro_batch_rows.bits_of_rows,
                [self.read(key), self.index],
                equation,
                shape=shape,
                dim=dims[0] - len(aval.shape),
                num=self.of.num,
                blocks=self.of.blocks,
                bit_width=width,
            )
            return
        self.of.notes.add(
            "random",
            equation,
            "random numbers from this kind of key cannot be had row by row; each micro-batch draws "
            "its own, so they differ from those of the whole batch",
        )
        self.env[result] = self.writer.emit(
            micro_batch_rows.bits_of_micro_batch,
            [self.read(key), self.index],
            equation,
            shape=shape,
            bit_width=width,
        )

    # -- loops

    def body(self, program: Program, kinds: Sequence[Makeup], wanted: Sequence[Makeup]) -> Program:
        """A body for inputs of the given kinds and the index of the micro-batch, which comes last;
        its outputs are made as wanted."""
        writer = self.writer.inner()
        _, makeup = outputs_of(program, kinds, self.of.shapes)
        micro = self.of.shapes.micro
        inputs = [writer.new_value(micro[v]) for v in program.inputs]
        index = writer.new_value(self.writer.aval(self.index))
        scope = Scope(self.of, writer, makeup, index)
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
        carries, stacked = loop_makeup(equation, kinds, self.of.shapes)
        inside = [*kinds[:num_consts], *carries, *kinds[first_x:]]
        written = self.body(body, inside, (*carries, *stacked))
        # The index is a constant of the loop.
        *own, index = written.inputs
        written = replace(written, inputs=(*own[:num_consts], index, *own[num_consts:]))
        given = equation.operands
        operands = [
            *(self.read(o) for o in given[:num_consts]),
            self.index,
            *(self.read(o, k) for o, k in zip(given[num_consts:first_x], carries, strict=True)),
            *(self.read(o) for o in given[first_x:]),
        ]
        params = {**equation.params, "num_consts": num_consts + 1, "num_carry": num_carry}
        self.loop(equation, operands, (written,), params)

    def while_loop(self, equation: Equation) -> None:
        condition, body = equation.bodies
        num_cond = equation.params["cond_nconsts"]
        num_body = equation.params["body_nconsts"]
        kinds = [self.kind(o) for o in equation.operands]
        carries, _ = loop_makeup(equation, kinds, self.of.shapes)
        first = num_cond + num_body
        test = self.body(condition, [*kinds[:num_cond], *carries], [SUM])
        *own, index = test.inputs
        test = replace(test, inputs=(*own[:num_cond], index, *own[num_cond:]))
        written = self.body(body, [*kinds[num_cond:first], *carries], carries)
        *own, index = written.inputs
        written = replace(written, inputs=(*own[:num_body], index, *own[num_body:]))
        given = equation.operands
        operands = [
            *(self.read(o) for o in given[:num_cond]),
            self.index,
            *(self.read(o) for o in given[num_cond:first]),
            self.index,
            *(self.read(o, k) for o, k in zip(given[first:], carries, strict=True)),
        ]
        params = {**equation.params, "cond_nconsts": num_cond + 1, "body_nconsts": num_body + 1}
        self.loop(equation, operands, (test, written), params)

    def cond(self, equation: Equation) -> None:
        kinds = [self.kind(o) for o in equation.operands]
        made = results_of(equation, kinds, self.of.shapes)
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
        kinds = results_of(equation, [self.kind(o) for o in equation.operands], self.of.shapes)
        if OWN in kinds:
            self.of.notes.add(
                "averaged",
                equation,
                f"in this {equation.name}, what is computed from sums over the batch other than "
                f"linearly is computed for each of {self.of.num} micro-batches by itself and then "
                "averaged",
            )
        results = self.bind(equation, operands, bodies=bodies, params=params)
        self.env.update(zip(equation.results, results, strict=True))


__all__ = ["AFFINE", "OWN", "MicroBatches", "Notes", "Scope", "add", "times"]
