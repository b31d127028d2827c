"""Exact pruning of the stage search: from the step time of a known plan to what cannot improve it.

A step takes at least as long as one of its stages does for all micro-batches, and a stage at least
as long as its products at full speed. So given a plan, a stage that would take as long as the whole
step is part of no better plan. `min_s` is that lower bound: (first layer, end, devices) -> seconds
for all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from autopar.ir.stages import Submesh

MinTime = Callable[[int, int, int], float]


def too_slow_submeshes(
    submeshes: Sequence[Submesh], min_s: MinTime, num_layers: int, step_s: float
) -> list[Submesh]:
    """The submeshes on which no layer can be part of a better plan."""

    def lightest_s(submesh: Submesh) -> float:
        return min(min_s(k, k + 1, prod(submesh)) for k in range(num_layers))

    return [submesh for submesh in submeshes if lightest_s(submesh) >= step_s]


def min_times(flops: Sequence[float], seconds_of: Callable[[float], float]) -> MinTime:
    """The lower bound, from the flops of every layer for all micro-batches and the seconds that one
    device takes for them."""
    sums = np.concatenate(([0.0], np.cumsum(flops)))

    def min_s(first: int, end: int, num_devices: int) -> float:
        return seconds_of(float(sums[end] - sums[first]) / num_devices)

    return min_s
