"""Rows of a stack over layers: boxes of its leading dimensions.

A stack of parameters has a row per layer. Of a scan, layers are the rows of the first dimension; of
a scan of scans, the indices of the first two, and so on. A stage that holds layers of a stack holds
one or several boxes of these dimensions, each an array with as many dimensions as the stack: of a
stack of 2 × 3 layers, layers 2 and 3 are the boxes [0:1, 2:3] and [1:2, 0:1]. Counted in the order
of layers (row-major), the rows of a box follow one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any

Rows = tuple[tuple[int, int], ...]  # per leading dimension, half-open


def num_rows(rows: Rows) -> int:
    return prod(end - start for start, end in rows)


def rows_shape(shape: Sequence[int], rows: Rows) -> tuple[int, ...]:
    """The shape of these rows of an array."""
    return (*(end - start for start, end in rows), *shape[len(rows) :])


def take_rows(array: Any, rows: Rows) -> Any:
    return array[tuple(slice(*one) for one in rows)]


def first_row(rows: Rows) -> tuple[int, ...]:
    """Where the rows start, per leading dimension."""
    return tuple(start for start, _ in rows)


def boxes(start: int, end: int, sizes: Sequence[int]) -> list[Rows]:
    """The boxes, in order, of the layers from `start` to `end`, of so many per dimension."""
    inner = tuple(sizes[1:])
    if not inner:
        return [((start, end),)]
    made: list[Rows] = []
    each, whole = prod(inner), tuple((0, size) for size in inner)
    while start < end:
        row, offset = divmod(start, each)
        if offset or end - start < each:  # a part of a row
            stop = min(end, (row + 1) * each)
            own = boxes(offset, offset + stop - start, inner)
            made += (((row, row + 1), *rows) for rows in own)
        else:
            stop = start + (end - start) // each * each
            made.append(((row, stop // each), *whole))
        start = stop
    return made


def split_rows(split: Sequence[int], shape: Sequence[int]) -> tuple[Rows, ...] | None:
    """The boxes of so many rows each, in the order of layers, of an array; None if there are no
    such boxes."""
    for depth in range(1, len(shape) + 1):
        if prod(shape[:depth]) == sum(split):
            made = [boxes(*ends, shape[:depth]) for ends in pairwise(accumulate(split, initial=0))]
            return tuple(one for (one,) in made) if all(len(one) == 1 for one in made) else None
    return None


def rows_grid(parts: Sequence[Rows]) -> tuple[int, ...] | None:
    """How many parts there are along each dimension, if all are boxes of one shape; else None."""
    if len({rows_shape((), rows) for rows in parts}) > 1:
        return None
    return tuple(len({rows[dim] for rows in parts}) for dim in range(len(parts[0])))


def join_rows(
    arrays: Sequence[Any], parts: Sequence[Rows], concatenate: Callable[[list[Any], int], Any]
) -> Any:
    """The whole array, of its parts in order. `concatenate`: of arrays, along a dimension."""
    return _joined(list(zip(parts, arrays, strict=True)), 0, concatenate)


def _joined(
    parts: list[tuple[Rows, Any]], dim: int, concatenate: Callable[[list[Any], int], Any]
) -> Any:
    if len(parts) == 1:
        return parts[0][1]
    rows = [list(own) for _, own in groupby(parts, key=lambda part: part[0][dim])]
    if len(rows) == 1:
        return _joined(parts, dim + 1, concatenate)
    return concatenate([_joined(own, dim + 1, concatenate) for own in rows], dim)
