"""How each value depends on the batch: from aligned traces to a `BatchDependence` per value.

    ZERO        known to be zero
    SAME        does not depend on the batch
    ROWS        has the batch dimension: micro-batches hold rows of the whole batch's value
    SUM         the whole batch's value is the sum over micro-batches
    AFFINE      an affine function of sums: exact as the average over n micro-batches, if each
                uses n times its sum in place of the whole batch's
    NONLINEAR   another function of sums: each micro-batch computes its own, and their average
                approximates the whole batch's
    WHOLE       needs rows by their place (one row, a median, a queue's update), or what does:
                computed once, after the loop, from all rows

Shapes that differ between the two traces are ROWS; the rest follows from an equation's operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from autopar import _jax
from autopar.errors import TraceError
from autopar.ir.program import Constant, Equation, Operand, Program
from autopar.rewrite.row_ties import has_ties


class BatchDependence(Enum):
    ZERO = "zero"
    SAME = "same"
    ROWS = "rows"
    SUM = "sum"
    AFFINE = "affine"
    NONLINEAR = "nonlinear"
    WHOLE = "whole"

    __hash__ = object.__hash__  # Enum's own is Python code, and these are put into many sets


ZERO, SAME, ROWS = BatchDependence.ZERO, BatchDependence.SAME, BatchDependence.ROWS
SUM, AFFINE, NONLINEAR = BatchDependence.SUM, BatchDependence.AFFINE, BatchDependence.NONLINEAR
WHOLE = BatchDependence.WHOLE

# Reductions over rows, and how to combine those of micro-batches.
COMBINED_BY = {
    "reduce_sum": "add",
    "dot_general": "add",
    "ragged_dot_general": "add",
    "conv_general_dilated": "add",
    "scatter-add": "add",
    "scatter_add": "add",
    "dot_product_attention_bwd_wrapper": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}
SCATTER_ADD = ("scatter-add", "scatter_add")
# Linear in the first operand if the others are the same for all micro-batches.
_LINEAR_IN_FIRST = {
    "neg", "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze",
    "expand_dims", "copy", "copy_p", "reduce_sum", "slice", "rev", "real", "imag", "gather",
    "dynamic_slice", "cumsum", "sharding_constraint", "reduce_precision", "div", _jax.CONSTRAIN,
    "reduce_window_sum",
}  # fmt: skip
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
_SUMS = {"add", "add_any", "sub", "concatenate", "pad"}
_KEEPS_ZERO = _LINEAR_IN_FIRST | {"mul", "select_n"}


def join(first: BatchDependence, second: BatchDependence) -> BatchDependence:
    """The dependence of a loop's carry, or of a branch's result, that can be either."""
    if first is second:
        return first
    pair = {first, second}
    for kind in (ROWS, WHOLE):
        if kind in pair:
            return kind
    for kind in (SUM, SAME):
        if pair == {ZERO, kind}:
            return kind
    return NONLINEAR if NONLINEAR in pair else AFFINE


@dataclass(frozen=True)
class RowShapes:
    """The two traces' shapes: values have rows where they differ."""

    full: Sequence[ShapedArray]
    micro: Sequence[ShapedArray]
    _dims: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, compare=False)

    def dims(self, value: int) -> tuple[int, ...]:
        dims = self._dims.get(value)
        if dims is None:
            whole, part = _shape(self.full[value]), _shape(self.micro[value])
            differ = enumerate(zip(whole, part, strict=True))
            dims = self._dims[value] = tuple(d for d, (a, b) in differ if a != b)
        return dims

    def has_rows(self, operand: Operand) -> bool:
        return isinstance(operand, int) and bool(self.dims(operand))


def _shape(aval: ShapedArray) -> tuple[int, ...]:
    return tuple(getattr(aval, "shape", ()))


def constant_dependence(constant: Constant) -> BatchDependence:
    value = constant.value
    if isinstance(value, np.ndarray) and value.ndim:
        return ZERO if np.all(value == 0) else SAME
    if isinstance(value, (bool, int, float, np.generic, np.ndarray)):
        return SAME if value else ZERO
    return SAME


def operand_dependence(
    operand: Operand, dependence: Mapping[int, BatchDependence]
) -> BatchDependence:
    return constant_dependence(operand) if isinstance(operand, Constant) else dependence[operand]


def result_dependence(
    equation: Equation, operands: Sequence[BatchDependence], shapes: RowShapes
) -> tuple[BatchDependence, ...]:
    """The dependence of an equation's results, from that of its operands."""
    if equation.bodies:
        kinds = _of_loop(equation, operands, shapes)
    elif equation.name == "optimization_barrier":
        kinds = tuple(operands)
    elif _places_rows(equation, shapes):
        raise picks_rows(equation)
    else:
        kinds = (_of_operation(equation, operands, shapes),) * len(equation.results)
    return tuple(
        ROWS if shapes.has_rows(r) else kind
        for r, kind in zip(equation.results, kinds, strict=True)
    )


def _of_operation(
    equation: Equation, operands: Sequence[BatchDependence], shapes: RowShapes
) -> BatchDependence:
    name, kinds = equation.name, set(operands)
    if kinds <= {ZERO, SAME}:
        keeps = name in _KEEPS_ZERO and bool(operands)
        if keeps and (operands[0] is ZERO or (name == "mul" and ZERO in kinds)):
            return SAME if name == "select_n" else ZERO
        return SAME
    if ROWS in kinds:
        if all(shapes.has_rows(r) for r in equation.results):
            return ROWS
        combined_by = COMBINED_BY.get(name)
        if combined_by is None:
            return WHOLE
        if name in SCATTER_ADD and operands[0] not in (ZERO, SUM):
            return AFFINE if operands[0] in (SAME, AFFINE) else NONLINEAR
        return SUM if combined_by == "add" else NONLINEAR
    if WHOLE in kinds:
        return WHOLE
    if name == "convert_element_type" and _rounds(equation, shapes):
        return NONLINEAR
    return _of_function_of_sums(name, operands)


def _places_rows(equation: Equation, shapes: RowShapes) -> bool:
    """Whether it puts values at particular rows of its result, as the derivative of picking rows
    does. A micro-batch would do so at rows of its own."""
    name, operands = equation.name, equation.operands
    if name not in ("pad", "dynamic_update_slice") and not name.startswith("scatter"):
        return False
    rows = shapes.dims(equation.results[0])
    if name.startswith("scatter"):
        chosen = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
        return not set(rows).isdisjoint(chosen) and not shapes.has_rows(operands[1])
    placed = operands[0] if name == "pad" else operands[1]
    return not set(rows) <= set(shapes.dims(placed) if isinstance(placed, int) else ())


def _rounds(equation: Equation, shapes: RowShapes) -> bool:
    """Whether a conversion rounds floating point to integers, which is not linear."""
    (operand,) = equation.operands
    assert isinstance(operand, int)
    from_float = jnp.issubdtype(shapes.micro[operand].dtype, jnp.inexact)
    return from_float and not jnp.issubdtype(equation.params["new_dtype"], jnp.inexact)


def _of_function_of_sums(name: str, operands: Sequence[BatchDependence]) -> BatchDependence:
    """An equation that reads sums and no rows."""
    first, others = operands[0], set(operands[1:])
    if name in _LINEAR_IN_FIRST and others <= {ZERO, SAME}:
        return first
    if name == "div" and first is SUM and others <= {SAME, NONLINEAR}:
        return SUM
    if name in _PRODUCTS:
        summed = [k for k in operands if k in (SUM, AFFINE)]
        if len(summed) == 1 and set(operands) - set(summed) <= {ZERO, SAME}:
            return summed[0]
        if summed == [SUM] and NONLINEAR in operands:
            return SUM
    if name in _SUMS or name in SCATTER_ADD:
        terms = set(operands)
        if name in SCATTER_ADD:
            if operands[1] not in (ZERO, SAME):
                return NONLINEAR
            terms = {operands[0], *operands[2:]}
        return _of_sum(terms)
    if name == "select_n" and first in (ZERO, SAME):
        return _of_sum(others)
    if name == "dynamic_update_slice" and set(operands[2:]) <= {ZERO, SAME}:
        return _of_sum(set(operands[:2]))
    return NONLINEAR


def _of_sum(terms: set[BatchDependence]) -> BatchDependence:
    if terms <= {ZERO, SUM}:
        return SUM
    return NONLINEAR if NONLINEAR in terms else AFFINE


def _of_loop(
    equation: Equation, operands: Sequence[BatchDependence], shapes: RowShapes
) -> tuple[BatchDependence, ...]:
    if equation.name == "cond":
        branches = [
            output_dependence(branch, operands[1:], shapes)[0] for branch in equation.bodies
        ]
        joined = [_joined(kinds) for kinds in zip(*branches, strict=True)]
        if operands[0] not in (ZERO, SAME):
            joined = [kind if kind in (ROWS, WHOLE) else NONLINEAR for kind in joined]
        return tuple(joined)
    carries, others = loop_dependence(equation, operands, shapes)
    return (*carries, *others)


def _joined(kinds: Iterable[BatchDependence]) -> BatchDependence:
    first, *rest = kinds
    for kind in rest:
        first = join(first, kind)
    return first


def loop_dependence(
    equation: Equation, operands: Sequence[BatchDependence], shapes: RowShapes
) -> tuple[tuple[BatchDependence, ...], tuple[BatchDependence, ...]]:
    """(dependence of the carries, of the stacked results) of a scan or while loop: a fixed point of
    joining the carries with the body's outputs."""
    if equation.name == "scan":
        num_consts, num_carry = _jax.scan_sizes(equation.params)
        consts, body = operands[:num_consts], equation.bodies[0]
        inits = operands[num_consts : num_consts + num_carry]
        xs = slice_dependence(equation, operands[num_consts + num_carry :], shapes)
        cond_consts: Sequence[BatchDependence] = ()
    else:
        num_cond = equation.params["cond_nconsts"]
        num_consts = num_cond + equation.params["body_nconsts"]
        cond_consts, consts = operands[:num_cond], operands[num_cond:num_consts]
        inits, xs, body = operands[num_consts:], (), equation.bodies[1]
    carry_values = body.inputs[len(consts) : len(consts) + len(inits)]
    carries = tuple(
        ROWS if shapes.has_rows(v) else kind for v, kind in zip(carry_values, inits, strict=True)
    )
    while True:
        outputs, _ = output_dependence(body, (*consts, *carries, *xs), shapes)
        joined = tuple(join(a, b) for a, b in zip(carries, outputs, strict=False))
        if equation.name == "while":
            (predicate,), _ = output_dependence(equation.bodies[0], (*cond_consts, *joined), shapes)
            if predicate not in (ZERO, SAME):  # numbers of trips differ between micro-batches
                stays = [v == o for v, o in zip(carry_values, body.outputs, strict=True)]
                joined = tuple(
                    k if k in (ROWS, WHOLE) or (s and k in (SAME, ZERO)) else NONLINEAR
                    for k, s in zip(joined, stays, strict=True)
                )
        elif WHOLE in xs:
            joined = _with_sums_of_rows(body, carry_values, inits, joined)
        if joined == carries:
            return carries, outputs[len(carries) :]
        carries = joined


def slice_dependence(
    scan: Equation, xs: Sequence[BatchDependence], shapes: RowShapes
) -> list[BatchDependence]:
    """The dependence of the slices that a scan reads: a trip may have one row of the batch."""
    stacks = scan.operands[len(scan.operands) - len(xs) :]
    return [
        WHOLE if isinstance(stack, int) and 0 in shapes.dims(stack) else kind
        for stack, kind in zip(stacks, xs, strict=True)
    ]


def _with_sums_of_rows(
    body: Program,
    carries: Sequence[int],
    inits: Sequence[BatchDependence],
    joined: Sequence[BatchDependence],
) -> tuple[BatchDependence, ...]:
    """The dependence of carries in a scan over rows: SUM where it only adds something of each row
    to zero, if no other carry depends on earlier rows."""
    sums = {
        index
        for index, (carry, output) in enumerate(zip(carries, body.outputs, strict=False))
        if inits[index] is ZERO and _only_adds(body, carry, output)
    }
    if any(kind is WHOLE and index not in sums for index, kind in enumerate(joined)):
        return tuple(joined)
    return tuple(SUM if k is WHOLE and i in sums else k for i, k in enumerate(joined))


def _only_adds(body: Program, carry: int, output: Operand) -> bool:
    readers = [e for e in body.equations if carry in e.inputs]
    if len(readers) != 1 or readers[0].name not in ("add", "add_any"):
        return False
    (reader,) = readers
    return reader.results[0] == output and reader.operands.count(carry) == 1


def output_dependence(
    body: Program, inputs: Sequence[BatchDependence], shapes: RowShapes
) -> tuple[tuple[BatchDependence, ...], dict[int, BatchDependence]]:
    """(dependence of a body's outputs, of all its values), from that of its inputs."""
    dependence: dict[int, BatchDependence] = {value: SAME for value, _ in body.captured}
    for value, kind in zip(body.inputs, inputs, strict=True):
        dependence[value] = ROWS if shapes.has_rows(value) else kind
    for equation in body.equations:
        operands = [operand_dependence(o, dependence) for o in equation.operands]
        kinds = result_dependence(equation, operands, shapes)
        if WHOLE in kinds and ROWS in operands:  # the loop would run once more, for all rows
            raise picks_rows(equation)
        dependence.update(zip(equation.results, kinds, strict=True))
    return tuple(operand_dependence(o, dependence) for o in body.outputs), dependence


def picks_rows(equation: Equation) -> TraceError:
    is_known = equation.bodies or has_ties(equation.name) or equation.name in COMBINED_BY
    if is_known:
        what = (
            "takes or places particular rows of the batch, or compares rows by their place, and "
            "other rows depend on it, which has no meaning for a micro-batch. Compute it from a "
            "sum, mean or maximum over the batch, or outside of the step, or use"
        )
    else:
        what = (
            "makes something of rows of the batch that other rows depend on, and autopar does not "
            "look into it: it may be no sum over rows, and a micro-batch has only some. Write it "
            "with other operations, such as einsums for a shard_map, or use"
        )
    return TraceError(f"{equation.source_line}: {equation.name} {what} num_micro_batches=1.")
