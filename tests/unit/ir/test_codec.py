"""Dataclasses to JSON and back: round trips, and what is refused with the field that is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import Any

import pytest

from autopar.ir.codec import Stored, decode, encode


@dataclass(frozen=True)
class Inner:
    size: int
    ratio: float = 0.5


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Outer:
    name: str
    inner: tuple[Inner, ...]
    pair: tuple[str, int]
    maybe: Inner | None = None
    counts: dict[str, int] | None = None
    on: bool = False
    either: str | int | Inner = ""
    colour: Colour = Colour.RED
    within: Outer | None = field(default=None, metadata={"key": "inside"})
    date: complex | None = field(
        default=None,
        metadata={"omit_none": True, "stored": Stored(str, write=str, read=complex)},
    )
    cache: object = field(default=None, compare=False, metadata={"key": None})


GOOD = Outer("a", (Inner(1), Inner(2, 3.0)), ("x", 4), Inner(5), {"k": 6}, True)


def body() -> dict[str, Any]:
    return json.loads(json.dumps(encode(GOOD)))


def test_what_is_written() -> None:
    assert encode(GOOD) == {
        "name": "a",
        "inner": [{"size": 1, "ratio": 0.5}, {"size": 2, "ratio": 3.0}],
        "pair": ["x", 4],
        "maybe": {"size": 5, "ratio": 0.5},
        "counts": {"k": 6},
        "on": True,
        "either": "",
        "colour": "red",
        "inside": None,
    }


@pytest.mark.parametrize(
    "value",
    [
        GOOD,
        replace(GOOD, within=GOOD),
        *(replace(GOOD, either=either) for either in ("x", 3, Inner(3))),
        replace(GOOD, colour=Colour.BLUE, date=1 + 2j, counts=None, maybe=None),
        replace(GOOD, cache=object()),
        replace(GOOD, inner=(Inner(1, inf),)),
    ],
)
def test_round_trip(value: Outer) -> None:
    assert decode(Outer, json.loads(json.dumps(encode(value), allow_nan=False))) == value


def test_fields_that_are_missing_take_their_defaults() -> None:
    assert decode(Outer, {"name": "a", "inner": [], "pair": ["x", 1]}) == Outer("a", (), ("x", 1))


def test_a_float_may_be_whole_or_infinite() -> None:
    assert decode(Inner, {"size": 1, "ratio": 2}) == Inner(1, 2.0)
    assert decode(Inner, {"size": 1, "ratio": None}).ratio == inf


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", 1, "name: 1 is not of type str"),
        ("inner", {}, "inner: {} is not of type list"),
        ("inner", [{"size": True}], r"inner\[0\].size: True is not of type int"),
        ("inner", [{"size": 1, "ratio": "2"}], r"inner\[0\].ratio: '2' is not a number"),
        ("inner", [{"size": 1, "ratio": 10**400}], r"inner\[0\].ratio: 1000+ is not a number"),
        ("inner", [{"size": 1, "ratio": float("nan")}], r"inner\[0\].ratio: nan is not a number"),
        ("inner", [{"size": 1}, {}], r"inner\[1\]: Inner without size"),
        ("inner", [{"size": 1, "colour": 2}], r"inner\[0\]: Inner has no colour"),
        ("inside", {"name": 1, "inner": [], "pair": ["x", 1]}, "inside.name: 1 is not of type str"),
        ("colour", "green", "colour: 'green' is not a valid Colour"),
        ("either", 1.5, "either: 1.5 is not of type str"),
        ("cache", 1, "Outer has no cache"),
        ("pair", ["x"], "pair: 2 entries wanted, got 1"),
        ("counts", {"k": 1.5}, "counts: 1.5 is not of type int"),
    ],
)
def test_what_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Outer, {**body(), field: value})
