"""Where parallelized functions run: on the devices of this process, or on a cluster.

There is one session at a time. `init` ends the previous one, and with it whatever was planned and
compiled for it.
"""

from __future__ import annotations

import atexit
import itertools
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from autopar import _jax
from autopar.errors import ArgumentError, ClusterError, MeshError, ProfileError
from autopar.ir.devices import device_spec, preset_of, preset_or_share
from autopar.ir.mesh import ClusterSpec
from autopar.ir.profile import SHIPPED_FOR, GpuShare, MachineProfile, find_profile
from autopar.lower.tiles import plan_tiles
from autopar.runtime.host_heap import release_unused_memory
from autopar.runtime.ranks.gpu_share import gpu_share
from autopar.runtime.ranks.machines import memory_limit, places_of_processes, ranks_per_gpu
from autopar.runtime.ranks.process_cluster import ProcessCluster
from autopar.runtime.ranks.process_session import ProcessSession
from autopar.runtime.remote.activity import describe_instruction
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.remote.progress import State
from autopar.runtime.remote.session import RemoteSession
from autopar.runtime.transports.choose import NAMES as TRANSPORTS


@dataclass(frozen=True)
class Session:
    """devices: the chosen ones, or None for all of this process.
    remote:  the cluster, if it is not this process.
    options: the arguments of `init`, for a restart.
    wanted_devices: how many the cluster had when `init` was called; a restart may have got fewer.
    profile: what was measured on these devices, if anything.
    """

    number: int
    devices: tuple[Any, ...] | None = None
    remote: RemoteSession | None = None
    options: tuple[tuple[str, Any], ...] = ()
    wanted_devices: int = 0
    profile: MachineProfile | None = None

    @property
    def key(self) -> Hashable:
        """Equal for sessions that can share compiled programs."""
        if self.remote is not None:
            return self.number
        return "local", self.devices, self.profile, _num_process_sessions

    @property
    def plan_key(self) -> Hashable:
        """Equal for sessions that can share plans: those of equal clusters, such as before and
        after a restart."""
        return self.key if self.remote is None else ("cluster", self.cluster())

    def all_devices(self) -> tuple[Any, ...]:
        """The devices of this process, or of all that `jax.distributed` has joined, process by
        process. Not used while the session is on a cluster."""
        if self.devices is not None:
            return self.devices
        return tuple(sorted(jax.devices(), key=lambda device: device.process_index))

    def cluster(self) -> ClusterSpec:
        if self.remote is not None:
            spec = self.remote.cluster.spec
        else:
            spec = cluster_of_devices(self.all_devices())
        if self.profile is None:
            return priced_by_shipped_table(spec)
        limit, measured = spec.memory_bytes, self.profile.usable_memory_bytes
        if limit is not None and measured is not None and measured < limit:
            limit = None  # the profile's counts
        return replace(spec, profile=self.profile, memory_bytes=limit)


_LIMITS = ("heartbeat_s", "silence_limit_s", "hang_limit_s", "start_limit_s", "command_limit_s")
_numbers = itertools.count()
_current = Session(next(_numbers))
_processes: ProcessSession | None = None  # pipelines in processes of the user's own
_num_process_sessions = 0  # that have ended


def process_session() -> ProcessSession:
    """Where the processes of `jax.distributed` run pipelines; every process must ask for it when
    the others do. It lasts until the next `init` or `shutdown`."""
    global _processes
    if _processes is None:
        cluster = ProcessCluster(_current.all_devices(), _current.cluster())
        _processes = ProcessSession(cluster, None, plan_tiles)
        cluster.describe = partial(_describe_worker, _processes)
    return _processes


@atexit.register
def _end_process_session() -> None:
    global _processes, _num_process_sessions
    ended, _processes = _processes, None
    if ended is not None:
        _num_process_sessions += 1
        ended.close()


def current() -> Session:
    return _current


def is_over(key: Hashable) -> bool:
    """Whether the key belongs to a session on a cluster that has ended."""
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
    command_limit_s: float | None = None,
    profile: MachineProfile | str | None = None,
) -> None:
    """Choose where parallelized functions run.

    cluster:          "local", the devices of this process (the default if `init` is never called);
                      or "ray", a Ray cluster.
    devices:          devices of this process; default: all of them.
    address:          a running Ray cluster ("auto": the one that this host belongs to). Default:
                      the one that this process has joined, or else a new one, which `shutdown`
                      stops.
    num_hosts, devices_per_host: how much of the cluster to use. Without GPUs, devices are virtual
                      CPU devices, and hosts may share a node.
    env:              environment variables of the workers.
    transport:        carries arrays between meshes: "nccl", "cuda_ipc" or "jax_transfer"; default:
                      the best that the devices allow.
    heartbeat_s:      how often workers are asked for a sign of life.
    silence_limit_s:  after this much silence a worker counts as lost (30); a worker that dies is
                      noticed within 10 s.
    hang_limit_s:     after this long without progress in a step, too (300).
    start_limit_s:    how long workers may take to start (120).
    command_limit_s:  how long a command other than a step, such as saving, may make no progress
                      (3600); compiling may take four times as long.
    profile:          prices the plans: the path of a file that `autopar profile` wrote on such
                      devices, the name of a table that comes with autopar (such as "h200"), or the
                      profile itself. Default: the table that comes with autopar for these GPUs,
                      or else their data sheet.

    Raises `ClusterError` if a cluster cannot be reached or is too small, `ProfileError` if the
    profile was measured on other devices, and `ArgumentError` for invalid values.
    """
    limits = _given(
        heartbeat_s=heartbeat_s,
        silence_limit_s=silence_limit_s,
        hang_limit_s=hang_limit_s,
        start_limit_s=start_limit_s,
        command_limit_s=command_limit_s,
    )
    size = _given(address=address, num_hosts=num_hosts, devices_per_host=devices_per_host, env=env)
    measured = None if profile is None else find_profile(profile)
    if cluster == "local":
        _start_local(devices, {**size, **_given(transport=transport), **limits}, measured)
    elif cluster == "ray":
        _start_ray(devices, size, transport, limits, measured)
    else:
        raise ArgumentError(f"init(cluster={cluster!r}): needs 'local' or 'ray'.")


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _start_local(
    devices: Sequence[Any] | None, for_ray: Mapping[str, Any], profile: MachineProfile | None
) -> None:
    global _current
    for name, value in for_ray.items():
        raise ArgumentError(
            f"init({name}={value!r}): is for cluster='ray'; a local cluster takes devices=… only."
        )
    chosen = None if devices is None else checked_devices("init", devices)
    if profile is not None:
        check_profile_here(profile, Session(-1, chosen).all_devices()[0])
    shutdown()
    _current = Session(next(_numbers), chosen, profile=profile)


def _start_ray(
    devices: Sequence[Any] | None,
    size: dict[str, Any],
    transport: str | None,
    limits: dict[str, Any],
    profile: MachineProfile | None,
    min_devices: int | None = None,
) -> None:
    global _current
    if devices is not None:
        raise ArgumentError(
            "init(cluster='ray', devices=…): devices of a Ray cluster are chosen by num_hosts and "
            "devices_per_host."
        )
    if transport is not None and transport not in TRANSPORTS:
        raise ArgumentError(
            f"init(transport={transport!r}): unknown transport; choose from "
            f"{', '.join(TRANSPORTS)}, or None for the best that the devices allow."
        )
    for name, value in limits.items():
        if not value > 0:
            raise ArgumentError(f"init({name}={value!r}): needs a number of seconds > 0.")
    from autopar.runtime.ray.cluster import RayCluster  # imports Ray, which may not be installed

    shutdown()
    cluster = RayCluster(**size, **limits, min_devices=min_devices)
    try:
        if cluster.platform == "gpu":
            _leave_gpus_to_workers()
        remote = RemoteSession(cluster, transport, plan_tiles)
        cluster.describe = partial(_describe_worker, remote)
        if profile is not None:
            replace(cluster.spec, profile=profile)  # raises if it is of another device
            _warn_of_versions(profile, cluster.platform)
    except BaseException:
        cluster.close()
        raise
    options = {**size, **_given(transport=transport), **limits, **_given(profile=profile)}
    wanted = cluster.spec.num_devices
    _current = Session(next(_numbers), None, remote, tuple(options.items()), wanted, profile)


def _describe_worker(
    remote: RemoteSession, place: WorkerPlace, state: State
) -> tuple[int | None, str]:
    """The stage and the instruction that a worker is at, in words."""
    lowered = remote.tasks.get(state.program)
    if lowered is None or place.mesh_devices not in lowered.meshes:
        return None, ""
    mesh = lowered.meshes.index(place.mesh_devices)
    return describe_instruction(lowered, mesh, state.instruction)


def check_profile_here(profile: MachineProfile, device: Any) -> None:
    """A profile of other hardware is an error, one of other versions a warning."""
    name = profile.name or profile.digest
    for field, given, here in (
        ("platform", profile.platform, device.platform),
        ("device_kind", profile.device_kind, device.device_kind),
        ("gpu_share", *map(_share_text, (profile.gpu_share, gpu_share(device.platform)))),
    ):
        if given != here:
            raise ProfileError(
                f"profile {name}: its {field} is {given!r}, but the devices here are {here!r}. "
                "Measure these with `autopar profile`, or leave profile out."
            )
    _warn_of_versions(profile, device.platform)


def _share_text(share: GpuShare | None) -> str:
    return "whole" if share is None else str(share)


_warned: set[tuple[str, str]] = set()


def _warn_of_versions(profile: MachineProfile, platform: str) -> None:
    """Warn, once per profile, of versions that differ from those it was measured with."""
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
            f"{', '.join(other)}. Predicted times may be off; run `autopar profile` again.",
            stacklevel=5,
        )


def _leave_gpus_to_workers() -> None:
    """The driver needs no GPU, and JAX would reserve most of its memory."""
    if not _jax.has_devices():
        jax.config.update("jax_platforms", "cpu")
    elif jax.default_backend() == "gpu":
        warnings.warn(
            "init(cluster='ray'): this process has GPUs open, so workers on this host lack their "
            "memory. Call init before JAX touches its devices, or set JAX_PLATFORMS=cpu for the "
            "driver.",
            stacklevel=4,
        )


def shutdown() -> None:
    """End the session. Nothing of a cluster remains: no workers, ports, files or reservations.
    Later calls run on all devices of this process, until `init` is called again."""
    global _current
    ended, _current = _current, Session(next(_numbers))
    _end_process_session()
    if ended.remote is not None:
        ended.remote.close()


def restart(min_devices: int | None = None) -> None:
    """Repeat `init` on the nodes that are there now, after the loss of a worker. `ClusterError` if
    they have fewer than `min_devices` (None: as many as `init` found), or another kind of devices.
    Then the ended session stays current, so that nothing runs elsewhere and the caller can try
    again."""
    global _current
    ended = _current
    if ended.remote is None:
        return
    options = dict(ended.options)
    platform = ended.remote.cluster.platform
    limits = {name: options.pop(name) for name in list(options) if name in _LIMITS}
    transport, profile = options.pop("transport", None), options.pop("profile", None)
    least = ended.wanted_devices if min_devices is None else min_devices
    shutdown()
    release_unused_memory()
    try:
        _start_ray(None, options, transport, limits, profile, least)
        assert _current.remote is not None
        found = _current.remote.cluster.platform
        if found != platform:
            shutdown()
            raise ClusterError(
                f"Training ran on {platform.upper()}s, and the nodes that are left have only "
                f"{found.upper()}s. Training goes on when nodes with {platform.upper()}s are back."
            )
        _current = replace(_current, wanted_devices=ended.wanted_devices)
    except BaseException:
        _current = ended
        raise


def checked_devices(function: str, given: Any) -> tuple[Any, ...]:
    """The devices as a tuple, checked; `function` is the one that the user called."""
    devices = tuple(given) if isinstance(given, Iterable) else ()
    if not devices or not all(hasattr(d, "device_kind") for d in devices):
        raise ArgumentError(
            f"{function}(devices={given!r}): needs a sequence of one or more JAX devices, such as "
            "jax.devices()[:4], or None for all."
        )
    twice = [d for i, d in enumerate(devices) if d in devices[:i]]
    if twice:
        raise ArgumentError(
            f"{function}(devices=…): {twice[0]} is given twice. Give each device once."
        )
    return devices


def priced_by_shipped_table(cluster: ClusterSpec) -> ClusterSpec:
    """With the table that comes with autopar for these GPUs, if there is one: it is nearer to
    any of them than their data sheet. Their memory stays what it is."""
    table = SHIPPED_FOR.get(cluster.device) if isinstance(cluster.device, str) else None
    if table is None:
        return cluster
    memory_bytes = cluster.spec.memory_bytes
    return replace(cluster, profile=find_profile(table), memory_bytes=memory_bytes)


def cluster_of_devices(devices: Sequence[Any]) -> ClusterSpec:
    """The cluster that the given devices form. Processes of one machine are one host, and devices
    have the memory that JAX may allocate, if that is less than the preset's.

    Where several processes run one step, they exchange that once, so all of them must call this.
    """
    per_host = devices_per_process(devices)
    places = places_of_processes() if jax.process_count() > 1 else None
    if places is None:
        limits = [memory_limit(d) for d in devices if d.process_index == jax.process_index()]
    else:
        limits = [place.memory_bytes for place in places]
        machines = [places[device.process_index].machine for device in devices]
        per_host = _devices_per_machine(machines, otherwise=per_host)
    preset = preset_of(devices[0].platform, devices[0].device_kind)
    device = preset_or_share(preset, ranks_per_gpu() if devices[0].platform == "gpu" else 1)
    memory_bytes = device_spec(device).memory_bytes
    least = min((limit for limit in limits if limit is not None), default=memory_bytes)
    return ClusterSpec(
        len(devices) // per_host,
        per_host,
        device,
        memory_bytes=least if least < memory_bytes else None,
    )


def _devices_per_machine(machines: Sequence[str], otherwise: int) -> int:
    """How many devices each machine has, from the machine of each device. A cluster has equal
    hosts, one after another; if the machines are not so, it is `otherwise`."""
    counts = [len(list(group)) for _, group in itertools.groupby(machines)]
    are_hosts = len(counts) == len(set(machines)) and len(set(counts)) == 1
    return counts[0] if are_hosts else otherwise


def devices_per_process(devices: Sequence[Any]) -> int:
    """How many devices each process has. All must have equally many, and the devices must be
    ordered by process."""
    owners = [d.process_index for d in devices]
    counts = {owner: owners.count(owner) for owner in dict.fromkeys(owners)}
    num_processes = jax.process_count()
    without = sorted(set(range(num_processes)) - set(counts)) if num_processes > 1 else []
    rule = (
        "When several processes run one step, give equally many devices of every process, ordered "
        "by process: all of jax.devices(), or the first n of each process."
    )
    if without:
        raise MeshError(
            f"devices: none of the {len(devices)} given devices belongs to process "
            f"{', '.join(map(str, without))}, which could not take part. {rule}"
        )
    if len(set(counts.values())) > 1:
        shares = ", ".join(f"{counts[p]} of process {p}" for p in sorted(counts))
        raise MeshError(
            f"devices: the processes have different numbers of devices: {shares}. {rule}"
        )
    if [owner for owner, _ in itertools.groupby(owners)] != list(counts):
        raise MeshError(f"devices: not ordered by process: {owners}. {rule}")
    return next(iter(counts.values()))
