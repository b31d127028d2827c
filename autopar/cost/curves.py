"""Interpolation of samples: monotone curves over bytes (`Curve`), rates over sizes (`RateTable`).

`Curve` goes through samples of (bytes, seconds). If noise makes more bytes cheaper, neighbours are
pooled (isotonic regression). Between samples it is linear, below the first constant, and beyond the
last it grows at the average rate.

`RateTable` is for work with several sizes, such as a product's m, n and k. It has a grid of sizes,
each twice the one before. The rate (work per second) at a grid point is an average of the samples,
weighted by logarithmic distance; sizes outside the samples' range are clamped to it. Given a
roofline, the share of it that samples reach is averaged instead, which varies less. If samples
predict each other better that way (noise), distances are blurred, and the table no longer meets
samples exactly. Times follow from rates, at least the shortest measured one; a larger size that
would be cheaper on the grid costs the same. Between grid points times are interpolated in
logarithms, which is monotone: more work is never cheaper. Beyond the grid time grows with the work.

`Slowdown` is how much longer work of another kind takes than a `RateTable` says: the average of
samples, weighted by logarithmic distance.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from math import exp, log

import numpy as np

_MAX_BITS = 17  # of the largest size on a grid
_CHUNK = 2048
_BLURS = (0.0, 1.0, 4.0, 16.0)
_LEAST_BEYOND = 1e-3  # share of a sample that is shorter than its beginning should be
_MIN_IMPROVEMENT = 0.95  # more blur must reduce the prediction error to this share


class Curve:
    def __init__(self, samples: Iterable[tuple[float, float]]) -> None:
        """Samples of one size are averaged (geometrically)."""
        logs: dict[float, list[float]] = {}
        for num_bytes, seconds in samples:
            logs.setdefault(float(num_bytes), []).append(log(seconds))
        assert logs, "a curve needs at least one sample"
        self.sizes = sorted(logs)
        means = [sum(logs[size]) / len(logs[size]) for size in self.sizes]
        self.seconds = [exp(mean) for mean in _isotonic(means)]
        last, took_s = self.sizes[-1], self.seconds[-1]
        beyond = took_s - self.seconds[0] if len(self.sizes) > 1 else took_s
        self.slope_s = (beyond if beyond > 0 else took_s) / last  # per byte

    @property
    def floor_s(self) -> float:
        """The time of the least work, where the curve begins."""
        return self.seconds[0]

    @property
    def start_s(self) -> float:
        """The time of no work: where the line through the first two samples meets zero bytes."""
        if len(self.sizes) == 1:
            return 0.0
        (low, high), (first_s, second_s) = self.sizes[:2], self.seconds[:2]
        slope = (second_s - first_s) / (high - low)
        return min(max(0.0, first_s - low * slope), first_s)

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
    """The nearest non-decreasing sequence in least squares: pools adjacent violators. As
    `scipy.optimize.isotonic_regression`, whose import takes longer than planning a small step."""
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


def _apart(here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Squared distances from every point here to every point there."""
    squares = (here**2).sum(axis=1)[:, None] + (there**2).sum(axis=1)
    return np.maximum(squares - 2.0 * here @ there.T, 0.0)


def _weights(apart: np.ndarray, blur: float) -> np.ndarray:
    """Of samples, by their squared distances; the nearest decide."""
    blurred = apart + blur
    return 1.0 / (blurred * blurred * blurred + 1e-6)


def _blur(places: np.ndarray, rates: np.ndarray) -> float:
    """How much to add to squared distances (in powers of two) so that samples predict each other
    best: nothing if they agree, more if neighbours differ by noise."""
    apart = _apart(places, places)
    best, best_blur = np.inf, 0.0
    for blur in _BLURS:
        weights = _weights(apart, blur)
        weights[apart < 1e-9] = 0.0  # each is predicted by the others
        total = weights.sum(axis=1)
        known = total > 0
        if not known.any():
            return 0.0
        error = np.abs((weights @ rates)[known] / total[known] - rates[known]).mean()
        if error < min(_MIN_IMPROVEMENT * best, best - 0.01):
            best, best_blur = float(error), blur
    return best_blur


class RateTable:
    def __init__(
        self,
        samples: Sequence[tuple[Sequence[float], float]],
        powers: Sequence[float],
        steps: Sequence[int] | None = None,
        least: Callable[[np.ndarray], np.ndarray] | None = None,
        traits: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        """Samples are (sizes, seconds); work is the product of sizes to the `powers`. `steps`: the
        powers of two between neighbours of the grid in each size; one if None. `least`: from sizes,
        in the last dimension, to seconds. `traits`: from sizes to what makes them alike; the sizes
        themselves if None."""
        self.powers = np.asarray(powers, dtype=float)
        self.steps = np.asarray(steps or [1] * len(powers), dtype=float)
        places = np.log2(np.asarray([sizes for sizes, _ in samples], dtype=float))
        seconds = np.log2(np.asarray([took for _, took in samples], dtype=float))
        counts = [int(_MAX_BITS // step) + 1 for step in self.steps]
        axes = [step * np.arange(count) for step, count in zip(self.steps, counts, strict=True)]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
        inside = np.clip(grid, places.min(axis=0), places.max(axis=0)).reshape(-1, len(powers))
        rates = np.empty(len(inside))

        def work(at: np.ndarray) -> np.ndarray:
            return at @ self.powers if least is None else np.log2(least(2.0**at))

        def near(at: np.ndarray) -> np.ndarray:
            return at if traits is None else np.log2(traits(2.0**at))

        sample_rates = work(places) - seconds
        sampled = near(places)
        self.blur = _blur(sampled, sample_rates)
        for first in range(0, len(inside), _CHUNK):
            here = near(inside[first : first + _CHUNK])
            weights = _weights(_apart(here, sampled), self.blur)
            rates[first : first + _CHUNK] = weights @ sample_rates / weights.sum(axis=1)
        times = np.maximum(work(grid) - rates.reshape(counts), seconds.min())
        for axis in range(len(powers)):
            times = np.maximum.accumulate(times, axis=axis)
        self.times = times
        corners = np.indices((2,) * len(powers)).reshape(len(powers), -1).T
        self.corners = corners

    def __call__(self, *sizes: float) -> float:
        at = np.log2(np.maximum(np.asarray(sizes, dtype=float), 1.0)) / self.steps
        last = np.asarray(self.times.shape) - 1
        beyond = float((np.maximum(at - last, 0.0) * self.steps) @ self.powers)
        at = np.minimum(at, last)
        low = np.minimum(at.astype(int), last - 1)
        part = at - low
        shares = np.where(self.corners == 1, part, 1.0 - part).prod(axis=1)
        near = self.times[tuple((low + self.corners).T)]
        return float(2.0 ** (shares @ near + beyond))


class Slowdown:
    def __init__(
        self,
        samples: Sequence[tuple[Sequence[float], float]],
        table: Callable[..., float],
        begin_s: float = 0.0,
    ) -> None:
        """Samples are (sizes, seconds). `table`: sizes → seconds without the slowdown, which are
        more than `begin_s`, the part of them that is as long for all."""

        def beyond(seconds: float) -> float:
            return max(seconds - begin_s, _LEAST_BEYOND * seconds)

        self.places = np.log2(np.asarray([sizes for sizes, _ in samples], dtype=float))
        self.logs = np.asarray([log(beyond(took) / beyond(table(*at))) for at, took in samples])
        self.blur = _blur(self.places, self.logs)

    def __call__(self, *sizes: float) -> float:
        """At least 1."""
        here = np.log2(np.asarray([sizes], dtype=float))
        weights = _weights(_apart(here, self.places), self.blur)[0]
        return max(1.0, exp(float(weights @ self.logs / weights.sum())))
