"""Trips of a while loop: from an `Equation` to a number, and how far it is known.

The number is what the user says by `expected_trips`, else what a counter in the loop's condition
allows at most, else one. XLA's programs do not depend on it; prices do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil, floor

import numpy as np

from autopar.ir.graph import LoopTrips
from autopar.ir.program import Constant, Equation, Operand

SCOPE = "expected_trips={}"  # of the name stack: it survives transformations
_EXPECTED = re.compile(r"expected_trips=(\d+)")
_MOST = 100_000  # a larger limit is there to be never reached
_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def expectations(scope: str) -> list[int]:
    """What a scope says of trips, the innermost last."""
    return [int(number) for number in _EXPECTED.findall(scope)]


def while_trips(loop: Equation, num_outside: int) -> LoopTrips:
    """`num_outside`: expectations in the scope of the while loop around this one, which are not
    meant for it."""
    expected = expectations(loop.scope)
    if len(expected) > num_outside:
        return LoopTrips(loop.source_line, expected[-1], "expected")
    bounds = [trips for trips in _bounds(loop) if trips <= _MOST]
    if not bounds:
        return LoopTrips(loop.source_line, 1, "unknown")
    (decision,) = loop.bodies[0].outputs
    is_exact = any(e.name in _FLIPPED and decision in e.results for e in loop.bodies[0].equations)
    return LoopTrips(loop.source_line, min(bounds), "known" if is_exact else "at most")


def _bounds(loop: Equation) -> Iterator[int]:
    """By the counters, all of which the condition wants to be on one side of a limit."""
    condition = loop.bodies[0]
    makers = {result: e for e in condition.equations for result in e.results}
    frontier = list(condition.outputs)
    while frontier:
        value = frontier.pop()
        maker = makers.get(value) if isinstance(value, int) else None
        if maker is None:
            continue
        if maker.name in ("and", "convert_element_type"):
            frontier += maker.operands
        elif maker.name in _FLIPPED:
            left, right = maker.operands
            for kind, count, limit in (
                (maker.name, left, right),
                (_FLIPPED[maker.name], right, left),
            ):
                trips = _counted(loop, kind, count, limit)
                if trips is not None:
                    yield trips


def _counted(loop: Equation, kind: str, count: Operand, limit: Operand) -> int | None:
    """Trips until a counter passes a limit that stays as it is."""
    counter, most = _counter(loop, count), _fixed(loop, limit)
    if counter is None or most is None:
        return None
    start, step = counter
    if step == 0 or (step > 0) != (kind in ("lt", "le")):
        return None
    distance = (most - start) / step
    return max(1, ceil(distance) if kind in ("lt", "gt") else floor(distance) + 1)


def _counter(loop: Equation, value: Operand) -> tuple[float, float] | None:
    """(first number, what each trip adds) of a value in the condition."""
    place = _carry(loop, value)
    if place is None:
        return None
    body, inits = loop.bodies[1], loop.operands[_num_consts(loop) :]
    out, carry = body.outputs[place], body.inputs[loop.params["body_nconsts"] + place]
    start = _number(inits[place])
    maker = next((e for e in body.equations if out in e.results), None)
    if start is None or maker is None or maker.name not in ("add", "sub"):
        return None
    left, right = maker.operands
    if maker.name == "add" and right == carry:
        left, right = right, left
    step = _number(right)
    if left != carry or step is None:
        return None
    return start, step if maker.name == "add" else -step


def _fixed(loop: Equation, value: Operand) -> float | None:
    """A number that no trip changes."""
    if not isinstance(value, int):
        return _number(value)
    condition, body = loop.bodies
    num_consts = loop.params["cond_nconsts"]
    if value in condition.inputs[:num_consts]:
        return _number(loop.operands[condition.inputs.index(value)])
    place = _carry(loop, value)
    if place is None or body.outputs[place] != body.inputs[loop.params["body_nconsts"] + place]:
        return None
    return _number(loop.operands[_num_consts(loop) + place])


def _carry(loop: Equation, value: Operand) -> int | None:
    carries = loop.bodies[0].inputs[loop.params["cond_nconsts"] :]
    return carries.index(value) if isinstance(value, int) and value in carries else None


def _num_consts(loop: Equation) -> int:
    return loop.params["cond_nconsts"] + loop.params["body_nconsts"]


def _number(operand: Operand) -> float | None:
    if not isinstance(operand, Constant):
        return None
    value = np.asarray(operand.value)
    is_number = value.ndim == 0 and value.dtype.kind in "iuf" and np.isfinite(value)
    return float(value) if is_number else None
