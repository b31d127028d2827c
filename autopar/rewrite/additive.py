"""How the values of a micro-batch make up those of the whole batch, equation by equation.

    ZERO     known to be zero
    SAME     does not depend on the batch
    ROWS     has the batch dimension: its rows are those of the whole batch
    SUM      the whole batch's value is the sum over micro-batches
    AFFINE   an affine function of sums: the average over micro-batches, each of whose sums stands
             for the whole batch (times n), is exact
    OWN      another function of sums: each micro-batch has its own, the average stands for all

The shapes of the two traces tell ROWS; everything else follows from what an equation reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar import _jax
from autopar.errors import TraceError
from autopar.ir.program import Constant, Equation, Operand, Program


class Makeup(Enum):
    ZERO = "zero"
    SAME = "same"
    ROWS = "rows"
    SUM = "sum"
    AFFINE = "affine"
    OWN = "own"


ZERO, SAME, ROWS = Makeup.ZERO, Makeup.SAME, Makeup.ROWS
SUM, AFFINE, OWN = Makeup.SUM, Makeup.AFFINE, Makeup.OWN

# Reductions over rows, and how those of micro-batches are combined.
COMBINED_BY = {
    "reduce_sum": "add",
    "dot_general": "add",
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
# Linear in their first operand, the others being the same for all micro-batches.
_LINEAR_IN_FIRST = {
    "neg", "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze",
    "expand_dims", "copy", "copy_p", "reduce_sum", "slice", "rev", "real", "imag", "gather",
    "dynamic_slice", "cumsum", "sharding_constraint", "reduce_precision", "div", _jax.CONSTRAIN,
    "reduce_window_sum",
}  # fmt: skip
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
_SUMS = {"add", "add_any", "sub", "concatenate", "pad"}
_KEEPS_ZERO = _LINEAR_IN_FIRST | {"mul", "select_n"}


def join(first: Makeup, second: Makeup) -> Makeup:
    """What a loop's carry, or the result of branches, is if it can be either."""
    if first is second:
        return first
    pair = {first, second}
    if ROWS in pair:
        return ROWS
    for kind in (SUM, SAME):
        if pair == {ZERO, kind}:
            return kind
    return OWN if OWN in pair else AFFINE


@dataclass(frozen=True)
class RowShapes:
    """Which values have rows: those whose shapes differ between the two traces."""

    full: Sequence[Any]
    micro: Sequence[Any]

    def dims(self, value: int) -> tuple[int, ...]:
        whole, part = _shape(self.full[value]), _shape(self.micro[value])
        return tuple(d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b)

    def has_rows(self, operand: Operand) -> bool:
        if isinstance(operand, Constant):
            return False
        return _shape(self.full[operand]) != _shape(self.micro[operand])


def _shape(aval: Any) -> tuple[int, ...]:
    return tuple(getattr(aval, "shape", ()))


def of_constant(constant: Constant) -> Makeup:
    value = constant.value
    if isinstance(value, (bool, int, float, np.generic, np.ndarray)) and np.all(value == 0):
        return ZERO
    return SAME


def of_operand(operand: Operand, makeup: Mapping[int, Makeup]) -> Makeup:
    return of_constant(operand) if isinstance(operand, Constant) else makeup[operand]


def results_of(
    equation: Equation, operands: Sequence[Makeup], shapes: RowShapes
) -> tuple[Makeup, ...]:
    """The makeup of an equation's results."""
    if equation.bodies:
        found = _of_loop(equation, operands, shapes)
    elif equation.name == "optimization_barrier":
        found = tuple(operands)
    else:
        found = (_of_operation(equation, operands, shapes),) * len(equation.results)
    return tuple(
        ROWS if shapes.has_rows(r) else kind
        for r, kind in zip(equation.results, found, strict=True)
    )


def _of_operation(equation: Equation, operands: Sequence[Makeup], shapes: RowShapes) -> Makeup:
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
            raise picks_rows(equation)
        if name in SCATTER_ADD and operands[0] not in (ZERO, SUM):
            return AFFINE if operands[0] in (SAME, AFFINE) else OWN
        return SUM if combined_by == "add" else OWN
    if name == "convert_element_type" and _rounds(equation, shapes):
        return OWN
    return _of_function_of_sums(name, operands)


def _rounds(equation: Equation, shapes: RowShapes) -> bool:
    """A conversion from floating point to whole numbers is not linear."""
    (operand,) = equation.operands
    assert isinstance(operand, int)
    from_float = jnp.issubdtype(shapes.micro[operand].dtype, jnp.inexact)
    return from_float and not jnp.issubdtype(equation.params["new_dtype"], jnp.inexact)


def _of_function_of_sums(name: str, operands: Sequence[Makeup]) -> Makeup:
    """An equation that reads sums and no rows."""
    first, others = operands[0], set(operands[1:])
    if name in _LINEAR_IN_FIRST and others <= {ZERO, SAME}:
        return first
    if name == "div" and first is SUM and others <= {SAME, OWN}:
        return SUM
    if name in _PRODUCTS:
        summed = [k for k in operands if k in (SUM, AFFINE)]
        if len(summed) == 1 and set(operands) - set(summed) <= {ZERO, SAME}:
            return summed[0]
        if summed == [SUM] and OWN in operands:
            return SUM
    if name in _SUMS or name in SCATTER_ADD:
        terms = set(operands)
        if name in SCATTER_ADD:
            if operands[1] not in (ZERO, SAME):
                return OWN
            terms = {operands[0], *operands[2:]}
        return _of_sum(terms)
    if name == "select_n" and first in (ZERO, SAME):
        return _of_sum(others)
    if name == "dynamic_update_slice" and set(operands[2:]) <= {ZERO, SAME}:
        return _of_sum(set(operands[:2]))
    return OWN


def _of_sum(terms: set[Makeup]) -> Makeup:
    if terms <= {ZERO, SUM}:
        return SUM
    return OWN if OWN in terms else AFFINE


def _of_loop(
    equation: Equation, operands: Sequence[Makeup], shapes: RowShapes
) -> tuple[Makeup, ...]:
    if equation.name == "cond":
        branches = [outputs_of(branch, operands[1:], shapes)[0] for branch in equation.bodies]
        joined = [_joined(kinds) for kinds in zip(*branches, strict=True)]
        if operands[0] not in (ZERO, SAME):
            joined = [OWN if kind not in (ROWS,) else kind for kind in joined]
        return tuple(joined)
    carries, others = loop_makeup(equation, operands, shapes)
    return (*carries, *others)


def _joined(kinds: Iterable[Makeup]) -> Makeup:
    first, *rest = kinds
    for kind in rest:
        first = join(first, kind)
    return first


def loop_makeup(
    equation: Equation, operands: Sequence[Makeup], shapes: RowShapes
) -> tuple[tuple[Makeup, ...], tuple[Makeup, ...]]:
    """(makeup of the carries, makeup of the stacked results) of a scan or while loop: the carries
    are joined with what comes back until nothing changes."""
    if equation.name == "scan":
        num_consts, num_carry = _jax.scan_sizes(equation.params)
        consts, body = operands[:num_consts], equation.bodies[0]
        inits, xs = (
            operands[num_consts : num_consts + num_carry],
            operands[num_consts + num_carry :],
        )
        cond_consts: Sequence[Makeup] = ()
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
        outputs, _ = outputs_of(body, (*consts, *carries, *xs), shapes)
        joined = tuple(join(a, b) for a, b in zip(carries, outputs, strict=False))
        if equation.name == "while":
            (predicate,), _ = outputs_of(equation.bodies[0], (*cond_consts, *joined), shapes)
            if predicate not in (ZERO, SAME):  # trips differ between micro-batches
                joined = tuple(k if k in (ROWS, SAME, ZERO) else OWN for k in joined)
        if joined == carries:
            return carries, outputs[len(carries) :]
        carries = joined


def outputs_of(
    body: Program, inputs: Sequence[Makeup], shapes: RowShapes
) -> tuple[tuple[Makeup, ...], dict[int, Makeup]]:
    """(makeup of a body's outputs, of all its values), given that of its inputs."""
    makeup: dict[int, Makeup] = {value: SAME for value, _ in body.captured}
    for value, kind in zip(body.inputs, inputs, strict=True):
        makeup[value] = ROWS if shapes.has_rows(value) else kind
    for equation in body.equations:
        operands = [of_operand(o, makeup) for o in equation.operands]
        kinds = results_of(equation, operands, shapes)
        makeup.update(zip(equation.results, kinds, strict=True))
    return tuple(of_operand(o, makeup) for o in body.outputs), makeup


def picks_rows(equation: Equation) -> TraceError:
    return TraceError(
        f"{equation.source_line}: {equation.name} takes particular rows out of the batch, or "
        "compares rows by their place, which has no meaning for a micro-batch. Compute it from a "
        "sum, mean or maximum over the batch, or outside of the step, or use num_micro_batches=1."
    )
