"""Steps timed in turns: from functions that run one step to samples of each.

    Runner (one step), rounds → samples; `sample_in_turns` runs every Runner once per round

A round visits all steps in random order, so that load on the machine disturbs all of them alike.
Processes that run the same steps together agree on everything that decides how often a step runs:
they share the order's seed, and `slowest` gives all of them one time.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from autopar.runtime.timing import spread_of

LEAST_SAMPLE_S = 0.1


class Runner:
    """One step, ready to run repeatedly. `advance` dispatches it and returns arrays to wait for.

    begin:           called before a sample, outside of its time.
    waits_each_step: virtual devices of one process must not run ahead, since their collectives
                     share the host's threads.
    slowest:         of several processes that run the step together, the time of the slowest.
    """

    def __init__(
        self,
        advance: Callable[[], Any],
        *,
        least_sample_s: float = LEAST_SAMPLE_S,
        begin: Callable[[], None] = lambda: None,
        waits_each_step: bool = False,
        slowest: Callable[[float], float] = float,
        max_steps: int = 1000,
    ) -> None:
        self._advance, self._begin, self._waits_each_step = advance, begin, waits_each_step
        self.samples: list[float] = []
        self.processor_samples: list[float] = []
        begin()
        self.run(1)
        once_s = max(slowest(self.run(1)), 1e-6)
        self.num_steps = min(max(1, round(least_sample_s / once_s)), max_steps)

    def run(self, num_steps: int) -> float:
        """Seconds of a step."""
        started = time.perf_counter()
        arrays: Any = None
        for _ in range(num_steps):
            arrays = self._advance()
            if self._waits_each_step:
                jax.block_until_ready(arrays)
        jax.block_until_ready(arrays)
        return (time.perf_counter() - started) / num_steps

    def sample(self) -> None:
        self._begin()
        started = time.process_time()
        self.samples.append(self.run(self.num_steps))
        self.processor_samples.append((time.process_time() - started) / self.num_steps)

    @property
    def step_s(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        return spread_of(self.samples)


def sample_in_turns(runners: Sequence[Runner], order: random.Random) -> None:
    """One round."""
    for runner in order.sample(list(runners), len(runners)):
        runner.sample()
