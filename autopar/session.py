"""Where parallelized functions run: on the devices of this process, or on a cluster.

There is one session at a time. `init` ends the one before; whatever was planned and compiled for it
stays with it, and is made anew for the next.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autopar import _jax
from autopar.errors import ArgumentError, MeshError, ProfileError
from autopar.ir.mesh import ClusterSpec, preset_of
from autopar.ir.profile import MachineProfile, find_profile
from autopar.lower.tiles import plan_tiles
from autopar.runtime.remote.activity import describe_instruction
from autopar.runtime.remote.session import RemoteSession
from autopar.runtime.transports.choose import NAMES as TRANSPORTS

CLUSTERS = ("local", "ray")


@dataclass(frozen=True)
class Session:
    """devices: those that were chosen, or None for all of this process.
    remote:  the cluster, if it is not this process.
    options: what `init` was given, to start again with.
    profile: what was measured on these devices, if anything.
    """

    number: int
    devices: tuple[Any, ...] | None = None
    remote: RemoteSession | None = None
    options: tuple[tuple[str, Any], ...] = ()
    profile: MachineProfile | None = None

    @property
    def key(self) -> Any:
        """Equal for sessions for which the same programs serve."""
        return ("local", self.devices, self.profile) if self.remote is None else self.number

    def all_devices(self) -> tuple[Any, ...]:
        """Of this process, or of all that `jax.distributed` has joined, one after another; nobody
        asks for them while a cluster is in use."""
        if self.devices is not None:
            return self.devices
        return tuple(sorted(jax.devices(), key=lambda device: device.process_index))

    def cluster(self) -> ClusterSpec:
        if self.remote is not None:
            found = self.remote.cluster.spec
        else:
            found = cluster_of_devices(self.all_devices())
        return found if self.profile is None else replace(found, profile=self.profile)


_numbers = itertools.count()
_current = Session(next(_numbers))


def current() -> Session:
    return _current


def is_over(key: Any) -> bool:
    """Whether a session with this key, on a cluster, has ended."""
    return isinstance(key, int) and key != _current.key


def init(
    cluster: str = "local",
    devices: Sequence[Any] | None = None,
    *,
    address: str | None = None,
    num_hosts: int | None = None,
    devices_per_host: int | None = None,
    env: Mapping[str, str] | None = None,
    transport: str | None = None,
    heartbeat_s: float | None = None,
    silence_limit_s: float | None = None,
    hang_limit_s: float | None = None,
    start_limit_s: float | None = None,
    profile: MachineProfile | str | None = None,
) -> None:
    """Choose where parallelized functions run.

    cluster:          "local", devices of this process, which is what counts if `init` is never
                      called; or "ray", a Ray cluster.
    devices:          of this process; all of them by default.
    address:          of a running Ray cluster ("auto": the one this host belongs to). Without it,
                      the one this process has joined, or else one that is started here and stopped
                      by `shutdown`.
    num_hosts, devices_per_host: how much of the cluster is used. Without GPUs, devices are virtual
                      CPU devices, and hosts may share a node.
    env:              environment variables of the workers.
    transport:        how arrays go from mesh to mesh: "nccl", "cuda_ipc" or "jax_transfer"; by
                      default what the devices allow.
    heartbeat_s:      how often workers are asked whether they live.
    silence_limit_s:  a worker that is silent for so long counts as lost (30); one that dies is
                      noticed within 10 s.
    hang_limit_s:     so does one that makes no progress in a step for so long (300).
    start_limit_s:    within which workers must have started (120).
    profile:          what plans are priced by: the path of a file that `autopar profile` wrote on
                      such devices, the name of a table that comes with autopar ("h200", "cpu"), or
                      the profile itself.

    Raises `ClusterError` if a cluster cannot be reached or lacks what was asked for, `ProfileError`
    if the profile is of other devices, and `ArgumentError` for values that cannot work.
    """
    global _current
    if cluster not in CLUSTERS:
        raise ArgumentError(f"init(cluster={cluster!r}): needs 'local' or 'ray'.")
    measured = None if profile is None else find_profile(profile)
    limits = {
        "heartbeat_s": heartbeat_s,
        "silence_limit_s": silence_limit_s,
        "hang_limit_s": hang_limit_s,
        "start_limit_s": start_limit_s,
    }
    for_ray = {
        "address": address,
        "num_hosts": num_hosts,
        "devices_per_host": devices_per_host,
        "env": env,
        "transport": transport,
        **limits,
    }
    if cluster == "local":
        given = [name for name, value in for_ray.items() if value is not None]
        if given:
            raise ArgumentError(
                f"init({given[0]}={for_ray[given[0]]!r}): is for cluster='ray'; a local cluster "
                "takes devices=… only."
            )
        chosen = None if devices is None else checked_devices("init", devices)
        if measured is not None:
            check_profile_here(measured, Session(-1, chosen).all_devices()[0])
        shutdown()
        _current = Session(next(_numbers), chosen, profile=measured)
        return
    if devices is not None:
        raise ArgumentError(
            "init(cluster='ray', devices=…): devices of a Ray cluster are chosen by num_hosts and "
            "devices_per_host."
        )
    if transport is not None and transport not in TRANSPORTS:
        raise ArgumentError(
            f"init(transport={transport!r}): there are {', '.join(TRANSPORTS)}; None chooses."
        )
    for name, value in limits.items():
        if value is not None and not value > 0:
            raise ArgumentError(f"init({name}={value!r}): needs seconds, more than 0.")
    from autopar.runtime.ray.cluster import RayCluster  # imports Ray, which may not be installed

    shutdown()
    own: Any = {name: value for name, value in limits.items() if value is not None}
    joined = RayCluster(address, num_hosts, devices_per_host, env=env, **own)
    try:
        if joined.platform == "gpu":
            _leave_gpus_to_workers()
        remote = _remote(joined, transport)
        if measured is not None:
            replace(joined.spec, profile=measured)  # an error if it is of another device
            _warn_of_versions(measured, joined.platform)
    except BaseException:
        joined.close()
        raise
    given = {**for_ray, "profile": measured}
    options = tuple((name, value) for name, value in given.items() if value is not None)
    _current = Session(next(_numbers), None, remote, options, measured)


def check_profile_here(profile: MachineProfile, device: Any) -> None:
    """A profile of other hardware is an error, one of other versions a warning."""
    name = profile.name or profile.digest
    for field, given, here in (
        ("platform", profile.platform, device.platform),
        ("device_kind", profile.device_kind, device.device_kind),
    ):
        if given != here:
            raise ProfileError(
                f"profile {name}: its {field} is {given!r}, and the devices here are {here!r}. "
                "Measure these with `autopar profile`, or leave profile out."
            )
    _warn_of_versions(profile, device.platform)


_warned: set[tuple[str, str]] = set()


def _warn_of_versions(profile: MachineProfile, platform: str) -> None:
    """Once per profile: which versions it was measured with, where others are used here."""
    here = _jax.installed_versions(platform)
    other = [
        f"{field} {profile.versions[field]} there and {here[field]} here"
        for field in here
        if profile.versions.get(field, here[field]) != here[field]
    ]
    key = (profile.digest, platform)
    if other and key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"profile {profile.name or profile.digest}: was measured with other versions: "
            f"{', '.join(other)}. Predicted times may be off; `autopar profile` measures anew.",
            stacklevel=4,
        )


def _leave_gpus_to_workers() -> None:
    """The driver needs no GPU, and JAX would take most of its memory."""
    if not _jax.has_devices():
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() == "gpu":
        warnings.warn(
            "init(cluster='ray'): this process has GPUs open, whose memory workers on this host "
            "will lack. Call init before JAX touches its devices, or set JAX_PLATFORMS=cpu for the "
            "driver.",
            stacklevel=4,
        )


def _remote(cluster: Any, transport: str | None) -> RemoteSession:
    remote = RemoteSession(cluster, transport, plan_tiles)

    def describe(place: Any, state: Any) -> tuple[int | None, str]:
        """Stage and instruction of a worker, in words."""
        lowered = remote.tasks.get(state.program)
        if lowered is None:
            return None, ""
        mesh = next((m for m, own in enumerate(lowered.meshes) if own == place.mesh_devices), None)
        if mesh is None:
            return None, ""
        return describe_instruction(lowered, mesh, state.instruction)

    cluster.describe = describe
    return remote


def shutdown() -> None:
    """End the session: of a cluster, nothing is left (workers, ports, files, reservations). Later
    calls run on all devices of this process, until `init` is called again."""
    global _current
    ended, _current = _current, Session(next(_numbers))
    if ended.remote is not None:
        ended.remote.close()


def restart() -> None:
    """The same `init` again, on the nodes that are there now: after a worker was lost. If it fails,
    the session stays the one that has ended, so that nothing runs elsewhere and another try can be
    made."""
    global _current
    ended = _current
    if ended.remote is None:
        return
    options = dict(ended.options)
    shutdown()
    try:
        init("ray", **options)
    except BaseException:
        _current = ended
        raise


def checked_devices(function: str, given: Any) -> tuple[Any, ...]:
    """Distinct devices, as a tuple; `function` is what the user called."""
    devices = tuple(given) if isinstance(given, Iterable) else ()
    if not devices or not all(hasattr(d, "device_kind") for d in devices):
        raise ArgumentError(
            f"{function}(devices={given!r}): needs a sequence of one or more JAX devices, such as "
            "jax.devices()[:4], or None for all."
        )
    twice = [d for i, d in enumerate(devices) if d in devices[:i]]
    if twice:
        raise ArgumentError(f"{function}(devices=…): {twice[0]} is given twice. Give each once.")
    return devices


def cluster_of_devices(devices: Sequence[Any]) -> ClusterSpec:
    """What is known of the given devices, as a cluster."""
    per_host = _devices_per_process(devices)
    preset = preset_of(devices[0].platform, devices[0].device_kind)
    return ClusterSpec(len(devices) // per_host, per_host, preset)


def _devices_per_process(devices: Sequence[Any]) -> int:
    """How many devices each process has: as many as all others, and one process after another."""
    owners = [d.process_index for d in devices]
    counts = {owner: owners.count(owner) for owner in dict.fromkeys(owners)}
    num_processes = jax.process_count()
    without = sorted(set(range(num_processes)) - set(counts)) if num_processes > 1 else []
    rule = (
        "Where several processes run one step, give as many devices of every process, one process "
        "after another: all of jax.devices(), or the first n of each process."
    )
    if without:
        raise MeshError(
            f"devices: none of the {len(devices)} that were given belongs to process "
            f"{', '.join(map(str, without))}, which could take no part. {rule}"
        )
    if len(set(counts.values())) > 1:
        shares = ", ".join(f"{counts[p]} of process {p}" for p in sorted(counts))
        raise MeshError(f"devices: processes have unequal shares: {shares}. {rule}")
    if [owner for owner, _ in itertools.groupby(owners)] != list(counts):
        raise MeshError(f"devices: those of one process do not stand together: {owners}. {rule}")
    return next(iter(counts.values()))
