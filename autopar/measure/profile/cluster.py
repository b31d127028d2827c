"""Profiles of Ray clusters: from a cluster to a `MachineProfile`, by workers on all its devices.

`worker.MeasuringExecutor` times work and collectives on one mesh of all devices. Transfers between
meshes are timed by pipelines of two stages, as `autopar.parallelize` runs them: the slope of the
step time over the number of micro-batches is the time of one transfer, without the driver's calls.
The meshes are the two halves of the hosts, or of one host's devices.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from autopar import _jax, session
from autopar.compiler import plan_step
from autopar.errors import ProfileError
from autopar.executables import make_remote_executable
from autopar.ir.profile import CollectiveTime, CrossingSample, MachineProfile, Timing
from autopar.measure.profile.hardware import Hardware, abilities
from autopar.measure.profile.profile_machine import ProfileRun, Report, checked_limit, checked_parts
from autopar.measure.profile.repeating import PACES
from autopar.measure.profile.samples import PlannedSample, planned_samples
from autopar.measure.profile.text import times_of
from autopar.methods import ManualLayers, ManualStages, PipeshardParallel, ShardingOptions
from autopar.runtime.timing import spread_of, time_calls
from autopar.tracer.trace import StepOptions

_EXECUTOR = "autopar.measure.profile.worker:MeasuringExecutor"
_LIMIT_S = 600.0
_MICRO_BATCHES = (4, 20)


def profile_cluster(
    output: str | Path | None = None,
    *,
    address: str | None = None,
    num_hosts: int | None = None,
    devices_per_host: int | None = None,
    quick: bool = False,
    only: Sequence[str] | None = None,
    time_limit_s: float | None = None,
    restart: bool = False,
    report: Report | None = None,
) -> MachineProfile:
    """Measure a Ray cluster, which is found and allocated as by `autopar.init(cluster="ray", …)`.
    Other arguments are as for `profile_machine`. Ends the current session."""
    parts, limit_s = checked_parts(only), checked_limit(time_limit_s)
    session.shutdown()
    machine = RayMachine(address, num_hosts, devices_per_host, quick)
    try:
        hardware, capability = machine.look()
        able = abilities(hardware, capability)
        half = hardware.num_devices // 2
        planned = [
            entry
            for entry in planned_samples(able, quick)
            if entry.group != "crossings" or entry.sample.num_pairs == half
        ]
        planned.sort(key=lambda entry: entry.group == "crossings")
        return ProfileRun(
            hardware,
            machine,
            planned,
            output=None if output is None else Path(output),
            only=parts,
            time_limit_s=limit_s,
            restart=restart,
            report=report or (lambda line: None),
        ).finish()
    finally:
        machine.close()


class RayMachine:
    """How samples are taken on a cluster; as `LocalMachine`."""

    def __init__(
        self, address: str | None, num_hosts: int | None, devices_per_host: int | None, quick: bool
    ) -> None:
        self._where = (address, num_hosts, devices_per_host)
        self._quick = quick
        self._cluster: Any = None
        self._group: Any = None
        self._hardware: Hardware | None = None
        self._is_in_session = False
        self._tied_loop_s = 0.0

    def look(self) -> tuple[Hardware, str]:
        """(hardware, compute capability of GPUs)."""
        per_worker = self._all("hardware")
        kinds = {hardware.device_kind for hardware in per_worker}
        if len(kinds) > 1:
            raise ProfileError(
                f"profile_cluster: the devices differ: {', '.join(sorted(kinds))}. Choose hosts of "
                "one kind with num_hosts, or other Ray nodes."
            )
        self._hardware = per_worker[0]
        return per_worker[0], self._all("capability")[0]

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        if self._is_in_session:
            session.shutdown()
            self._is_in_session = False

    def launch(self) -> Timing:
        begun = self._all("begin", self._quick)
        self._tied_loop_s = max(tied_loop_s for _, tied_loop_s in begun)
        return max((launch for launch, _ in begun), key=lambda timing: timing.seconds)

    def dispatch(self) -> Timing:
        return max(self._all("dispatch"), key=lambda timing: timing.seconds)

    def memory(self) -> float | None:
        """The minimum over workers; hosts on one node share its memory."""
        per_worker = self._all("memory")
        nodes = [worker.place.node for worker in self._group.workers]
        on_cpu = self._platform == "cpu"
        shares = [
            num_bytes / (nodes.count(node) if on_cpu else 1)
            for num_bytes, node in zip(per_worker, nodes, strict=True)
            if num_bytes is not None
        ]
        return min(shares, default=None)

    def disturbed_by(self) -> list[str]:
        return []

    def take(self, planned: PlannedSample, num_samples: int | None = None) -> Any:
        if planned.group == "crossings":
            return self._crossing(planned.sample)
        if planned.group == "collectives":
            return self._collective(planned.sample, num_samples)
        taken = self._all("take", planned, num_samples)
        return max(taken, key=lambda sample: times_of(sample)[0].seconds)

    @property
    def _platform(self) -> str:
        assert self._hardware is not None
        return "gpu" if self._hardware.platform == "gpu" else "cpu"

    def _all(self, command: str, *arguments: Any) -> list[Any]:
        """The answers of all workers."""
        if self._cluster is None:
            self._open()
        replies = self._group.submit(command, [arguments] * len(self._group.workers))
        return [reply.result(_LIMIT_S) for reply in replies]

    def _open(self) -> None:
        from autopar.runtime.ray.cluster import RayCluster  # imports Ray

        self.close()
        self._cluster = RayCluster(*self._where, executor=_EXECUTOR)
        spec = self._cluster.spec
        everything = tuple(range(spec.num_hosts * spec.devices_per_host))
        (self._group,) = self._cluster.groups([everything])
        if self._hardware is not None:  # reopened after transfers
            self.launch()

    def _collective(self, sample: CollectiveTime, num_samples: int | None) -> CollectiveTime:
        pace = PACES[self._platform, self._quick]
        _, calls = self._rounds(sample, 2, 2)
        trips = max(1, min(500, round(pace.program_s / (min(calls) / 2))))
        num_bytes, calls = self._rounds(sample, trips, num_samples or pace.num_samples)
        each_s = [seconds / trips for seconds in calls]
        middle_s = statistics.median(each_s)
        seconds = max(middle_s - self._tied_loop_s, 0.1 * middle_s)
        timing = Timing(seconds, round(spread_of(each_s), 4), len(each_s))
        return replace(sample, num_bytes=num_bytes, time=timing)

    def _rounds(self, sample: CollectiveTime, trips: int, calls: int) -> tuple[float, list[float]]:
        """The bytes, and the seconds of each call on the slowest worker."""
        per_worker = self._all("collective", sample, trips, calls)
        slowest = [max(call) for call in zip(*(seconds for _, seconds in per_worker), strict=True)]
        return per_worker[0][0], slowest

    def _crossing(self, sample: CrossingSample) -> CrossingSample:
        if not self._is_in_session:
            self.close()
            address, num_hosts, devices_per_host = self._where
            session.init(
                "ray", address=address, num_hosts=num_hosts, devices_per_host=devices_per_host
            )
            self._is_in_session = True
        hardware = self._hardware
        assert hardware is not None
        few, many = (
            time_pipeline(hardware, sample.num_bytes, count, self._quick)
            for count in _MICRO_BATCHES
        )
        slope_s = (many.seconds - few.seconds) / (_MICRO_BATCHES[1] - _MICRO_BATCHES[0])
        seconds = max(slope_s, 0.01 * many.seconds / _MICRO_BATCHES[1])
        spread = max(few.spread, many.spread)
        return replace(sample, time=Timing(seconds, spread, many.num_samples))


def time_pipeline(hardware: Hardware, num_bytes: float, num_micro: int, quick: bool) -> Timing:
    step, method, batch = crossing_step(hardware, num_bytes, num_micro)
    remote = session.current().remote
    assert remote is not None
    planned = plan_step(
        step,
        (batch,),
        {},
        cluster=session.current().cluster(),
        method=method,
        options=StepOptions(batch_argnums=(0,)),
    )
    run = make_remote_executable(planned, remote)

    def call() -> Any:
        return np.asarray(run([batch])[0])

    return time_calls(call, limit_s=0.5 if quick else 2.0, min_samples=5, max_samples=30)


def crossing_step(
    hardware: Hardware, num_bytes: float, num_micro: int
) -> tuple[Any, PipeshardParallel, np.ndarray]:
    """(step, method, batch): each micro-batch sends `num_bytes` from every device of one mesh to
    one of the other."""
    pairs = hardware.num_devices // 2
    features = max(1, round(num_bytes / 4))
    hosts, per_host = hardware.num_hosts, hardware.devices_per_host
    submesh = (hosts // 2, per_host) if hosts > 1 else (1, per_host // 2)
    name = "crossing"

    def step(batch: jax.Array) -> jax.Array:
        sent = _jax.named(batch * jnp.arange(1, features + 1, dtype=jnp.float32), name)
        _jax.mark_boundary()
        return jnp.max(sent, axis=1)

    method = PipeshardParallel(
        num_micro,
        ManualLayers(),
        ManualStages([[0], [1]], [submesh] * 2, [(pairs,)] * 2),
        schedule="inference",
        options=ShardingOptions(pins={name: PartitionSpec("x")}, remat="none"),
    )
    return step, method, np.ones((num_micro * pairs, 1), np.float32)
