"""Gradient accumulation: from a step on the whole batch to one that loops over micro-batches.

Two traces of the same function, at the whole batch and at a micro-batch, are aligned equation by
equation (`rewrite.align`). Values whose shapes differ have *rows*. The new program has three parts:

    prologue   what does not depend on the batch, and what all rows need of the whole batch
    loop       a `scan` over micro-batches: every equation that makes or reads rows
    epilogue   everything behind the reductions over rows, once: optimizer, clipping, metrics

Reductions over rows are the frontier between loop and epilogue: the loop sums them up (or takes
their maximum …) in its carry, and the epilogue reads the value of the whole batch. With the
floating point numbers of the full trace that is exact, whatever the epilogue does with it.

A reduction that flows back into rows crosses the batch (statistics of BatchNorm, the sum of a
mask). If no product is above it, it is computed once, exactly, in the prologue. Otherwise each
micro-batch uses its own in its place, and a note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import _jax
from autopar.errors import MeshError, TraceError
from autopar.ir.program import Equation, Operand, Program
from autopar.ir.traced_step import TracedStep
from autopar.rewrite import micro_batch_rows
from autopar.rewrite.additive import (
    COMBINED_BY,
    OWN,
    ROWS,
    SAME,
    SCATTER_ADD,
    SUM,
    ZERO,
    RowShapes,
)
from autopar.rewrite.align import align
from autopar.rewrite.fold_transposes import with_turned_products
from autopar.rewrite.layers import Layer
from autopar.rewrite.micro_batch_body import MicroBatches, Notes, Scope, add
from autopar.rewrite.micro_batch_placement import Pair, Placement
from autopar.rewrite.program_writer import Env, ProgramWriter
from autopar.rewrite.remat import rematerialise, with_remat


def batch_size(step: TracedStep, num_micro_batches: int) -> int:
    """The rows of the batch, checked: its arrays have as many each, micro-batches divide them."""
    found = [(step.call.paths[i], step.avals[i].shape) for i in step.batch if step.avals[i].shape]
    if not found:
        raise TraceError(
            f"{step.name}: num_micro_batches={num_micro_batches} needs a batch, but no array of "
            "its arguments is one. Pass the batch as argument 1, or say with batch_argnums which "
            "arguments have a leading batch dimension."
        )
    path, (size, *_) = found[0]
    for other, shape in found:
        if shape[0] != size:
            raise MeshError(
                f"{other} has {shape[0]} rows and {path} has {size}: with num_micro_batches="
                f"{num_micro_batches} all arrays of the batch are cut into micro-batches along "
                "their first dimension. Give them equal first dimensions, or name the arguments "
                "that are the batch with batch_argnums."
            )
    if size % num_micro_batches:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        near = sorted(divisors, key=lambda n: (abs(n - num_micro_batches), n))[:3]
        raise MeshError(
            f"{path}: its batch dimension of {size} is not divisible by num_micro_batches="
            f"{num_micro_batches}. Use {' or '.join(map(str, sorted(near)))} micro-batches, or "
            f"another batch size."
        )
    return size


def micro_batch_leaves(step: TracedStep, num_micro_batches: int) -> list[Any]:
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
    """The full step as a loop over micro-batches of the size that `micro` was traced with. These
    layers are computed again in the backward pass of each."""
    part = align(full.program, micro.program, full.name)
    if layers:
        full, part = with_remat(full, layers), rematerialise(part, layers)
    full = replace(full, program=with_turned_products(full.program))
    part = with_turned_products(part)
    shapes = RowShapes(full.program.avals, part.avals)
    size = batch_size(full, num_micro_batches)
    sizes = _row_sizes(part, shapes, num_micro_batches)
    block = micro_batch_rows.block_rows(size, sizes)
    notes = Notes()
    of = MicroBatches(num_micro_batches, size // num_micro_batches // block, shapes, notes)
    program, loop = _write(Placement(full.program, part, of, full.out_paths))
    return replace(
        full,
        program=program,
        num_micro_batches=num_micro_batches,
        notes=notes.texts(),
        loop=loop,
    )


def _row_sizes(program: Program, shapes: RowShapes, num: int) -> set[int]:
    """Every size that the batch dimension has, after a check that it is cut evenly."""
    sizes: set[int] = set()

    def visit(part: Program) -> None:
        for equation in part.equations:
            for value in equation.results:
                for dim in shapes.dims(value):
                    whole, own = shapes.full[value].shape[dim], shapes.micro[value].shape[dim]
                    if whole != num * own:
                        raise TraceError(
                            f"{equation.source_line}: {equation.name} makes an array of {whole} "
                            f"rows from the batch, and one of {own} rows from one of {num} "
                            "micro-batches, so the batch cannot be put together again. Keep a "
                            "multiple of the batch's rows, or use num_micro_batches=1."
                        )
                    sizes.add(whole)
            for body in equation.bodies:
                visit(body)

    visit(program)
    for value in program.inputs:
        sizes.update(shapes.full[value].shape[dim] for dim in shapes.dims(value))
    return sizes


def _write(place: Placement) -> tuple[Program, int | None]:
    """(prologue, loop and epilogue as one program, the loop's position in it)."""
    writer, env = ProgramWriter(), Env()
    avals = place.full.avals
    inputs = [writer.new_value(avals[v]) for v in place.full.inputs]
    env.update(zip(place.full.inputs, inputs, strict=True))
    for value, array in place.full.captured:
        env[value] = writer.capture(array, avals[value])
    for index in sorted(place.before):
        writer.copy(place.pairs[index].whole, avals, env)
    results: dict[int, Operand] = {}
    loop = None
    if place.in_loop:
        loop_writer = _LoopWriter(place, writer, env)
        results, loop = loop_writer.write(), loop_writer.position
    for index, pair in enumerate(place.pairs):
        if index in place.after:
            writer.copy(pair.whole, avals, env)
        for value in pair.results:
            if value in results:
                env[value] = _finished(place, writer, env, pair, value, results[value])
    outputs = [env[o] if isinstance(o, int) else o for o in place.full.outputs]
    return writer.program(inputs, outputs), loop


def _finished(
    place: Placement, writer: ProgramWriter, env: Env, pair: Pair, value: int, made: Operand
) -> Operand:
    """What the loop gave, as the value of the whole batch."""
    if value in place.stacked:
        (dim,) = place.of.shapes.dims(value)
        return writer.emit(micro_batch_rows.join, [made], dim=dim, blocks=place.of.blocks)
    dtype = place.full.avals[value].dtype
    if writer.aval(made).dtype != dtype:
        made = writer.emit(_convert, [made], dtype=dtype)
    if not place.adds_to(pair, 0):
        return made
    first = pair.part.operands[0]
    return writer.emit(add, [env[first] if isinstance(first, int) else first, made])


class _LoopWriter:
    """Writes the loop: what enters, its body, and how results of micro-batches are combined."""

    def __init__(self, plan: Placement, outer: ProgramWriter, outer_env: Env) -> None:
        self.plan, self.of = plan, plan.of
        self.outer, self.outer_env = outer, outer_env
        self.inner = outer.inner()
        self.consts: list[tuple[Operand, int]] = []  # (outside, inside)
        self.xs: list[tuple[Operand, int]] = []
        self.position: int | None = None  # of the loop among the equations outside

    def write(self) -> dict[int, Operand]:
        """value -> what the loop gives for it, outside."""
        plan, inner = self.plan, self.inner
        index = self.take(self.outer.emit(micro_batch_rows.indices, [], num=self.of.num))
        scope = Scope(self.of, inner, plan.makeup, index)
        self.enter(scope)
        for at in sorted(plan.in_loop):
            pair = plan.pairs[at]
            if pair.part.name in SCATTER_ADD and plan.adds_to(pair, 0):
                self.scatter_to_zeros(scope, pair)
            else:
                scope.copy(pair.part)
        carries = self.write_carries(scope)
        stacked = [scope.env[value] for value in plan.stacked]
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
        found: dict[int, Operand] = {}
        for value, carry, result in zip(plan.accumulated, carries, results, strict=False):
            found[value] = result
            if carry.is_average:
                found[value] = self.outer.emit(_divide, [result], num=self.of.num)
        found.update(zip(plan.stacked, results[len(carries) :], strict=True))
        return found

    def write_carries(self, scope: Scope) -> list[_Carry]:
        """Every sum is added to where its term is made, so that the term is not kept."""
        inner = self.inner
        made_at = {r: i for i, e in enumerate(inner.equations) for r in e.results}
        own = list(inner.equations)
        after: dict[int, list[Equation]] = {}
        carries = []
        for value in self.plan.accumulated:
            inner.equations.clear()
            carries.append(self.carry(scope, value))
            term = scope.env[value]
            at = made_at.get(term, len(own) - 1) if isinstance(term, int) else len(own) - 1
            after.setdefault(at, []).extend(inner.equations)
        inner.equations[:] = [e for i, x in enumerate(own) for e in (x, *after.get(i, ()))]
        return carries

    def take(self, stack: Operand) -> int:
        """A slice of a stack, in the body."""
        aval = self.outer.aval(stack)
        inside = self.inner.new_value(_jax.unstacked_aval(aval))
        self.xs.append((stack, inside))
        return inside

    def enter(self, scope: Scope) -> None:
        """Everything that the body reads from outside of it."""
        plan, shapes = self.plan, self.of.shapes
        captured = dict(plan.part.captured)
        made = {r for at in plan.in_loop for r in plan.pairs[at].results}
        for at in sorted(plan.in_loop):
            pair = plan.pairs[at]
            for position, value in enumerate(pair.part.operands):
                if not isinstance(value, int) or value in scope.env or value in made:
                    continue
                if plan.adds_to(pair, position):
                    continue
                if plan.makeup[value] is not ROWS:
                    aval = self.outer.aval(self.outer_env[value])
                    scope.env[value] = inside = self.inner.new_value(aval)
                    self.consts.append((self.outer_env[value], inside))
                elif value in captured and not _is_cut(captured[value], shapes.dims(value)):
                    scope.env[value] = self.inner.capture(captured[value], shapes.micro[value])
                else:
                    (dim,) = shapes.dims(value)  # arguments are checked, keys have one
                    stack = self.outer.emit(
                        micro_batch_rows.cut,
                        [self.outer_env[value]],
                        num=self.of.num,
                        dim=dim,
                        blocks=self.of.blocks,
                    )
                    scope.env[value] = self.take(stack)

    def scatter_to_zeros(self, scope: Scope, pair: Pair) -> None:
        equation = pair.part
        zeros = {"shape": self.of.shapes.micro[equation.results[0]].shape, "fill": 0}
        dtype = self.of.shapes.micro[equation.results[0]].dtype
        first = self.inner.emit(_filled, [], equation, dtype=dtype, **zeros)
        operands = [first, *(scope.read(o) for o in equation.operands[1:])]
        (result,) = scope.bind(equation, operands)
        scope.env[equation.results[0]] = result

    def carry(self, scope: Scope, value: int) -> _Carry:
        """Combine a value of this micro-batch with those before it."""
        plan = self.plan
        pair = plan.pairs[plan.producer[value]]
        equation, kind = pair.part, plan.makeup[value]
        scattered = equation.name in SCATTER_ADD
        combined_by = "add"
        if kind is OWN and not equation.bodies and not scattered:
            combined_by = COMBINED_BY[equation.name]
        # Averages of loops' results; what a scatter-add adds to is added after the loop.
        is_average = bool(equation.bodies) and kind is not SUM
        own = scope.env[value]
        dtype = sum_dtype = self.inner.aval(own).dtype
        if kind in (SAME, ZERO):  # a loop's counter: any micro-batch has it
            start = {"shape": self.inner.aval(own).shape, "dtype": dtype, "fill": 0}
            inside = self.inner.new_value(self.inner.aval(own))
            return _Carry(inside, own, start, is_average=False)
        if is_average and not jnp.issubdtype(dtype, jnp.inexact):
            raise TraceError(
                f"{equation.source_line}: a result of this {equation.name} is {dtype} and depends "
                "on the batch other than as a sum, so results of micro-batches cannot be combined. "
                "Return a floating point value or a sum, or use num_micro_batches=1."
            )
        if combined_by == "add" and jnp.issubdtype(dtype, jnp.floating):
            sum_dtype = jnp.promote_types(dtype, jnp.float32)
        start = _start(combined_by, np.dtype(sum_dtype))
        aval = self.inner.aval(own)
        inside = self.inner.new_value(_jax.array_aval(aval.shape, sum_dtype))
        if sum_dtype != dtype:
            own = self.inner.emit(_convert, [own], equation, dtype=sum_dtype)
        out = self.inner.emit(_COMBINE[combined_by], [inside, own], equation)
        return _Carry(
            inside, out, {"shape": aval.shape, "dtype": sum_dtype, "fill": start}, is_average
        )

    def scan(self, body: Program, inits: list[Operand], carries: list[Any]) -> list[int]:
        outer, num = self.outer, self.of.num
        stacked = [
            _jax.stacked_aval(self.inner.aval(out), num) for out in body.outputs[len(inits) :]
        ]
        results = [outer.new_value(aval) for aval in (*carries, *stacked)]
        template = self.plan.pairs[min(self.plan.in_loop)].part
        self.position = len(outer.equations)
        outer.equations.append(
            Equation(
                primitive=_jax.scan_primitive(),
                params={
                    "length": num,
                    "reverse": False,
                    "unroll": 1,
                    "num_consts": len(self.consts),
                    "num_carry": len(inits),
                },
                operands=(
                    *(outside for outside, _ in self.consts),
                    *inits,
                    *(outside for outside, _ in self.xs),
                ),
                results=tuple(results),
                scope="",
                name_stack=_jax.empty_name_stack(),
                source_info=template.source_info,
                context=template.context,
                bodies=(body,),
            )
        )
        return results


@dataclass(frozen=True)
class _Carry:
    inside: int
    out: Operand
    start: dict[str, Any]
    is_average: bool


def _is_cut(array: Any, dims: tuple[int, ...]) -> bool:
    """Captured numbers are cut like the batch; captured indices and masks over pairs of rows are
    those of the micro-batch's own trace."""
    return len(dims) == 1 and jnp.issubdtype(array.dtype, jnp.inexact)


_COMBINE = {
    "add": add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mul": jnp.multiply,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def _start(combined_by: str, dtype: Any) -> Any:
    """The neutral element of a combination."""
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


def _filled(*, shape: tuple[int, ...], dtype: Any, fill: Any) -> Any:
    return jnp.full(shape, fill, dtype)


def _convert(value: Any, *, dtype: Any) -> Any:
    return value.astype(dtype)


def _divide(value: Any, *, num: int) -> Any:
    return value / np.asarray(num, value.dtype)
