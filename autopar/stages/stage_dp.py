"""Dynamic programmes of the stage search: the minimum Σ c of stages, none slower than a bound t.

From costs C of ranges of layers on submeshes (`Ranges`) to

    F(s, k, d; t) = min over e, m of  C(s, m, k, e) + F(s − 1, e, d − z_m; t)           `suffixes`

the minimum Σ c of s stages with layers k … L on d devices, where submesh m has z_m devices and
C(s, …) is the cost under the best variant that fits s stages before the end, if it is ≤ t; and to

    H(e, d; t) = min over k, m of  H(k, d − z_m; t) + C(m, k, e)                        `prefixes`

the same for the layers before e in any number of stages, with the fewest micro-batches in flight of
any position. H is a cheap lower bound, since it considers memory no further.

Devices are counted in units that divide every submesh: hosts, if the smallest submesh is a host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, inf

import numpy as np

from autopar.stages.ranges import Ranges

SAME = 1e-9  # times that differ by less than this ratio are equal up to rounding

StageRange = tuple[int, int, int]  # first layer, end, number of the submesh


class StageDP:
    """in_flight: at index s, the micro-batches in flight on a stage with s stages from it to the
    last; index 0 is unused. The cluster has `num_units` units of `unit` devices."""

    def __init__(self, ranges: Ranges, in_flight: Sequence[int], num_devices: int) -> None:
        self.ranges, self.in_flight = ranges, in_flight
        self.unit = gcd(num_devices, *ranges.sizes)
        self.num_units = num_devices // self.unit
        self.sizes = tuple(size // self.unit for size in ranges.sizes)
        self.fewest_in_flight = min(in_flight[1:])
        self._best_s: dict[int, np.ndarray] = {}

    def _costs(self, in_flight: int, bound_s: float) -> np.ndarray:
        """C[submesh, first, end], infinite above the bound."""
        if in_flight not in self._best_s:
            self._best_s[in_flight] = self.ranges.best_s(in_flight)
        costs = self._best_s[in_flight]
        return np.where(costs <= bound_s, costs, inf)

    def prefixes(self, bound_s: float) -> np.ndarray:
        """H[end, units]."""
        costs = self._costs(self.fewest_in_flight, bound_s)
        num_layers, total = self.ranges.num_layers, self.num_units
        best = np.full((num_layers + 1, total + 1), inf)
        best[0, 0] = 0.0
        starts = _first_finite(costs)
        for end in range(1, num_layers + 1):
            for m, size in enumerate(self.sizes):
                start = starts[m][end]
                if size > total or start >= end:
                    continue
                sums = best[start:end, : total + 1 - size] + costs[m, start:end, end, None]
                np.minimum(best[end, size:], sums.min(axis=0), out=best[end, size:])
        return best

    def suffixes(
        self, bound_s: float, limit_s: float = inf, prefixes: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """F[stages][first, units], for 0, 1, … stages. Entries are infinite if F and H together
        reach the limit; numbers of stages with no finite entry are left out."""
        num_layers, total = self.ranges.num_layers, self.num_units
        best = np.full((num_layers + 1, total + 1), inf)
        best[num_layers, 0] = 0.0
        by_stages = [best]
        for in_flight in self.in_flight[1:]:
            costs = self._costs(in_flight, bound_s)
            starts = _first_finite(costs)
            after, best = best, np.full((num_layers + 1, total + 1), inf)
            for end in np.flatnonzero((after < inf).any(axis=1)).tolist():
                used = np.flatnonzero(after[end] < inf).tolist()
                low, high = used[0], used[-1] + 1
                for m, size in enumerate(self.sizes):
                    start, stop = starts[m][end], min(high, total + 1 - size)
                    if stop <= low or start >= end:
                        continue
                    sums = costs[m, start:end, end, None] + after[end, None, low:stop]
                    into = best[start:end, low + size : stop + size]
                    np.minimum(into, sums, out=into)
            if prefixes is not None:
                best[best + prefixes[:, ::-1] >= limit_s * (1 + SAME)] = inf
            if not (best < inf).any():
                break
            by_stages.append(best)
        return by_stages

    def stages_of_prefixes(self, prefixes: np.ndarray, bound_s: float) -> list[StageRange]:
        """The stages that attain H for all layers on all devices."""
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
        """The stages that attain F for all layers in `num_stages` stages on all devices."""
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


def _first_finite(costs: np.ndarray) -> list[list[int]]:
    """[submesh][end] -> the first layer of the longest range that has a finite cost; the number of
    layers if none has."""
    finite = costs < inf
    return np.where(finite.any(axis=1), finite.argmax(axis=1), costs.shape[1]).tolist()


def _argmin(rows: Iterable[np.ndarray | None]) -> tuple[int, int]:
    """(number of the row, position in it) of the smallest entry."""
    minima = [(row.min(), m, int(row.argmin())) for m, row in enumerate(rows) if row is not None]
    _, m, position = min(minima)
    return m, position
