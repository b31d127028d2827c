"""The worker that measures a Ray cluster: an executor of `RayCluster`.

All workers time local work on their devices at the same time. Collectives run over all devices of
the mesh, so every process must run them equally often: the driver says how often.
"""

from __future__ import annotations

import time
from typing import Any

import jax

from autopar.ir.profile import CollectiveTime, Timing
from autopar.measure.profile.hardware import Hardware, hardware_of
from autopar.measure.profile.links import collective_program, whole_bytes
from autopar.measure.profile.local import LocalMachine
from autopar.measure.profile.repeating import PACES, Bench
from autopar.measure.profile.samples import PlannedSample
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.remote.progress import WorkerProgress


class MeasuringExecutor:
    def __init__(self, place: WorkerPlace, progress: WorkerProgress) -> None:
        del progress
        platform = "gpu" if place.platform == "gpu" else "cpu"
        self._paces = {quick: PACES[platform, quick] for quick in (False, True)}
        self._machine: Any = None

    def hardware(self) -> Hardware:
        """The hardware of the whole mesh."""
        return hardware_of(tuple(jax.devices()))

    def capability(self) -> str:
        return str(getattr(jax.devices()[0], "compute_capability", "0"))

    def begin(self, quick: bool) -> tuple[Timing, float]:
        """(launch of a kernel, seconds of a loop with a tie)."""
        bench = Bench(tuple(jax.local_devices()), self._paces[quick])
        self._machine = LocalMachine(bench)
        return self._machine.launch(), bench.tied_loop_s

    def dispatch(self) -> Timing:
        return self._machine.dispatch()

    def memory(self) -> float | None:
        return self._machine.memory()

    def take(self, planned: PlannedSample, num_samples: int | None) -> Any:
        return self._machine.take(planned, num_samples)

    def collective(
        self, sample: CollectiveTime, trips: int, num_calls: int
    ) -> tuple[float, list[float]]:
        """(actual bytes, seconds of each call)."""
        program, carry = collective_program(sample, tuple(jax.devices()), trips)
        num_bytes = whole_bytes(sample, carry, len(jax.devices()))
        compiled = program.lower(*carry).compile()
        state = jax.block_until_ready(compiled(*carry))
        seconds = []
        for _ in range(num_calls):
            started = time.perf_counter()
            state = jax.block_until_ready(compiled(*state))
            seconds.append(time.perf_counter() - started)
        return num_bytes, seconds
