"""Where a row of an array comes from: through slices, reversals and concatenations of rows.

A scan may run over some rows of a stack (`p[1:]`, `p[::2]`), over rows in groups, or over rows of
several stacks (frozen layers before trained ones). Its trips read rows of the stacks themselves, so
that each stage holds its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.core import ShapedArray

from autopar.ir.program import Equation


def row_source(
    value: int, row: int, maker: Mapping[int, Equation], avals: Sequence[ShapedArray]
) -> tuple[int, int]:
    """(array, row) that the row of the value is taken from; the value itself if it is computed."""
    while (equation := maker.get(value)) is not None:
        found = _operand_row(equation, row, avals)
        if found is None:
            break
        value, row = found
    return value, row


def _operand_row(
    equation: Equation, row: int, avals: Sequence[ShapedArray]
) -> tuple[int, int] | None:
    """The operand that the result's row is a row of, and which."""
    if equation.name not in ("slice", "rev", "concatenate") or equation.has_effect:
        return None
    if len(equation.inputs) != len(equation.operands):  # a constant
        return None
    params, operands = equation.params, equation.inputs
    shape = avals[operands[0]].shape
    if equation.name == "slice" and takes_rows(equation, shape):
        step = 1 if params["strides"] is None else params["strides"][0]
        return operands[0], params["start_indices"][0] + row * step
    if equation.name == "rev" and tuple(params["dimensions"]) == (0,):
        return operands[0], shape[0] - 1 - row
    if equation.name == "concatenate" and params["dimension"] == 0:
        for operand in operands:
            size = avals[operand].shape[0]
            if row < size:
                return operand, row
            row -= size
    return None


def rows_grouped(
    value: int, maker: Mapping[int, Equation], avals: Sequence[ShapedArray]
) -> tuple[int, int] | None:
    """(array, rows of it in a row of the value), if the value is the array with its rows in groups:
    the layers of a model whose layers repeat in periods."""
    equation = maker.get(value)
    if equation is None or equation.name != "reshape" or not equation.inputs:
        return None
    (array,), shape = equation.inputs, avals[value].shape
    return (array, shape[1]) if is_grouping(avals[array].shape, shape) else None


def is_grouping(rows: Sequence[int], groups: Sequence[int]) -> bool:
    """Whether a reshape from the first to the second shape puts rows into groups."""
    return (
        len(groups) == len(rows) + 1 >= 2
        and rows[0] == groups[0] * groups[1]
        and tuple(rows[1:]) == tuple(groups[2:])
    )


def takes_rows(slice_: Equation, shape: Sequence[int]) -> bool:
    """Whether a slice takes whole rows of an array of this shape."""
    params = slice_.params
    strides = params["strides"] or (1,) * len(shape)
    return (
        not any(params["start_indices"][1:])
        and tuple(params["limit_indices"][1:]) == tuple(shape[1:])
        and all(stride == 1 for stride in strides[1:])
    )
