"""The best expert of each family, by a judge.

    chains of candidates, judge → {family: (Expert, verdict)}

The same judge judges autopar's plan; it may compile a candidate, or run it. A chain is judged until
a candidate fits: those after it do the same with more work.
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
    """The fastest candidate that fits, for each family; if none fits, the last one tried, which
    needs the least memory. A candidate in two chains is judged once."""
    known: dict[str, Verdict] = {}
    best: dict[str, tuple[Expert, Verdict]] = {}
    for chain in chains:
        for expert in chain:
            if expert.name not in known:
                known[expert.name] = judge(expert)
            verdict = known[expert.name]
            leader = best.get(expert.family)
            if leader is None or _rank(verdict) <= _rank(leader[1]):
                best[expert.family] = (expert, verdict)
            if verdict.fits:
                break
    return best


def _rank(verdict: Judged) -> tuple[bool, float]:
    return not verdict.fits, verdict.step_s if verdict.fits else 0.0
