"""Times between samples: monotone curves over bytes, and bounds over several sizes.

`Curve` goes through samples of (bytes, seconds). Where noise makes more bytes cheaper, neighbours
are pooled (isotonic regression). Between samples it is straight, below the first it is flat, and
beyond the last it goes on at the average rate.

`Bounds` is for work with several sizes, such as a product's m, n and k. A sample of p bounds the
time of q from both sides: q takes at most as long as doing p as often as it takes to cover q, and
at least as long as the share of p that q is:

    t_p · Π min(1, q_d / p_d)  ≤  t_q  ≤  t_p · Π max(1, q_d / p_d)

and no less than its work at the best rate of large samples. The estimate is the geometric mean of
the highest lower and the lowest upper bound. All bounds grow with every size, so more work is never
cheaper; samples that do not contradict each other are met exactly; large work tends to the best
rate, small work to the shortest time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import exp, log

import numpy as np

LARGE = 1000.0  # samples of at least this part of the most work tell the best rate


class Curve:
    def __init__(self, samples: Iterable[tuple[float, float]]) -> None:
        """Samples of one size are averaged (geometrically)."""
        own: dict[float, list[float]] = {}
        for num_bytes, seconds in samples:
            own.setdefault(float(num_bytes), []).append(log(seconds))
        if not own:
            raise ValueError("a curve needs at least one sample")
        self.sizes = sorted(own)
        means = [sum(own[size]) / len(own[size]) for size in self.sizes]
        self.seconds = [exp(mean) for mean in _isotonic(means)]
        last, took_s = self.sizes[-1], self.seconds[-1]
        beyond = took_s - self.seconds[0] if len(self.sizes) > 1 else took_s
        self.slope_s = (beyond if beyond > 0 else took_s) / last  # per byte

    @property
    def floor_s(self) -> float:
        """Of the least work: what the curve begins with."""
        return self.seconds[0]

    def __call__(self, num_bytes: float) -> float:
        if num_bytes <= self.sizes[0]:
            return self.seconds[0]
        after = bisect_right(self.sizes, num_bytes)
        if after == len(self.sizes):
            return self.seconds[-1] + (num_bytes - self.sizes[-1]) * self.slope_s
        low, high = self.sizes[after - 1], self.sizes[after]
        part = (num_bytes - low) / (high - low)
        return (1 - part) * self.seconds[after - 1] + part * self.seconds[after]


def _isotonic(values: Sequence[float]) -> list[float]:
    """The nearest (in squares) sequence that never falls: neighbours that fall are averaged."""
    pools: list[list[float]] = []  # mean, count
    for value in values:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, count = pools.pop()
            before = pools[-1]
            total = before[1] + count
            before[0] = (before[0] * before[1] + mean * count) / total
            before[1] = total
    return [mean for mean, count in pools for _ in range(int(count))]


class Bounds:
    def __init__(
        self, sizes: Sequence[Sequence[float]], seconds: Sequence[float], work: Sequence[float]
    ) -> None:
        """Per sample its sizes, seconds and work (flops); work must be a product of powers of
        sizes."""
        self.log_sizes = np.log(np.asarray(sizes, dtype=float))
        self.log_seconds = np.log(np.asarray(seconds, dtype=float))
        log_work = np.log(np.asarray(work, dtype=float))
        is_large = log_work >= log_work.max() - log(LARGE)
        self.log_rate = float((log_work - self.log_seconds)[is_large].max())
        self.log_floor = float(self.log_seconds.min())

    def __call__(self, sizes: Sequence[float], work: float) -> float:
        ratios = np.log(np.maximum(np.asarray(sizes, dtype=float), 1.0)) - self.log_sizes
        upper = (self.log_seconds + np.maximum(ratios, 0.0).sum(axis=1)).min()
        lower = (self.log_seconds + np.minimum(ratios, 0.0).sum(axis=1)).max()
        least = max(float(lower), log(max(work, 1.0)) - self.log_rate, self.log_floor)
        return exp((float(upper) + least) / 2)
