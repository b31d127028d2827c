"""How long work takes on the devices: from a call that dispatches it to a `Timing`.

A sample is the average time of several calls, dispatched one after another; it ends when the last
result is ready. Samples are taken until their spread is small or the time is up. A machine that is
busy with other work shows a large spread, which every `Timing` carries.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from autopar.ir.profile import NOISY, Timing

MIN_SAMPLES = 5
LEAST_SAMPLE_S = 2e-3  # shorter samples would measure the clock


def time_calls(
    call: Callable[[], Any],
    *,
    limit_s: float = 2.0,
    min_samples: int = MIN_SAMPLES,
    max_samples: int = 50,
    warm_up: int = 1,
    spread: float = NOISY / 2,
    slowest: Callable[[float], float] = float,
) -> Timing:
    """`call` dispatches the work and returns arrays. Takes at least `min_samples`, then continues
    until the spread is small enough or `limit_s` is over.

    slowest: of several processes that time the same work together, the time of the slowest. Every
             decision here depends on such times alone, so all processes call equally often."""
    for _ in range(warm_up):
        jax.block_until_ready(call())
    once_s = slowest(_sample(call, 1))
    num_calls = max(1, round(LEAST_SAMPLE_S / max(once_s, 1e-9)))
    num_calls = min(num_calls, 1000)
    samples: list[float] = []
    while len(samples) < min_samples or (
        len(samples) < max_samples
        and spread_of(samples) > spread
        and num_calls * sum(samples) < limit_s
    ):
        samples.append(slowest(_sample(call, num_calls)))
    return Timing(statistics.median(samples), round(spread_of(samples), 4), len(samples))


def spread_of(samples: list[float]) -> float:
    """The larger distance of a quartile from the median, relative to the median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return max(high - middle, middle - low) / middle


def _sample(call: Callable[[], Any], num_calls: int) -> float:
    started = time.perf_counter()
    result = call()
    for _ in range(num_calls - 1):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / num_calls
