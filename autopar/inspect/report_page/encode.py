"""Small ways to write figures for a page: texts once, numbers with four digits, runs of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import isfinite


class Texts:
    """Texts by number, each kept once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> list[str]:
        return list(self._numbers)


def short(value: float, digits: int = 4) -> float | None:
    """A number with few digits, whole where it can be; none for what JSON cannot say."""
    if not isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def shorts(values: Iterable[float], digits: int = 4) -> list[float | None]:
    return [short(value, digits) for value in values]


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers, in order, as half-open ranges of neighbours."""
    found = []
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in group]
        found.append([members[0], members[-1] + 1])
    return found


def run_text(numbers: Sequence[int]) -> str:
    """0–3, 8"""
    spans = ((first, end - 1) for first, end in runs(numbers))
    return ", ".join(f"{a}–{b}" if b > a else str(a) for a, b in spans)
