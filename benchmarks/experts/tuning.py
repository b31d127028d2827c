"""The best expert of each family, by a judge.

    chains of candidates, judge → {family: (Expert, verdict)}

The judge is the one that autopar's own plan is judged by; it may compile a candidate, or run it.
Of a chain, candidates are judged until one fits: those behind it do the same with more work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from .expert import Expert


class Judged(Protocol):
    """A verdict: does it fit in a device's memory, and how long does a step take?"""

    @property
    def fits(self) -> bool: ...
    @property
    def step_s(self) -> float: ...


Verdict = TypeVar("Verdict", bound=Judged)


def best_of_families(
    chains: Iterable[Sequence[Expert]], judge: Callable[[Expert], Verdict]
) -> dict[str, tuple[Expert, Verdict]]:
    """The fastest that fits of each family; where none does, the last that was tried, which needs
    the least memory. A candidate is judged once, though two chains may hold it."""
    known: dict[str, Verdict] = {}
    best: dict[str, tuple[Expert, Verdict]] = {}
    for chain in chains:
        for expert in chain:
            if expert.name not in known:
                known[expert.name] = judge(expert)
            verdict = known[expert.name]
            held = best.get(expert.family)
            if held is None or _rank(verdict) <= _rank(held[1]):
                best[expert.family] = (expert, verdict)
            if verdict.fits:
                break
    return best


def _rank(verdict: Judged) -> tuple[bool, float]:
    return not verdict.fits, verdict.step_s if verdict.fits else 0.0
