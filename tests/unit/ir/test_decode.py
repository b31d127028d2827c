"""JSON to dataclasses: round trips, and what is refused with the field that is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

import pytest

from autopar.ir.decode import decode


@dataclass(frozen=True)
class Inner:
    size: int
    ratio: float = 0.5


@dataclass(frozen=True)
class Outer:
    name: str
    inner: tuple[Inner, ...]
    pair: tuple[str, int]
    maybe: Inner | None = None
    counts: dict[str, int] | None = None
    on: bool = False


GOOD = Outer("a", (Inner(1), Inner(2, 3.0)), ("x", 4), Inner(5), {"k": 6}, True)


def body() -> dict[str, Any]:
    return json.loads(json.dumps(asdict(GOOD)))


def test_round_trip() -> None:
    assert decode(Outer, body()) == GOOD


def test_defaults_and_none() -> None:
    assert decode(Outer, {"name": "a", "inner": [], "pair": ["x", 1]}) == Outer("a", (), ("x", 1))
    assert decode(Inner | None, None) is None


def test_a_float_may_be_whole_or_infinite() -> None:
    assert decode(Inner, {"size": 1, "ratio": 2}) == Inner(1, 2.0)
    assert decode(Inner, {"size": 1, "ratio": None}).ratio == inf


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", 1, "name: 1 is not of type str"),
        ("inner", {}, "inner: {} is not of type list"),
        ("inner", [{"size": True}], "inner: size: True is not of type int"),
        ("inner", [{"size": 1, "ratio": "2"}], "inner: ratio: '2' is not a number"),
        ("inner", [{}], "inner: Inner without size"),
        ("inner", [{"size": 1, "colour": 2}], "inner: Inner has no colour"),
        ("pair", ["x"], "pair: 2 entries wanted, got 1"),
        ("counts", {"k": 1.5}, "counts: 1.5 is not of type int"),
    ],
)
def test_what_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Outer, {**body(), field: value})
