"""Rows of stacks as boxes of their leading dimensions."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from autopar.ir.rows import boxes, join_rows, num_rows, rows_grid, rows_shape, split_rows, take_rows


@pytest.mark.parametrize("sizes", [(6,), (2, 3), (3, 2), (2, 2, 3), (1, 4), (4, 1, 2)])
def test_boxes_are_the_layers_in_order(sizes: tuple[int, ...]) -> None:
    layers = np.arange(np.prod(sizes)).reshape(sizes)
    for start, end in combinations(range(layers.size + 1), 2):
        found = [take_rows(layers, rows).ravel() for rows in boxes(start, end, sizes)]
        assert np.concatenate(found).tolist() == list(range(start, end))


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (2, 2, 2)])
def test_parts_are_put_together_again(sizes: tuple[int, ...]) -> None:
    stack = np.random.default_rng(0).normal(size=(*sizes, 5))
    size = int(np.prod(sizes))
    for cuts in combinations(range(1, size), 2):
        parts = [rows for ends in pairwise((0, *cuts, size)) for rows in boxes(*ends, sizes)]
        arrays = [take_rows(stack, rows) for rows in parts]
        for array, rows in zip(arrays, parts, strict=True):
            assert array.shape == rows_shape(stack.shape, rows)
        np.testing.assert_array_equal(join_rows(arrays, parts, np.concatenate), stack)
        counts = [num_rows(rows) for rows in parts]
        assert [num_rows(rows) for rows in split_rows(counts, stack.shape) or ()] == counts


def test_rows_that_a_split_says() -> None:
    assert split_rows((1, 3), (4, 5)) == (((0, 1),), ((1, 4),))
    assert split_rows((1, 1, 2), (2, 2, 5)) == (
        ((0, 1), (0, 1)),
        ((0, 1), (1, 2)),
        ((1, 2), (0, 2)),
    )
    assert split_rows((1, 2, 1), (2, 2, 5)) is None  # the second is no box
    assert split_rows((3, 4), (2, 2, 5)) is None


def test_parts_that_tile_a_stack() -> None:
    quarters = split_rows((2, 2, 2, 2), (2, 4))
    assert quarters is not None and rows_grid(quarters) == (2, 2)
    halves = split_rows((2, 2), (4, 3))
    assert halves is not None and rows_grid(halves) == (2,)
    uneven = split_rows((2, 1, 1, 2), (2, 3))
    assert uneven is not None and rows_grid(uneven) is None
