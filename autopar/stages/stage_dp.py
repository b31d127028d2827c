"""The dynamic programmes of the stage search: least Σ c of stages, none slower than a bound t.

From costs C of ranges of layers on submeshes to

    F(s, k, d; t) = min over e, m of  C(s, m, k, e) + F(s − 1, e, d − z_m; t)           `suffixes`

the least Σ c of s stages that hold layers k … L on d devices, where submesh m has z_m devices and
C(s, …) is the cost under the best variant that fits s stages before the end, if it is ≤ t; and to

    H(e, d; t) = min over k, m of  H(k, d − z_m; t) + C(m, k, e)                        `prefixes`

the same for the layers before e in any number of stages, with the fewest micro-batches in flight
that any position has: a lower bound, since memory is looked at no closer, which costs little.

Devices are counted in units of which every submesh has a whole number: where the smallest submesh
is a host, hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, inf

import numpy as np

from autopar.stages.ranges import Ranges

SAME = 1e-9  # times that differ by this ratio differ by rounding only

StageRange = tuple[int, int, int]  # first layer, end, number of the submesh


class StageDP:
    """in_flight: micro-batches in flight on a stage with s stages from it to the last, at place s;
    place 0 means nothing. `num_units` of `unit` devices each are what is shared out."""

    def __init__(self, ranges: Ranges, in_flight: Sequence[int], num_devices: int) -> None:
        self.ranges, self.in_flight = ranges, in_flight
        self.unit = gcd(num_devices, *ranges.sizes)
        self.num_units = num_devices // self.unit
        self.sizes = tuple(size // self.unit for size in ranges.sizes)
        self.fewest_in_flight = min(in_flight[1:])
        self._best_s: dict[int, np.ndarray] = {}

    def _costs(self, in_flight: int, bound_s: float) -> np.ndarray:
        """C[submesh, first, end] where it is within the bound."""
        if in_flight not in self._best_s:
            self._best_s[in_flight] = self.ranges.best_s(in_flight)
        costs = self._best_s[in_flight]
        return np.where(costs <= bound_s, costs, inf)

    def prefixes(self, bound_s: float) -> np.ndarray:
        """H[end, units]."""
        costs = self._costs(self.fewest_in_flight, bound_s)
        num_layers, total = self.ranges.num_layers, self.num_units
        least = np.full((num_layers + 1, total + 1), inf)
        least[0, 0] = 0.0
        for end in range(1, num_layers + 1):
            for m, size in enumerate(self.sizes):
                firsts = np.flatnonzero(costs[m, :end, end] < inf)
                if size > total or not len(firsts):
                    continue
                start = firsts[0]
                sums = least[start:end, : total + 1 - size] + costs[m, start:end, end, None]
                np.minimum(least[end, size:], sums.min(axis=0), out=least[end, size:])
        return least

    def suffixes(
        self, bound_s: float, limit_s: float = inf, prefixes: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """F[stages][first, units], for 0, 1, … stages. Where F and H together reach the limit it
        is left out, and so are numbers of stages with nothing left."""
        num_layers, total = self.ranges.num_layers, self.num_units
        least = np.full((num_layers + 1, total + 1), inf)
        least[num_layers, 0] = 0.0
        found = [least]
        for in_flight in self.in_flight[1:]:
            costs = self._costs(in_flight, bound_s)
            after, least = least, np.full((num_layers + 1, total + 1), inf)
            for end in np.flatnonzero((after < inf).any(axis=1)):
                used = np.flatnonzero(after[end] < inf)
                low, high = used[0], used[-1] + 1
                for m, size in enumerate(self.sizes):
                    firsts = np.flatnonzero(costs[m, :end, end] < inf)
                    stop = min(high, total + 1 - size)
                    if stop <= low or not len(firsts):
                        continue
                    start = firsts[0]
                    sums = costs[m, start:end, end, None] + after[end, None, low:stop]
                    into = least[start:end, low + size : stop + size]
                    np.minimum(into, sums, out=into)
            if prefixes is not None:
                least[least + prefixes[:, ::-1] >= limit_s * (1 + SAME)] = inf
            if not (least < inf).any():
                break
            found.append(least)
        return found

    def stages_of_prefixes(self, prefixes: np.ndarray, bound_s: float) -> list[StageRange]:
        """The stages of H of all layers on all devices."""
        costs = self._costs(self.fewest_in_flight, bound_s)
        stages: list[StageRange] = []
        end, left = self.ranges.num_layers, self.num_units
        while end:
            m, first = _argmin(
                costs[m, :end, end] + prefixes[:end, left - size] if size <= left else None
                for m, size in enumerate(self.sizes)
            )
            stages.insert(0, (first, end, m))
            end, left = first, left - self.sizes[m]
        return stages

    def stages_of_suffixes(
        self, suffixes: Sequence[np.ndarray], num_stages: int, bound_s: float
    ) -> list[StageRange]:
        """The stages of F of all layers in so many stages on all devices."""
        stages: list[StageRange] = []
        first, left = 0, self.num_units
        for stage in range(num_stages, 0, -1):
            costs = self._costs(self.in_flight[stage], bound_s)
            m, end = _argmin(
                costs[m, first] + suffixes[stage - 1][:, left - size] if size <= left else None
                for m, size in enumerate(self.sizes)
            )
            stages.append((first, end, m))
            first, left = end, left - self.sizes[m]
        return stages


def _argmin(rows: Iterable[np.ndarray | None]) -> tuple[int, int]:
    """(Number of the row, position in it) of the least entry."""
    least = [(row.min(), m, int(row.argmin())) for m, row in enumerate(rows) if row is not None]
    _, m, position = min(least)
    return m, position
