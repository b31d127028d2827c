"""Results of a step on workers: which values come with the answer, and where the parts are."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.ir.remote import BoundBuffer, ShardedType
from autopar.runtime.remote.executable import _held_results, _is_watched


def result(
    shape: tuple[int, ...],
    position: int = 0,
    rows: tuple[int, int] | None = None,
    layout: tuple[int, ...] = (-1,),
) -> BoundBuffer:
    type_ = ShardedType(shape, np.dtype(np.float32), (2,), ("x",), layout, (0, 1))
    return BoundBuffer(position, 0, 0, type_, rows)


@pytest.mark.parametrize(
    ("shape", "is_state", "is_watched"),
    [
        ((), False, True),
        ((1024,), False, True),
        ((1025,), False, False),
        ((), True, True),
        ((1, 1), True, True),
        ((2,), True, False),
    ],
)
def test_small_results_and_single_numbers_of_the_state_are_watched(
    shape: tuple[int, ...], is_state: bool, is_watched: bool
) -> None:
    assert _is_watched(result(shape), is_state) is is_watched


def test_what_is_split_is_not_watched() -> None:
    assert not _is_watched(result((2,), layout=(0,)), False)
    assert not _is_watched(result((2,), rows=(0, 2)), False)


def test_parts_of_a_result_are_in_order_of_their_rows() -> None:
    late, early, other = result((2,), 1, (2, 4)), result((2,), 1, (0, 2)), result((3,))
    held = _held_results([[late, other], [early]], 2)
    assert [(mesh, place, rows) for mesh, place, _, rows in held[1]] == [
        (1, 0, (0, 2)),
        (0, 0, (2, 4)),
    ]
    assert [(mesh, place) for mesh, place, _, _ in held[0]] == [(0, 1)]
