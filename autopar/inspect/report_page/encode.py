"""Compact JSON values for a page: shared texts, rounded numbers, ranges of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import isfinite


class Texts:
    """A table of texts, each stored once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


def short(value: float, digits: int = 4) -> float | None:
    """A number rounded to a few digits, an int if possible; None if it is not finite."""
    if not isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def shorts(values: Iterable[float], digits: int = 4) -> list[float | None]:
    return [short(value, digits) for value in values]


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Sorted numbers as half-open ranges."""
    ranges = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        ranges.append([members[0], members[-1] + 1])
    return ranges


def run_text(numbers: Sequence[int]) -> str:
    """0–3, 8"""
    spans = ((first, end - 1) for first, end in runs(numbers))
    return ", ".join(f"{a}–{b}" if b > a else str(a) for a, b in spans)
