"""What a stage search need not look at, by what is known of one plan: exact, and worth it at scale.

A step takes at least as long as one of its stages does for all micro-batches, and a stage at least
as long as its products at full speed. So with a plan at hand, a stage that would take as long as
its whole step is part of no better one. `least_s` gives that time: (first layer, end, devices) ->
seconds for all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from autopar.ir.stages import LayerTable, Submesh
from autopar.stages.ranges import Ranges, Setting
from autopar.stages.stage_search import most_in_flight

LeastTime = Callable[[int, int, int], float]


def too_slow_submeshes(
    submeshes: Sequence[Submesh], least_s: LeastTime, num_layers: int, step_s: float
) -> list[Submesh]:
    """Those on which no layer at all can be part of a better plan."""

    def lightest_s(submesh: Submesh) -> float:
        return min(least_s(k, k + 1, prod(submesh)) for k in range(num_layers))

    return [submesh for submesh in submeshes if lightest_s(submesh) >= step_s]


def may_lack_memory(table: LayerTable, setting: Setting, least_s: LeastTime, step_s: float) -> bool:
    """Whether some stage that can be part of a better plan does not fit under this table, wherever
    it stands. If none, shardings that save memory are of no use there."""
    ranges = Ranges([table], setting)
    num_layers, size = ranges.num_layers, prod(table.submesh)
    for first in range(num_layers):
        for end in range(first + 1, num_layers + 1):
            if least_s(first, end, size) >= step_s:
                break
            # As many stages as there are layers may stand before it, or behind.
            in_flight = most_in_flight(setting, num_layers - (end - first) + 1)
            budget = setting.budget_bytes(table.submesh)
            if ranges.peak_bytes(0, first, end, in_flight) > budget:
                return True
    return False


def least_times(flops: Sequence[float], seconds_of: Callable[[float], float]) -> LeastTime:
    """From flops of every layer, of all micro-batches, and seconds that one device takes."""
    sums = np.concatenate(([0.0], np.cumsum(flops)))

    def least_s(first: int, end: int, num_devices: int) -> float:
        return seconds_of(float(sums[end] - sums[first]) / num_devices)

    return least_s
