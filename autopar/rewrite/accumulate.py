"""Gradient accumulation: from a `TracedStep` on the whole batch to one looping over micro-batches.

Two programs of the same function, of the whole batch and of a micro-batch, are aligned equation by
equation (`rewrite.align`); the second is derived from the first (`rewrite.micro_batch_trace`) or,
where that is not possible, traced. Values whose shapes differ have *rows*. The new program has
three parts:

    prologue   equations independent of the batch, and those all rows need of the whole batch
    loop       a `scan` over micro-batches: every equation that makes or reads rows
    epilogue   everything after the reductions over rows, once: optimizer, clipping, metrics

Reductions over rows separate loop and epilogue: the loop sums them up (or takes their maximum …) in
its carry, and the epilogue reads the value of the whole batch. With the floating-point constants of
the full trace that is exact, whatever the epilogue does with it.

A reduction that flows back into rows *crosses* the batch (statistics of BatchNorm, the sum of a
mask). If it does not depend on a product, the prologue computes it once, exactly. Otherwise each
micro-batch uses its own reduction instead, and a note says so.

In a traced micro-batch, integers known while tracing are its own (`jnp.arange(B)` is 0 … b − 1 in
each), since they mostly index its rows. Captured floating-point arrays with rows are cut like the
batch. Selecting rows, an argmax over the batch, arrays of B + 1 rows and results that relate all
rows to all rows are refused, with the line.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from autopar import _jax
from autopar.errors import MeshError, TraceError
from autopar.ir.program import Equation, Operand, Program, values_in
from autopar.ir.traced_step import TracedStep
from autopar.rewrite import micro_batch_rows
from autopar.rewrite.align import align
from autopar.rewrite.batch_dependence import (
    COMBINED_BY,
    NONLINEAR,
    ROWS,
    SAME,
    SCATTER_ADD,
    SUM,
    ZERO,
    RowShapes,
)
from autopar.rewrite.fold_transposes import fold_transposes
from autopar.rewrite.layers import Layer
from autopar.rewrite.micro_batch_body import MicroBatches, Notes, Scope
from autopar.rewrite.micro_batch_placement import MicroBatchPlacement
from autopar.rewrite.program_writer import Env, ProgramWriter, add, read_all
from autopar.rewrite.remat import rematerialise, with_remat
from autopar.rewrite.row_uses import Dealing, find_row_uses, is_cut
from autopar.rewrite.rows_outside import Pair
from autopar.tracer.rules import equation_key


def batch_size(step: TracedStep, num_micro_batches: int) -> int:
    """The number of rows of the batch, after checks: its arrays have equally many, and the
    micro-batches divide them."""
    arrays = [(step.call.paths[i], step.avals[i].shape) for i in step.batch if step.avals[i].shape]
    if not arrays:
        raise TraceError(
            f"{step.name}: num_micro_batches={num_micro_batches} needs a batch, but no array of "
            "its arguments is one. Pass the batch as argument 1, or say with batch_argnums which "
            "arguments have a leading batch dimension."
        )
    path, (size, *_) = arrays[0]
    for other, shape in arrays:
        if shape[0] != size:
            raise MeshError(
                f"{other} has {shape[0]} rows and {path} has {size}: with num_micro_batches="
                f"{num_micro_batches} all arrays of the batch are cut into micro-batches along "
                "their first dimension. Give them equal first dimensions, or pass what has no row "
                "per example as an argument of its own, and name the others with batch_argnums."
            )
    if not size:
        raise MeshError(
            f"{path}: its batch dimension is 0, so there are no rows for num_micro_batches="
            f"{num_micro_batches}. Pass a batch with rows, or leave the step out."
        )
    if size % num_micro_batches:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        near = sorted(divisors, key=lambda n: (abs(n - num_micro_batches), n))[:3]
        raise MeshError(
            f"{path}: its batch dimension of {size} is not divisible by num_micro_batches="
            f"{num_micro_batches}. Set num_micro_batches to {' or '.join(map(str, sorted(near)))}, "
            "or change the batch size."
        )
    return size


def micro_batch_leaves(step: TracedStep, num_micro_batches: int) -> list[jax.ShapeDtypeStruct]:
    """The leaves of a call with one micro-batch in place of the batch, as shapes."""
    size = batch_size(step, num_micro_batches) // num_micro_batches
    leaves = []
    for index, aval in enumerate(step.avals):
        is_cut = index in step.batch and bool(aval.shape)
        shape = (size, *aval.shape[1:]) if is_cut else aval.shape
        leaves.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type))
    return leaves


def accumulate(
    full: TracedStep, micro: TracedStep, num_micro_batches: int, layers: Sequence[Layer] = ()
) -> TracedStep:
    """The full step as a loop over micro-batches of the size that `micro` was traced with. The
    backward pass of each micro-batch recomputes `layers`."""
    part = align(full.program, micro.program, full.name)
    if layers:
        full, part = with_remat(full, layers), rematerialise(part, layers)
    full = replace(full, program=fold_transposes(full.program))
    part = fold_transposes(part)
    shapes = RowShapes(full.program.avals, part.avals)
    size = batch_size(full, num_micro_batches)
    sizes = _row_sizes(part, shapes, num_micro_batches)
    block = micro_batch_rows.block_rows(size, sizes)
    notes = Notes()
    blocks = size // num_micro_batches // block
    rows = size // num_micro_batches
    uses = find_row_uses(full.program, part, shapes, Dealing(num_micro_batches, blocks), rows)
    micro_batches = MicroBatches(num_micro_batches, rows, blocks, shapes, uses, notes)
    program, loop = _write(MicroBatchPlacement(full.program, part, micro_batches, full.out_paths))
    return replace(
        full,
        program=program,
        num_micro_batches=num_micro_batches,
        notes=notes.texts(),
        loop=loop,
    )


def _row_sizes(program: Program, shapes: RowShapes, num: int) -> set[int]:
    """Every size that the batch dimension takes, after a check that it splits evenly."""
    sizes: set[int] = set()
    for equation in program.all_equations():
        for value in equation.results:
            for dim in shapes.dims(value):
                whole, part = shapes.full[value].shape[dim], shapes.micro[value].shape[dim]
                if whole != num * part:
                    raise TraceError(
                        f"{equation.source_line}: {equation.name} makes an array of {whole} rows "
                        f"from the batch, and one of {part} rows from one of {num} micro-batches, "
                        "so the batch cannot be put together again. Keep a multiple of the batch's "
                        "rows, or use num_micro_batches=1."
                    )
                sizes.add(whole)
    for value in program.inputs:
        sizes.update(shapes.full[value].shape[dim] for dim in shapes.dims(value))
    return sizes


def _write(placement: MicroBatchPlacement) -> tuple[Program, int | None]:
    """(prologue, loop and epilogue as one program, the loop's position in it)."""
    writer, env = ProgramWriter(), Env()
    avals = placement.full.avals
    inputs = [writer.new_value(avals[v]) for v in placement.full.inputs]
    env.update(zip(placement.full.inputs, inputs, strict=True))
    for value, array in placement.full.captured:
        env[value] = writer.capture(array, avals[value])
    _write_prologue(placement, writer, env)
    results: dict[int, Operand] = {}
    loop = None
    if placement.in_loop:
        loop_writer = _LoopWriter(placement, writer, env)
        results, loop = loop_writer.write(), loop_writer.position
    for index, pair in enumerate(placement.pairs):
        if index in placement.after:
            writer.copy(pair.whole, avals, env)
        for value in pair.results:
            if value in results:
                env[value] = _finished(placement, writer, env, pair, value, results[value])
    return writer.program(inputs, read_all(placement.full.outputs, env)), loop


def _write_prologue(placement: MicroBatchPlacement, writer: ProgramWriter, env: Env) -> None:
    """What it makes is kept throughout the loop, so it makes nothing twice: weights that a forward
    pass casts, and its recomputation behind a barrier once more, have one cast."""
    made: dict[Hashable, tuple[int, ...]] = {}
    avals = placement.full.avals
    for index in sorted(placement.before):
        equation = placement.pairs[index].whole
        operands = read_all(equation.operands, env)
        if equation.name == "optimization_barrier":
            env.update(zip(equation.results, operands, strict=True))
            continue
        key = equation_key(equation, avals), *values_in(operands)
        can_repeat = not (equation.has_effect or equation.bodies)
        if not can_repeat or len(key) <= len(operands):  # constants are not in the key
            writer.copy(equation, avals, env)
        elif key in made:
            env.update(zip(equation.results, made[key], strict=True))
        else:
            writer.copy(equation, avals, env)
            made[key] = writer.equations[-1].results


def _finished(
    placement: MicroBatchPlacement,
    writer: ProgramWriter,
    env: Env,
    pair: Pair,
    value: int,
    made: Operand,
) -> Operand:
    """The value of the whole batch, from the loop's result."""
    if value in placement.stacked:
        (dim,) = placement.micro_batches.shapes.dims(value)
        blocks = placement.micro_batches.blocks * (placement.order_of(value) or 1)
        return writer.emit(micro_batch_rows.join, [made], dim=dim, blocks=blocks)
    dtype = placement.full.avals[value].dtype
    if writer.aval(made).dtype != dtype:
        made = writer.emit(_convert, [made], dtype=dtype)
    if not placement.adds_to(pair, 0):
        return made
    return writer.emit(add, [*read_all(pair.part.operands[:1], env), made])


class _LoopWriter:
    """Writes the loop: its operands, its body, and the combination of micro-batches' results."""

    def __init__(
        self, placement: MicroBatchPlacement, outer: ProgramWriter, outer_env: Env
    ) -> None:
        self.placement, self.micro_batches = placement, placement.micro_batches
        self.outer, self.outer_env = outer, outer_env
        self.inner = outer.inner()
        self.consts: list[tuple[Operand, int]] = []  # (outside, inside)
        self.xs: list[tuple[Operand, int]] = []
        self.position: int | None = None  # of the loop among the equations outside

    def write(self) -> dict[int, Operand]:
        """{value: the loop's result for it}."""
        placement, inner = self.placement, self.inner
        index = self.take(self.outer.emit(micro_batch_rows.indices, [], num=self.micro_batches.num))
        scope = Scope(self.micro_batches, inner, placement.dependence, index)
        self.enter(scope)
        for at in sorted(placement.in_loop):
            pair = placement.pairs[at]
            if pair.part.name in SCATTER_ADD and placement.adds_to(pair, 0):
                self.scatter_to_zeros(scope, pair)
            else:
                scope.copy(pair.part)
        carries = self.write_carries(scope)
        stacked = [scope.env[value] for value in placement.stacked]
        inits = [self.outer.emit(_filled, [], **c.start) for c in carries]
        body = inner.program(
            [
                *(inside for _, inside in self.consts),
                *(c.inside for c in carries),
                *(inside for _, inside in self.xs),
            ],
            [*(c.out for c in carries), *stacked],
        )
        results = self.scan(body, inits, [inner.aval(c.inside) for c in carries])
        result_of: dict[int, Operand] = {}
        for value, carry, result in zip(placement.accumulated, carries, results, strict=False):
            result_of[value] = result
            if carry.is_average:
                result_of[value] = self.outer.emit(_divide, [result], num=self.micro_batches.num)
        result_of.update(zip(placement.stacked, results[len(carries) :], strict=True))
        return result_of

    def write_carries(self, scope: Scope) -> list[_Carry]:
        """Adds every term to its sum right where it is computed, so that it need not be stored."""
        inner = self.inner
        made_at = {r: i for i, e in enumerate(inner.equations) for r in e.results}
        equations = list(inner.equations)
        after: dict[int, list[Equation]] = {}
        carries = []
        for value in self.placement.accumulated:
            inner.equations.clear()
            carries.append(self.carry(scope, value))
            term = scope.env[value]
            last = len(equations) - 1
            at = made_at.get(term, last) if isinstance(term, int) else last
            after.setdefault(at, []).extend(inner.equations)
        inner.equations[:] = [e for i, x in enumerate(equations) for e in (x, *after.get(i, ()))]
        return carries

    def take(self, stack: Operand) -> int:
        """The body's value for a slice of a stack."""
        aval = self.outer.aval(stack)
        inside = self.inner.new_value(_jax.unstacked_aval(aval))
        self.xs.append((stack, inside))
        return inside

    def enter(self, scope: Scope) -> None:
        """Brings everything that the body reads into it."""
        placement, shapes = self.placement, self.micro_batches.shapes
        captured = dict(placement.part.captured)
        made = {r for at in placement.in_loop for r in placement.pairs[at].results}
        entered: dict[int, int] = {}  # outside -> inside
        for at in sorted(placement.in_loop):
            pair = placement.pairs[at]
            for position, value in enumerate(pair.part.operands):
                if not isinstance(value, int) or value in scope.env or value in made:
                    continue
                if placement.adds_to(pair, position):
                    continue
                if placement.dependence[value] is not ROWS:
                    outside = self.outer_env[value]
                    if isinstance(outside, int) and outside in entered:
                        scope.env[value] = entered[outside]
                        continue
                    scope.env[value] = inside = self.inner.new_value(self.outer.aval(outside))
                    self.consts.append((outside, inside))
                    if isinstance(outside, int):
                        entered[outside] = inside
                elif value in captured and not is_cut(captured[value], shapes.dims(value)):
                    scope.env[value] = self.inner.capture(captured[value], shapes.micro[value])
                else:
                    (dim,) = shapes.dims(value)  # arguments were checked; keys have one
                    stack = self.outer.emit(
                        micro_batch_rows.cut,
                        [self.outer_env[value]],
                        num=self.micro_batches.num,
                        dim=dim,
                        blocks=self.micro_batches.blocks * (placement.order_of(value) or 1),
                    )
                    scope.env[value] = self.take(stack)

    def scatter_to_zeros(self, scope: Scope, pair: Pair) -> None:
        equation = pair.part
        zeros = {"shape": self.micro_batches.shapes.micro[equation.results[0]].shape, "fill": 0}
        dtype = self.micro_batches.shapes.micro[equation.results[0]].dtype
        first = self.inner.emit(_filled, [], equation, dtype=dtype, **zeros)
        operands = [first, *(scope.read(o) for o in equation.operands[1:])]
        (result,) = scope.bind(equation, operands)
        scope.env[equation.results[0]] = result

    def carry(self, scope: Scope, value: int) -> _Carry:
        """Combines a value of this micro-batch with those of earlier ones."""
        placement = self.placement
        pair = placement.pairs[placement.producer[value]]
        equation, kind = pair.part, placement.dependence[value]
        scattered = equation.name in SCATTER_ADD
        combined_by = "add"
        if kind is NONLINEAR and not equation.bodies and not scattered:
            combined_by = COMBINED_BY[equation.name]
        # Results of loops are averaged; the operand of a scatter-add is added after the loop.
        is_average = bool(equation.bodies) and kind is not SUM
        term = scope.env[value]
        aval = self.inner.aval(term)
        dtype = sum_dtype = aval.dtype
        if kind in (SAME, ZERO):  # a loop's counter: the same in every micro-batch
            start = {"shape": aval.shape, "dtype": dtype, "fill": 0}
            inside = self.inner.new_value(aval)
            out = self.inner.emit(_of_first, [scope.index, inside, term], equation)
            return _Carry(inside, out, start, is_average=False)
        if is_average and not jnp.issubdtype(dtype, jnp.inexact):
            raise TraceError(
                f"{equation.source_line}: a result of this {equation.name} is {dtype} and depends "
                "on the batch other than as a sum, so results of micro-batches cannot be combined. "
                "Return a floating point value or a sum, or use num_micro_batches=1."
            )
        if combined_by == "add" and jnp.issubdtype(dtype, jnp.floating):
            sum_dtype = jnp.promote_types(dtype, jnp.float32)
        start = _neutral_element(combined_by, np.dtype(sum_dtype))
        inside = self.inner.new_value(_jax.array_aval(aval.shape, sum_dtype))
        if sum_dtype != dtype:
            term = self.inner.emit(_convert, [term], equation, dtype=sum_dtype)
        out = self.inner.emit(_COMBINE[combined_by], [inside, term], equation)
        return _Carry(
            inside, out, {"shape": aval.shape, "dtype": sum_dtype, "fill": start}, is_average
        )

    def scan(self, body: Program, inits: list[Operand], carries: list[ShapedArray]) -> list[int]:
        outer, num = self.outer, self.micro_batches.num
        stacked = [
            _jax.stacked_aval(self.inner.aval(out), num) for out in body.outputs[len(inits) :]
        ]
        results = [outer.new_value(aval) for aval in (*carries, *stacked)]
        self.position = len(outer.equations)
        outer.scan(
            body,
            length=num,
            consts=[outside for outside, _ in self.consts],
            inits=inits,
            xs=[outside for outside, _ in self.xs],
            results=results,
            like=self.placement.pairs[min(self.placement.in_loop)].part,
        )
        return results


@dataclass(frozen=True)
class _Carry:
    inside: int
    out: Operand
    start: dict[str, Any]
    is_average: bool


_COMBINE = {
    "add": add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mul": jnp.multiply,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def _neutral_element(combined_by: str, dtype: Any) -> Any:
    if combined_by in ("max", "min"):
        if jnp.issubdtype(dtype, jnp.floating):
            return -np.inf if combined_by == "max" else np.inf
        if dtype == np.bool_:
            return combined_by == "min"
        limits = jnp.iinfo(dtype)
        return int(limits.min if combined_by == "max" else limits.max)
    if combined_by == "and":
        return True if dtype == np.bool_ else -1
    return int(combined_by == "mul")


def _filled(*, shape: tuple[int, ...], dtype: Any, fill: Any) -> jax.Array:
    return jnp.full(shape, fill, dtype)


def _of_first(index: jax.Array, kept: jax.Array, made: jax.Array) -> jax.Array:
    """The first micro-batch's value. In a pipeline, a carry that nobody reads has no buffer."""
    return jnp.where(index == 0, made, kept)


def _convert(value: jax.Array, *, dtype: Any) -> jax.Array:
    return value.astype(dtype)


def _divide(value: jax.Array, *, num: int) -> jax.Array:
    return value / np.asarray(num, value.dtype)
