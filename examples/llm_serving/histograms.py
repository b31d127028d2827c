"""Histograms of latencies, in Prometheus's text format."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)


class Histogram:
    """Counts values up to each of the bounds; any thread may add some."""

    def __init__(self, bounds: Sequence[float] = BOUNDS_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, value: float, count: int = 1) -> None:
        """So many equal values."""
        with self._lock:
            self._counts[bisect.bisect_left(self._bounds, value)] += count
            self._sum += count * value

    def lines(self, name: str) -> list[str]:
        """Cumulative counts, their sum and number."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        lines, so_far = [f"# TYPE {name} histogram"], 0
        for bound, count in zip((*self._bounds, None), counts, strict=True):
            so_far += count
            le = "+Inf" if bound is None else f"{bound:g}"
            lines.append(f'{name}_bucket{{le="{le}"}} {so_far}')
        return [*lines, f"{name}_sum {total:.17g}", f"{name}_count {so_far}"]
