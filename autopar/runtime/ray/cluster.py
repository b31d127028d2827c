"""From a Ray cluster to hosts of equal devices, and meshes of workers on them.

    RayCluster ── NodeAgent, one per node (holds its devices)
        └ MeshGroup, one per mesh ── MeshWorker, one per host of the mesh

One placement group reserves everything. The session ends with `close()`, at exit, or when a worker
fails; afterwards the same process can start another one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import wait

from autopar.errors import ArgumentError, ClusterError, WorkerError
from autopar.ir.devices import preset_of, preset_or_share
from autopar.ir.mesh import ClusterSpec
from autopar.progress import LOGGER
from autopar.runtime.ray.environment import check_environment, shares_per_gpu
from autopar.runtime.ray.group import MeshGroup
from autopar.runtime.ray.monitor import Monitor, kill_workers
from autopar.runtime.ray.nodes import (
    check_counts,
    connect,
    draining_nodes,
    import_ray,
    lay_out_at_least,
    read_nodes,
)
from autopar.runtime.ray.reserving import release, reserve
from autopar.runtime.ray.session import Describe, Limits, NodeHandle, RaySession
from autopar.runtime.ray.starting import check_devices, start_workers

EXECUTOR = "autopar.runtime.remote.executor:Executor"
CLOSE_LIMIT_S = 5.0
SETTLED_LIMIT_S = 10.0  # from the first sign of a failure to its error, as docs/ray.md states


class RayCluster:
    """num_hosts, devices_per_host: None for all of the cluster.
    min_devices:     how few devices will do, if nodes are missing; None for all that is asked for.
    env:             environment variables of the workers; they override those of the driver. With
                     those of `SharedGpu.environment()`, workers are shares of GPUs.
    heartbeat_s:     how often workers are asked for a sign of life.
    silence_limit_s: a worker that is silent for this long is lost.
    hang_limit_s:    so is one whose step makes no progress for this long,
    command_limit_s: or whose other command (compiling, saving) takes this long.
    start_limit_s:   for nodes and workers to start.
    executor:        the class that runs commands in the workers, as 'module:class'.
    """

    def __init__(
        self,
        address: str | None = None,
        num_hosts: int | None = None,
        devices_per_host: int | None = None,
        *,
        env: Mapping[str, str] | None = None,
        heartbeat_s: float = 2.0,
        silence_limit_s: float = 30.0,
        hang_limit_s: float = 300.0,
        start_limit_s: float = 120.0,
        command_limit_s: float = 3600.0,
        executor: str = EXECUTOR,
        min_devices: int | None = None,
    ) -> None:
        limits = Limits(heartbeat_s, silence_limit_s, hang_limit_s, start_limit_s, command_limit_s)
        _check_limits(limits)
        wanted = check_environment(env)
        check_counts(num_hosts, devices_per_host)
        self._closed = False
        self._groups: list[MeshGroup] = []
        self._starting = threading.Lock()
        self._monitor: Monitor | None = None
        self._size = num_hosts, devices_per_host
        self._joined_ray = connect(address)
        self._session = RaySession(
            ray=import_ray(),
            id=secrets.token_hex(4),
            token=secrets.token_hex(16),
            platform="",
            devices_per_host=0,
            limits=limits,
            env=wanted,
            executor=executor,
            ranks_per_gpu=shares_per_gpu(os.environ, wanted),
        )
        atexit.register(self.close)
        try:
            reserve(self._session, num_hosts, devices_per_host, min_devices)
            self._monitor = Monitor(self._session)
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> ClusterSpec:
        session = self._session
        names = {name for node in session.nodes for name in node.gpu_names}
        preset = preset_of(session.platform, next(iter(names), ""))
        device = preset_or_share(preset, session.ranks_per_gpu)
        return ClusterSpec(len(session.hosts), session.devices_per_host, device)

    @property
    def platform(self) -> str:
        return self._session.platform

    @property
    def ends_idle_groups(self) -> bool:
        return self.platform == "gpu"

    @property
    def failure(self) -> WorkerError | None:
        return self._session.failure

    def possible_devices(self) -> int:
        """How many devices the nodes that are there now could have for this session; 0 if they
        cannot be read, or cannot be used together."""
        try:
            nodes = read_nodes()
            return lay_out_at_least(nodes, *self._size, self._session.ranks_per_gpu, 1).num_devices
        except ClusterError:
            return 0
        except Exception as error:  # Ray's own, of many kinds, when its head does not answer
            LOGGER.warning("Ray's nodes could not be read: %s", error)
            return 0

    def notice(self) -> str:
        """Which nodes of this session are about to be taken away, in words; empty if none."""
        try:
            leaving = draining_nodes()
        except Exception as error:  # as above
            LOGGER.warning("Ray's notices could not be read: %s", error)
            return ""
        nodes = [node for node in self._session.nodes if node.node_id in leaving]
        return ", ".join(_leaving(node, leaving[node.node_id] - time.time()) for node in nodes)

    @property
    def describe(self) -> Describe:
        """Describes what a worker was doing: its stage, and the instruction in words."""
        return self._session.describe

    @describe.setter
    def describe(self, describe: Describe) -> None:
        self._session.describe = describe

    def check(self) -> None:
        """Raise if the session has failed or is closed."""
        self._session.check()
        if self._closed:
            raise ClusterError("The Ray session was closed; call autopar.init again.")

    def wait_for_failure(self, limit_s: float | None = None) -> WorkerError | None:
        """Wait for the session's failure after a first sign of it, such as a broken connection.
        None if there is none within the limit; by default that for a node that falls silent."""
        if limit_s is None:
            limit_s = self._session.limits.silence_s + SETTLED_LIMIT_S
        until_s = time.monotonic() + limit_s
        while self.failure is None and not self._closed and time.monotonic() < until_s:
            time.sleep(0.05)
        return self.failure

    def groups(self, meshes: Sequence[Sequence[int]]) -> list[MeshGroup]:
        """A running group for each mesh, given by the numbers of its devices. Running groups are
        reused. A GPU belongs to one group at a time, so a group that shares GPUs with a new one is
        closed, and it is an error if arrays are still on it. Where processes share GPUs anyway,
        and on CPUs, groups may overlap, as far as a GPU can serve that many processes."""
        self.check()
        wanted = [tuple(devices) for devices in meshes]
        for devices in wanted:
            check_devices(self._session, devices)
        with self._starting:
            running = {group.devices: group for group in self._groups}
            missing = list(dict.fromkeys(d for d in wanted if d not in running))
            if self.platform == "gpu" and self._session.ranks_per_gpu == 1:
                self._make_room(wanted)
            known = [worker for group in self._groups for worker in group.workers]
            started = start_workers(self._session, missing, known) if missing else []
            for devices, workers in zip(missing, started, strict=True):
                assert self._monitor is not None
                group = MeshGroup(self._session, devices, workers, self._monitor)
                self._monitor.watch(group)
                self._groups.append(group)
                running[devices] = group
            for number, devices in enumerate(wanted):
                running[devices].mesh = number
            return [running[devices] for devices in wanted]

    def close_group(self, group: MeshGroup) -> None:
        """End the workers of one mesh."""
        self._end_groups([group])

    def close(self) -> None:
        """End everything that this session has started, within a limited time."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        session = self._session
        if session.ray.is_initialized():
            self._end_groups(list(self._groups))
            if self._monitor is not None:
                self._monitor.stop(ClusterError("The Ray session was closed."), CLOSE_LIMIT_S)
            release(self._session, CLOSE_LIMIT_S)
        if self._joined_ray:
            session.ray.shutdown()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_room(self, wanted: Sequence[tuple[int, ...]]) -> None:
        taken = {d for devices in wanted for d in devices}
        if len(taken) < sum(len(set(devices)) for devices in dict.fromkeys(wanted)):
            raise ClusterError(f"Meshes {list(wanted)} share GPUs. Give every mesh its own.")
        in_the_way = [g for g in self._groups if g.devices not in wanted and taken & {*g.devices}]
        for group in in_the_way:
            if group.in_use():
                raise ClusterError(
                    f"A new mesh needs the devices {sorted(taken & {*group.devices})}, but "
                    f"{group.num_arrays} arrays are on {group!r}. Drop them, or fetch them with "
                    "np.asarray first."
                )
        self._end_groups(in_the_way)

    def _end_groups(self, groups: Sequence[MeshGroup]) -> None:
        session = self._session
        reason = ClusterError("The mesh was closed before the worker answered.")
        with session.lock:
            for group in groups:
                group.closed = True
                if self._monitor is not None:
                    self._monitor.forget(group, reason)
            self._groups = [g for g in self._groups if g not in groups]
        workers = [worker for group in groups for worker in group.workers]
        if session.failure is None:
            calls = []
            for worker in workers:
                with contextlib.suppress(Exception):
                    calls.append(worker.actor.stop.remote(CLOSE_LIMIT_S).future())
            wait(calls, CLOSE_LIMIT_S)
        kill_workers(session, workers, CLOSE_LIMIT_S)


def _leaving(node: NodeHandle, left_s: float) -> str:
    """A node that is about to be taken away, in words. Without a deadline, `left_s` is negative."""
    return f"{node.described()} in {left_s:.0f} s" if left_s > 0 else node.described()


def _check_limits(limits: Limits) -> None:
    for name, given in vars(limits).items():
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not (number and given > 0):
            argument = name if name == "heartbeat_s" else name.replace("_s", "_limit_s")
            raise ArgumentError(f"init({argument}={given!r}): needs a number of seconds > 0.")
