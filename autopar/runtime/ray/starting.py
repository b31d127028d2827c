"""From the device numbers of meshes to their workers, started concurrently.

Each mesh is started by its own thread. It creates actors, compares their versions before anything
else, and lets the processes join each other at a port of the mesh's first host. If that port was
taken meanwhile, or a shared GPU still holds processes that have ended, it starts the mesh again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from autopar.errors import ClusterError
from autopar.runtime.ray.environment import (
    check_versions,
    versions_here,
    worker_environment,
)
from autopar.runtime.ray.faults import log_lines
from autopar.runtime.ray.session import Host, RaySession, Worker, remote_class
from autopar.runtime.ray.worker import CommandOutcome, Hello, Joined, MeshWorker
from autopar.runtime.remote.place import WorkerPlace

START_TRIES = 3
PAUSE_S = 2.0  # before the second try; then twice that
_LOG_LIMIT_S = 3.0
_PORT_IN_USE = ("address already in use", "failed to add port")
_PORT_TAKEN = (
    "a free port was taken before JAX could listen on it. Check what opens ports there, and try "
    "again."
)
_NO_GPU = "Unable to initialize backend 'cuda'"
_NO_SHARE = (
    "CUDA's MPS daemon takes no further process while one that died is cleared away, or when all "
    "processes together have too many connections (CUDA_DEVICE_MAX_CONNECTIONS; about 120 on an "
    "H200). Use fewer meshes at a time, or start the daemon anew."
)


@dataclass(frozen=True, eq=False)
class _Begun:
    """A process that runs but has not joined a mesh yet."""

    place: WorkerPlace
    host: Host
    actor: Any


class _Occupied(Exception):
    """Something that a new process needs is still held by others: another try may get it."""

    def __init__(self, what: str) -> None:
        self.what = what


class _Abandoned(Exception):
    """Another mesh could not start."""


def start_workers(
    session: RaySession, meshes: Sequence[tuple[int, ...]], running: Sequence[Worker] = ()
) -> list[tuple[Worker, ...]]:
    """Start the workers of each mesh, given by the numbers of its devices. All must match the
    running ones."""
    until_s = time.monotonic() + session.limits.start_s
    stop = threading.Event()
    with ThreadPoolExecutor(len(meshes), thread_name_prefix="autopar-start") as threads:
        starts = [
            threads.submit(_start_mesh, session, devices, until_s, stop) for devices in meshes
        ]
        try:
            wait(starts, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    errors = [error for start in starts if (error := start.exception()) is not None]
    try:
        if errors:
            raise next((e for e in errors if not isinstance(e, _Abandoned)), errors[0])
        workers = [start.result() for start in starts]
        everyone = [*running, *(worker for group in workers for worker in group)]
        check_versions(versions_here(), [(w.place.node, w.hello.versions) for w in everyone])
        _check_kinds(everyone)
        return workers
    except BaseException:
        for start in starts:
            if start.exception() is None:
                _kill(session, [worker.actor for worker in start.result()])
        raise


def check_devices(session: RaySession, devices: tuple[int, ...]) -> None:
    """Raise if these devices cannot form a mesh."""
    per_host, num_devices = session.devices_per_host, _num_devices(session)
    hosts = [host for host, _ in groupby(devices, lambda d: d // per_host)]
    wrong = [d for d in devices if not 0 <= d < num_devices]
    if wrong or not devices or len(set(devices)) < len(devices) or len(set(hosts)) < len(hosts):
        raise ClusterError(
            f"A mesh of the devices {list(devices)}: needs distinct numbers below {num_devices}, "
            f"those of one host ({per_host} each) next to each other."
        )


def _places_of(session: RaySession, devices: tuple[int, ...]) -> list[tuple[WorkerPlace, Host]]:
    """One process per host, in the order in which the devices name the hosts."""
    by_host = [
        (host, tuple(host_devices))
        for host, host_devices in groupby(devices, lambda d: d // session.devices_per_host)
    ]
    return [
        (
            WorkerPlace(
                worker=next(session.worker_numbers),
                rank=rank,
                num_processes=len(by_host),
                host=number,
                node=session.hosts[number].node.described(),
                devices=host_devices,
                mesh_devices=devices,
                platform=session.platform,
                address=session.hosts[number].node.address,
                token=session.token,
                folder=session.hosts[number].node.folder,
            ),
            session.hosts[number],
        )
        for rank, (number, host_devices) in enumerate(by_host)
    ]


def _num_devices(session: RaySession) -> int:
    return session.devices_per_host * len(session.hosts)


def _start_mesh(
    session: RaySession, devices: tuple[int, ...], until_s: float, stop: threading.Event
) -> tuple[Worker, ...]:
    last = _Occupied("")
    for number in range(START_TRIES):
        stop.wait(number * PAUSE_S)
        begun = [
            _Begun(place, host, _make_actor(session, place, host))
            for place, host in _places_of(session, devices)
        ]
        try:
            return _join(session, begun, until_s, stop)
        except _Occupied as occupied:
            _kill(session, [b.actor for b in begun])
            last = occupied
        except BaseException:
            _kill(session, [b.actor for b in begun])
            raise
    node = session.hosts[devices[0] // session.devices_per_host].node
    raise ClusterError(f"{START_TRIES} times on {node.described()}: {last.what}")


def _join(
    session: RaySession, begun: Sequence[_Begun], until_s: float, stop: threading.Event
) -> tuple[Worker, ...]:
    """Take the processes of a mesh through the two steps of their start, together."""
    hellos: dict[_Begun, Hello] = {}

    def gather(calls: Mapping[_Begun, Any], check: Callable[[_Begun, Any], Any]) -> dict:
        return _gather(session, calls, check, hellos, until_s, stop)

    hellos |= gather({b: b.actor.hello.remote() for b in begun}, lambda _, hello: hello)
    check_versions(versions_here(), [(b.place.node, hellos[b].versions) for b in begun])
    coordinator = None
    if len(begun) > 1:
        first = begun[0]
        port = gather({first: first.host.node.agent.free_port.remote()}, lambda _, port: port)
        address = first.host.node.address
        coordinator = f"[{address}]:{port[first]}" if ":" in address else f"{address}:{port[first]}"
    limit_s = max(1.0, until_s - time.monotonic())
    calls = {
        b: b.actor.start.remote(b.place, coordinator, session.executor, limit_s) for b in begun
    }
    joined = gather(calls, partial(_checked, session))
    return tuple(Worker(b.place, hellos[b], joined[b], b.actor, b.host.node) for b in begun)


def _make_actor(session: RaySession, place: WorkerPlace, host: Host) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    first = host.number * session.devices_per_host
    gpu_ids = [host.gpu_ids[d - first] for d in place.devices] if host.gpu_ids else []
    env = worker_environment(
        os.environ,
        session.env,
        session.platform,
        len(place.devices),
        gpu_ids,
        session.ranks_per_gpu,
    )
    actor = remote_class(session.ray, MeshWorker).options(
        num_cpus=0,
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": env},
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            session.placement_group, placement_group_bundle_index=host.node.bundle
        ),
    )
    visible = {n: v for n, v in env.items() if n == "CUDA_VISIBLE_DEVICES"}
    return actor.remote(visible)


def _gather(
    session: RaySession,
    calls: Mapping[_Begun, Any],
    check: Callable[[_Begun, Any], Any],
    hellos: Mapping[_Begun, Hello],
    until_s: float,
    stop: threading.Event,
) -> dict[_Begun, Any]:
    """The checked answers to Ray calls; the first bad one ends the wait."""
    futures: dict[Future[Any], _Begun] = {call.future(): b for b, call in calls.items()}
    left, answers = set(futures), {}
    while left:
        session.check()
        if stop.is_set():
            raise _Abandoned
        done, left = wait(left, timeout=0.2, return_when=FIRST_COMPLETED)
        for future in done:
            begun = futures[future]
            error = future.exception()
            if error is not None:
                raise _why_it_ended(begun, hellos.get(begun), error) from error
            answers[begun] = check(begun, future.result())
        if left and time.monotonic() > until_s:
            late = sorted({futures[future].place.node for future in left})
            raise ClusterError(
                f"Workers on {', '.join(late)} did not start within "
                f"{session.limits.start_s:.0f} s. See Ray's logs there "
                "(/tmp/ray/session_latest/logs), or raise init(start_limit_s=…)."
            )
    return answers


def _why_it_ended(begun: _Begun, hello: Hello | None, error: BaseException) -> Exception:
    """Why a process ended: its log may say more than Ray."""
    log = ""
    if hello is not None:
        process = {**hello.process(), "progress": ""}
        with contextlib.suppress(Exception):
            call = begun.host.node.agent.report.remote([process]).future()
            log = "\n".join(log_lines(call.result(_LOG_LIMIT_S)["processes"][0]["log"]))
    if _says_port_in_use(log):
        return _Occupied(_PORT_TAKEN)
    return ClusterError(
        f"A worker on {begun.place.node} could not start: {log or error}\nEvery node needs the "
        "same Python, Ray, JAX and autopar as the driver."
    )


def _says_port_in_use(text: str) -> bool:
    return any(sign in text.lower() for sign in _PORT_IN_USE)


def _checked(session: RaySession, begun: _Begun, outcome: CommandOutcome) -> Joined:
    place = begun.place
    if outcome.error is not None:
        raise outcome.error
    if _says_port_in_use(outcome.raised):
        raise _Occupied(_PORT_TAKEN)
    if session.ranks_per_gpu > 1 and _NO_GPU in outcome.raised:
        raise _Occupied(
            f"the worker with the devices {list(place.devices)} got no share of its GPU: "
            f"{outcome.raised}\n{_NO_SHARE}"
        )
    if outcome.raised:
        raise ClusterError(
            f"The worker on {place.node} with the devices {list(place.devices)} could not start: "
            f"{outcome.raised}\n{outcome.traceback}"
        )
    joined: Joined = outcome.value
    if joined.num_local_devices != len(place.devices):
        raise ClusterError(
            f"JAX has {joined.num_local_devices} devices ({joined.device_kind}) in the worker on "
            f"{place.node}, but {len(place.devices)} are needed. Check its driver and its jaxlib, "
            "and that no variable in init(env=…) hides devices."
        )
    if joined.num_mesh_devices != len(place.mesh_devices):
        raise ClusterError(
            f"The mesh of the devices {list(place.mesh_devices)} has {joined.num_mesh_devices} "
            f"devices in the worker on {place.node}: its processes did not find each other. Check "
            "that all ports between the cluster's hosts are open."
        )
    return joined


def _check_kinds(workers: Sequence[Worker]) -> None:
    for worker in workers[1:]:
        first = workers[0]
        if worker.joined.device_kind != first.joined.device_kind:
            raise ClusterError(
                "The devices of a cluster must be of one kind, but there are "
                f"{first.joined.device_kind!r} on {first.place.node} and "
                f"{worker.joined.device_kind!r} on {worker.place.node}. Use nodes of one kind."
            )


def _kill(session: RaySession, actors: Sequence[Any]) -> None:
    for actor in actors:
        with contextlib.suppress(Exception):
            session.ray.kill(actor)
