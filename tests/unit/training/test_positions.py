"""States of loaders as JSON: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from autopar.errors import ArgumentError, CheckpointError
from autopar.training.positions import Positioned, _decoded, _encoded

STATE = {
    "epoch": 3,
    0: [1.5, None, True, "ä"],
    "nested": {"tuple": (1, (2, b"\x00\xff")), "rng": np.arange(5, dtype=np.uint8)},
    "scalar": np.float32(2.5),
    "empty": {},
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    return type(one) is type(other) and one == other


def test_states_come_back_from_json() -> None:
    back = _decoded(json.loads(json.dumps(_encoded(STATE))))
    expected = {**STATE, "scalar": np.array(2.5, np.float32)}
    assert same(back, expected)


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, np.array([object()])])
def test_other_things_are_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match="cannot be saved in a checkpoint"):
        _encoded({"state": value})


@pytest.mark.parametrize(
    "text",
    [
        '{"pickle": "gASVAA=="}',
        '{"bytes": "!"}',
        '{"array": ["<f4", [3], ""]}',
        '{"array": ["O", [1], "AAAAAAAAAAA="]}',
        '{"dict": [[{"list": []}, 1]]}',
        '{"dict": 3}',
        "[]",
        '{"list": [], "tuple": []}',
    ],
)
def test_malformed_states_are_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="malformed"):
        _decoded(json.loads(text))


def test_batches_without_a_position() -> None:
    source = Positioned([1, 2, 3])
    assert list(source.begin()) == [1, 2, 3]
    assert not source.has_position and source.position() is None
    with pytest.raises(CheckpointError, match="these batches cannot take it"):
        source.begin({"dict": []})
