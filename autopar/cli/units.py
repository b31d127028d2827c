"""Quantities with units: from text such as "32 GB" or "25 Gb/s" to numbers in B, B/s, FLOP/s, s.

Case tells bits from bytes, as vendors write them: 25 Gb/s are 3.125 GB/s. A number without a unit
is ambiguous, and an error.
"""

from __future__ import annotations

import re
from typing import Any

from autopar.errors import ArgumentError, shortened

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}

_BYTES = {prefix + "B": scale for prefix, scale in {**_PREFIX, **_BINARY}.items()}
_BITS = {
    prefix + unit: scale / 8
    for prefix, scale in _PREFIX.items()
    for unit in ("b", "bit")
    if prefix + unit != "b"
}
_PER_SECOND = {unit + "/s": scale for unit, scale in {**_BYTES, **_BITS}.items()}
_PER_SECOND |= {prefix + "bps": scale / 8 for prefix, scale in _PREFIX.items() if prefix}
_FLOPS = {prefix + unit: scale for prefix, scale in _PREFIX.items() for unit in ("FLOP/s", "FLOPS")}

# Kind -> its units with their values, and examples for errors.
_KINDS: dict[str, tuple[dict[str, float], str]] = {
    "memory": (_BYTES, "bytes, such as '32 GB' or '80 GiB'"),
    "bandwidth": (_PER_SECOND, "bytes or bits per second, such as '150 GB/s' or '25 Gb/s'"),
    "speed": (_FLOPS, "operations per second, such as '312 TFLOP/s'"),
    "time": (_TIMES, "a time, such as '5 us' or '0.2 ms'"),
}
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9].*?)?\s*")


def parse_quantity(given: Any, kind: str, where: str) -> float:
    """`kind` is "memory", "bandwidth", "speed" or "time"; `where` names the flag or the field."""
    units, accepted = _KINDS[kind]
    match = _TEXT.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        unit = isinstance(given, (int, float)) and not isinstance(given, bool)
        reason = "a number without a unit" if unit else "not a number with a unit"
        raise ArgumentError(f"{where} = {shortened(given)}: {reason}. Give {accepted}, as text.")
    number, unit = float(match[1]), match[2]
    if unit is None:
        raise ArgumentError(f"{where} = {given!r}: a number without a unit. Give {accepted}.")
    if unit not in units:
        raise ArgumentError(
            f"{where} = {given!r}: {unit!r} is not a unit of {kind}{_what_it_is(unit)}. "
            f"Give {accepted}."
        )
    if not 0 < number * units[unit] < float("inf"):
        raise ArgumentError(f"{where} = {given!r}: must be positive. Give {accepted}.")
    return number * units[unit]


def _what_it_is(unit: str) -> str:
    for kind, (units, _) in _KINDS.items():
        if unit in units:
            return f" but of {kind}"
    for units, _ in _KINDS.values():
        similar = [known for known in units if known.lower() == unit.lower()]
        if similar:
            confused = any(known.count("b") != unit.count("b") for known in similar)
            bits = "; b is a bit and B a byte" if confused else ""
            return f" (did you mean {' or '.join(map(repr, similar[:2]))}?{bits})"
    return ""
