"""Samples on the devices of this process: from a `PlannedSample` to a sample with its time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.ir.profile import Timing
from autopar.measure.profile import links, overheads, works
from autopar.measure.profile.hardware import others_on_gpu
from autopar.measure.profile.repeating import Bench
from autopar.measure.profile.samples import PlannedSample


class LocalMachine:
    """Takes samples on the devices of this process."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def launch(self) -> Timing:
        return overheads.measure_launch(self.bench)

    def dispatch(self) -> Timing:
        return overheads.measure_dispatch(self.bench)

    def memory(self) -> float | None:
        return overheads.measure_memory(self.bench)

    def disturbed_by(self) -> list[str]:
        return others_on_gpu() if self.bench.platform == "gpu" else []

    def take(self, planned: PlannedSample, num_samples: int | None = None) -> Any:
        """The sample with its time."""
        sample, bench = planned.sample, self.bench
        match planned.group:
            case "products":
                return replace(sample, time=bench.time_work(works.product(sample), num_samples))
            case "convolutions":
                return replace(sample, time=bench.time_work(works.convolution(sample), num_samples))
            case "streams":
                work = works.stream(sample)
                time = bench.time_work(work, num_samples)
                return replace(sample, num_bytes=float(work.num_bytes), time=time)
            case "attentions":
                forward, both = (
                    bench.time_work(works.attention(sample, backward=backward), num_samples)
                    for backward in (False, True)
                )
                alone_s = max(both.seconds - forward.seconds, 0.1 * both.seconds)
                spread = max(forward.spread, both.spread)
                backward = Timing(alone_s, spread, both.num_samples)
                return replace(sample, forward=forward, backward=backward)
            case "collectives":
                return links.time_collective(bench, sample, num_samples)
            case _:
                return links.time_crossing(bench, sample, num_samples)
