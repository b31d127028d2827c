"""Device numbers of meshes → their workers, started side by side.

Actors are made for all meshes at once; their versions are compared before anything else happens;
then every mesh's processes find each other at a port of the mesh's first host. A mesh that fails to
do so because the port was taken meanwhile is started again with another port.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from autopar.errors import ClusterError
from autopar.runtime.ray.environment import check_versions, versions_here, worker_environment
from autopar.runtime.ray.session import Host, Session, Worker
from autopar.runtime.ray.worker import Hello, Joined, MeshWorker, Outcome
from autopar.runtime.remote.place import WorkerPlace

PORT_TRIES = 3
_PORT_IN_USE = ("address already in use", "address in use", "failed to add port", "failed to bind")


@dataclass(frozen=True, eq=False)
class _Begun:
    """A process that exists, and is in no mesh yet."""

    place: WorkerPlace
    host: Host
    actor: Any


class _PortInUse(Exception):
    pass


def start_workers(session: Session, meshes: Sequence[tuple[int, ...]]) -> list[tuple[Worker, ...]]:
    """The workers of each mesh, given by the numbers of its devices."""
    until_s = time.monotonic() + session.limits.start_s
    workers: dict[tuple[int, ...], tuple[Worker, ...]] = {}
    for _ in range(PORT_TRIES):
        missing = [devices for devices in meshes if devices not in workers]
        workers |= _try_start(session, missing, until_s)
        if len(workers) == len(set(meshes)):
            return [workers[devices] for devices in meshes]
    _kill([w.actor for group in workers.values() for w in group], session)
    raise ClusterError(
        f"{PORT_TRIES} ports that were free on the first host of a mesh were taken before JAX "
        "could listen on them. See what opens ports there, and try again."
    )


def check_devices(session: Session, devices: tuple[int, ...]) -> None:
    """Whether these devices can form a mesh."""
    per_host, num_devices = session.devices_per_host, _num_devices(session)
    hosts = [host for host, _ in groupby(devices, lambda d: d // per_host)]
    wrong = [d for d in devices if not 0 <= d < num_devices]
    if wrong or not devices or len(set(devices)) < len(devices) or len(set(hosts)) < len(hosts):
        raise ClusterError(
            f"A mesh of the devices {list(devices)}: needs different numbers below {num_devices}, "
            f"those of one host ({per_host} each) side by side."
        )


def _places_of(session: Session, devices: tuple[int, ...]) -> list[tuple[WorkerPlace, Host]]:
    """One process per host, in the order in which the devices name the hosts."""
    by_host = [
        (host, tuple(own))
        for host, own in groupby(devices, lambda d: d // session.devices_per_host)
    ]
    return [
        (
            WorkerPlace(
                worker=next(session.worker_numbers),
                rank=rank,
                num_processes=len(by_host),
                host=number,
                node=session.hosts[number].node.described(),
                devices=own,
                mesh_devices=devices,
                platform=session.platform,
                address=session.hosts[number].node.address,
                token=session.token,
                folder=session.hosts[number].node.folder,
            ),
            session.hosts[number],
        )
        for rank, (number, own) in enumerate(by_host)
    ]


def _num_devices(session: Session) -> int:
    return session.devices_per_host * len(session.hosts)


def _try_start(
    session: Session, meshes: Sequence[tuple[int, ...]], until_s: float
) -> dict[tuple[int, ...], tuple[Worker, ...]]:
    """The workers of those meshes whose ports were free."""
    begun: list[_Begun] = []
    try:
        for devices in meshes:
            for place, host in _places_of(session, devices):
                begun.append(_Begun(place, host, _make_actor(session, place, host)))
        hellos = _gather(session, {b: b.actor.hello.remote() for b in begun}, until_s)
        check_versions(versions_here(), [(b.place.node, hellos[b].versions) for b in begun])
        started = {}
        waiting = {}
        for devices in meshes:
            group = [b for b in begun if b.place.mesh_devices == devices]
            coordinator = _coordinator(session, group, until_s)
            for b in group:
                limit_s = max(1.0, until_s - time.monotonic())
                waiting[b] = b.actor.start.remote(b.place, coordinator, session.executor, limit_s)
        joined = _join(session, waiting, until_s)
        for devices in meshes:
            group = [b for b in begun if b.place.mesh_devices == devices]
            if any(isinstance(joined[b], _PortInUse) for b in group):
                _kill([b.actor for b in group], session)
                continue
            started[devices] = tuple(_worker(b, hellos[b], joined[b]) for b in group)
        _check_kinds([worker for group in started.values() for worker in group])
        return started
    except BaseException:
        _kill([b.actor for b in begun], session)
        raise


def _make_actor(session: Session, place: WorkerPlace, host: Host) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    first = host.number * session.devices_per_host
    gpu_ids = [host.gpu_ids[d - first] for d in place.devices] if host.gpu_ids else []
    env = worker_environment(os.environ, session.env, session.platform, len(place.devices), gpu_ids)
    actor = session.ray.remote(MeshWorker).options(
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


def _coordinator(session: Session, group: Sequence[_Begun], until_s: float) -> str | None:
    if len(group) == 1:
        return None
    first = group[0]
    port = _gather(session, {first: first.host.node.agent.free_port.remote()}, until_s)[first]
    address = first.host.node.address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _gather(session: Session, calls: Mapping[_Begun, Any], until_s: float) -> dict[_Begun, Any]:
    """The answers to calls of Ray; the first error ends the wait."""
    futures: dict[Future[Any], _Begun] = {call.future(): b for b, call in calls.items()}
    left: set[Future[Any]] = set(futures)
    while left:
        session.check()
        done, left = wait(left, timeout=0.5, return_when=FIRST_EXCEPTION)
        for future in done:
            error = future.exception()
            if error is not None:
                place = futures[future].place
                raise ClusterError(
                    f"A worker on {place.node} could not start: {error}\nEvery node needs the same "
                    "Python, Ray, JAX and autopar as the driver."
                ) from error
        if left and time.monotonic() > until_s:
            late = sorted({futures[future].place.node for future in left})
            raise ClusterError(
                f"Workers on {', '.join(late)} did not start within {session.limits.start_s:.0f} "
                "s. See Ray's logs there (/tmp/ray/session_latest/logs), or raise "
                "init(start_limit_s=…)."
            )
    return {b: future.result() for future, b in futures.items()}


def _join(
    session: Session, calls: Mapping[_Begun, Any], until_s: float
) -> dict[_Begun, Joined | _PortInUse]:
    """What workers say when their mesh is there, or that its port was taken."""
    joined: dict[_Begun, Joined | _PortInUse] = {}
    left = dict(calls)
    while left:
        futures = {call.future(): b for b, call in left.items()}
        done, _ = wait(futures, timeout=0.5, return_when="FIRST_COMPLETED")
        for future in done:
            b = futures[future]
            if b not in left:
                continue
            outcome = _gather(session, {b: left[b]}, until_s)[b]
            if _says_port_in_use(outcome):
                for peer in [p for p in left if p.place.mesh_devices == b.place.mesh_devices]:
                    joined[peer] = _PortInUse()
                    del left[peer]
                continue
            joined[b] = _checked(session, b, outcome)
            del left[b]
        if left and not done:
            session.check()
            if time.monotonic() > until_s:
                _gather(session, left, until_s)
    return joined


def _says_port_in_use(outcome: Outcome) -> bool:
    return any(sign in outcome.raised.lower() for sign in _PORT_IN_USE)


def _checked(session: Session, begun: _Begun, outcome: Outcome) -> Joined:
    place = begun.place
    if outcome.error is not None:
        raise outcome.error
    if outcome.raised:
        raise ClusterError(
            f"The worker on {place.node} with the devices {list(place.devices)} could not start: "
            f"{outcome.raised}\n{outcome.traceback}"
        )
    joined: Joined = outcome.value
    if joined.num_local_devices != len(place.devices):
        raise ClusterError(
            f"JAX has {joined.num_local_devices} devices ({joined.device_kind}) in the worker on "
            f"{place.node}; {len(place.devices)} were needed. Check its driver and its jaxlib, and "
            "that no variable in init(env=…) hides devices."
        )
    if joined.num_mesh_devices != len(place.mesh_devices):
        raise ClusterError(
            f"The mesh of the devices {list(place.mesh_devices)} has {joined.num_mesh_devices} "
            f"devices in the worker on {place.node}: its processes did not find each other."
        )
    return joined


def _check_kinds(workers: Sequence[Worker]) -> None:
    for worker in workers[1:]:
        first = workers[0]
        if worker.joined.device_kind != first.joined.device_kind:
            raise ClusterError(
                "The devices of a cluster must be of one kind; there are "
                f"{first.joined.device_kind!r} on {first.place.node} and "
                f"{worker.joined.device_kind!r} on {worker.place.node}."
            )


def _worker(begun: _Begun, hello: Hello, joined: Joined | _PortInUse) -> Worker:
    assert isinstance(joined, Joined)
    return Worker(begun.place, hello, joined, begun.actor, begun.host.node)


def _kill(actors: Sequence[Any], session: Session) -> None:
    for actor in actors:
        session.ray.kill(actor)
