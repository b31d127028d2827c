"""Clusters and logical meshes: the machine, as data (`devices.py` has its devices).

A `ClusterSpec` is hosts × devices with two kinds of link. A `LogicalMesh` arranges devices in a
grid of named axes and prices each axis: α seconds per collective, β seconds per byte. A group of
ranks that spans hosts is priced at the slow link, which the groups of one host share. A
`MachineProfile` adds measured times to a cluster and its meshes; presets then price only what was
not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any

from autopar.errors import ArgumentError, MeshError, ProfileError
from autopar.ir.codec import Stored
from autopar.ir.devices import (
    DEVICES,
    FALLBACK_PRESET,
    INSTRUCTIONS_PER_BYTE,
    DeviceSpec,
    device_spec,
    is_number,
    known_preset,
    share_of,
)
from autopar.ir.profile import MachineProfile, ProfileSummary, find_profile, restored_profile

DEFAULT_AXIS_NAMES = ("x", "y", "z", "w")
AVOIDABLE = frozenset(("reduce-scatter", "all-to-all"))  # collectives that others can replace


def _check_same_device(profile: MachineProfile | ProfileSummary, name: str) -> None:
    preset = known_preset(profile.platform, profile.device_kind)
    if preset is not None and preset != name:
        raise ProfileError(
            f"profile {profile.name or profile.digest}: was measured on {profile.device_kind} "
            f"({preset}), and the cluster's device is {name!r}. Give device={preset!r}, or a "
            f"profile of {name!r} (`autopar profile` measures one)."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _summary(profile: MachineProfile | ProfileSummary) -> ProfileSummary:
    return profile.summary if isinstance(profile, MachineProfile) else profile


# Figures of the device that a cluster can override.
_FIGURES = ("memory_bytes", "intra_host_bandwidth", "host_bandwidth", "host_link_bandwidth")
_STORED_PROFILE = Stored(ProfileSummary, write=_summary, read=restored_profile)


@dataclass(frozen=True)
class ClusterSpec:
    """`num_hosts` hosts of `devices_per_host` equal devices. Arguments override figures of the
    preset: `ClusterSpec(2, 8, device="h100-sxm", host_bandwidth=100e9)`.

    device:  a preset's name (`autopar devices` lists them) or a `DeviceSpec`; by default the
             profile's device, or else "h100-sxm".
    memory_bytes:         of one device, in place of the preset's.
    intra_host_bandwidth: of one device's link inside a host, bytes per second each way.
    host_bandwidth:       of a host's whole network, bytes per second each way.
    host_link_bandwidth:  between a device and its host's memory, bytes per second each way.
    profile: measured on such devices by `autopar profile`: the path of its file, the name of a
             table that comes with autopar (such as "h200"), or the profile itself. The cluster of a
             plan file has only its summary, unless the table comes with autopar. If it was measured
             on shares of GPUs, the devices are such shares.
    """

    num_hosts: int
    devices_per_host: int
    device: str | DeviceSpec = ""
    memory_bytes: float | None = None
    intra_host_bandwidth: float | None = None
    host_bandwidth: float | None = None
    profile: MachineProfile | ProfileSummary | str | None = field(
        default=None, metadata={"stored": _STORED_PROFILE, "omit_none": True}
    )
    host_link_bandwidth: float | None = field(default=None, metadata={"omit_none": True})

    def __post_init__(self) -> None:
        profile = self.profile
        if profile is not None and not isinstance(profile, (MachineProfile, ProfileSummary)):
            profile = find_profile(profile)
            object.__setattr__(self, "profile", profile)
        if self.device == "":
            preset = (
                None if profile is None else known_preset(profile.platform, profile.device_kind)
            )
            object.__setattr__(self, "device", preset or FALLBACK_PRESET)
        for name in ("num_hosts", "devices_per_host"):
            given = getattr(self, name)
            if not _is_count(given):
                raise ArgumentError(f"ClusterSpec({name}={given!r}): needs a whole number ≥ 1.")
        for name in _FIGURES:
            given = getattr(self, name)
            if given is not None and not (is_number(given) and given > 0):
                raise ArgumentError(f"ClusterSpec({name}={given!r}): needs a number > 0, or None.")
        name = device_spec(self.device).name
        if profile is not None and name in DEVICES:
            _check_same_device(profile, name)

    @property
    def num_devices(self) -> int:
        """Of all hosts together."""
        return self.num_hosts * self.devices_per_host

    @property
    def instructions_per_byte(self) -> float:
        """Of its devices."""
        return self.spec.instructions_per_byte

    @property
    def measured(self) -> MachineProfile | None:
        """The profile; None if there is none, or only its summary."""
        return self.profile if isinstance(self.profile, MachineProfile) else None

    @property
    def priced_by(self) -> ProfileSummary | None:
        """Which profile the costs come from; None for data sheets."""
        return None if self.profile is None else _summary(self.profile)  # type: ignore[arg-type]

    def _fits_hosts(self, group_size: int, stride: int, num_devices: int | None) -> bool:
        """Whether every group stays on one host."""
        one_host = (num_devices or self.num_devices) <= self.devices_per_host
        # Where the groups do not fill a host evenly, the next host begins inside one of them.
        return group_size == 1 or one_host or self.devices_per_host % (group_size * stride) == 0

    @property
    def spec(self) -> DeviceSpec:
        """The device with this cluster's overrides and the measured memory."""
        overrides = {
            name: getattr(self, name) for name in _FIGURES if getattr(self, name) is not None
        }
        measured = self.priced_by
        if measured is not None and measured.usable_memory_bytes is not None:
            overrides.setdefault("memory_bytes", measured.usable_memory_bytes)
        device = device_spec(self.device)
        is_preset = DEVICES.get(device.name) == device  # own figures are taken as they are
        if measured is not None and measured.gpu_share is not None and is_preset:
            device = share_of(device, measured.gpu_share.num_ranks)
        return replace(device, **overrides)

    def link(
        self, group_size: int, stride: int, num_devices: int | None = None
    ) -> tuple[float, float]:
        """(α, β) of rings over `group_size` devices `stride` apart in host-major order, all at once
        on the first `num_devices` (all, if None)."""
        device = self.spec
        if self._fits_hosts(group_size, stride, num_devices):
            return device.intra_host_alpha_s, 1 / device.intra_host_bandwidth
        ranks_per_host = max(1, min(group_size, self.devices_per_host // stride))
        # Each ring crosses the host's boundary once each way; the rings of the groups that share
        # the host share its network.
        rings = max(1, self.devices_per_host // ranks_per_host)
        beta = max(1 / device.intra_host_bandwidth, rings / device.host_bandwidth)
        return device.inter_host_alpha_s, beta


def cluster_of_profile(profile: MachineProfile | str) -> ClusterSpec:
    """The cluster that a profile was measured on: its hosts and devices, or shares of devices."""
    measured = find_profile(profile)
    return ClusterSpec(measured.num_hosts, measured.devices_per_host, profile=measured)


@dataclass(frozen=True)
class LogicalMesh:
    """Devices in a grid: all that the solver knows of the machine.

    shape:        devices along each axis.
    axis_names:   one name per axis, used in every `PartitionSpec`.
    alpha, beta:  seconds per collective and per byte along each axis (any unit, if both agree).
    memory_bytes: of one device, or None for no limit.
    device:       prices compute; None prices only communication, and forbids computing large
                  products redundantly.
    joint_link:   (α, β) of one ring through all devices; the worst axis if None.
    forbidden:    collectives that may not be used: "reduce-scatter", "all-to-all".
    profile:      measured on such devices; it prices everything that it has samples of.
    num_on_host:  devices of one host; 0 if all are on one host.
    away_beta:    seconds per byte that one device sends to other hosts directly, not in a ring; 0
                  to price that like a ring.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ()
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    memory_bytes: float | None = None
    device: DeviceSpec | None = None
    joint_link: tuple[float, float] | None = None
    forbidden: frozenset[str] = frozenset()
    profile: MachineProfile | None = None
    num_on_host: int = 0
    away_beta: float = 0.0

    def __post_init__(self) -> None:
        shape = _as_tuple(self.shape)
        if not 1 <= len(shape) <= 2 or not all(_is_count(n) for n in shape):
            raise MeshError(
                f"LogicalMesh(shape={self.shape!r}): needs one or two whole numbers ≥ 1, "
                "such as (8,) or (2, 4)."
            )
        names = _as_tuple(self.axis_names) or DEFAULT_AXIS_NAMES[: len(shape)]
        names = names[: len(shape)] if names == DEFAULT_AXIS_NAMES[:2] else names
        if len(names) != len(shape) or len(set(names)) != len(names):
            raise MeshError(
                f"LogicalMesh(axis_names={self.axis_names!r}): needs {len(shape)} different "
                f"names, one per axis of the shape {shape}."
            )
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "axis_names", names)
        for name in ("alpha", "beta"):
            given = _as_tuple(getattr(self, name)) or (1.0,) * len(shape)
            if len(given) != len(shape) or not all(is_number(v) and 0 <= v < inf for v in given):
                raise MeshError(
                    f"LogicalMesh({name}={getattr(self, name)!r}): needs {len(shape)} numbers "
                    f"≥ 0, one per axis of the shape {shape}."
                )
            object.__setattr__(self, name, tuple(float(v) for v in given))
        if not isinstance(self.forbidden, (set, frozenset)) or self.forbidden - AVOIDABLE:
            raise MeshError(
                f"LogicalMesh(forbidden={self.forbidden!r}): needs a set of some of "
                f"{sorted(AVOIDABLE)}."
            )
        object.__setattr__(self, "forbidden", frozenset(self.forbidden))
        if self.profile is not None and not isinstance(self.profile, MachineProfile):
            object.__setattr__(self, "profile", find_profile(self.profile))

    @property
    def instructions_per_byte(self) -> float:
        """Of its devices; that of an H100 if compute is not priced."""
        return INSTRUCTIONS_PER_BYTE if self.device is None else self.device.instructions_per_byte

    @property
    def num_devices(self) -> int:
        """Along all axes together."""
        return prod(self.shape)

    def link(self, axes: tuple[int, ...]) -> tuple[float, float]:
        """(α, β) of a collective over the given axes together."""
        if len(axes) == 1:
            return self.alpha[axes[0]], self.beta[axes[0]]
        if self.joint_link is not None:
            return self.joint_link
        return max(self.alpha[a] for a in axes), max(self.beta[a] for a in axes)

    def placement(self, axes: tuple[int, ...]) -> tuple[int, int, int]:
        """(ranks, stride, ranks on one host) of the groups of a collective over the axes."""
        ranks = prod(self.shape[a] for a in axes)
        split = [a for a in axes if self.shape[a] > 1] or list(axes)
        stride = prod(self.shape[max(split) + 1 :])
        per_host = self.num_on_host
        if not per_host or self.num_devices <= per_host or per_host % (ranks * stride) == 0:
            return ranks, stride, ranks
        return ranks, stride, max(1, min(ranks, per_host // stride))


def mesh_of_cluster(cluster: ClusterSpec, shape: tuple[int, ...]) -> LogicalMesh:
    """Arrange a cluster's devices, host-major, in a grid and price its axes."""
    if prod(shape) > cluster.num_devices:
        raise MeshError(
            f"mesh_shape={shape} needs {prod(shape)} devices; the cluster has "
            f"{cluster.num_devices} ({cluster.num_hosts} × {cluster.devices_per_host}). "
            "Choose a smaller mesh or a larger cluster."
        )
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    total = prod(shape)
    links = [cluster.link(n, stride, total) for n, stride in zip(shape, strides, strict=True)]
    return LogicalMesh(
        shape=shape,
        alpha=tuple(alpha for alpha, _ in links),
        beta=tuple(beta for _, beta in links),
        memory_bytes=cluster.spec.memory_bytes,
        device=cluster.spec,
        joint_link=cluster.link(total, 1, total),
        profile=cluster.measured,
        num_on_host=cluster.devices_per_host,
        away_beta=cluster.devices_per_host / cluster.spec.host_bandwidth,
    )


def last_axis(shape: tuple[int, ...]) -> int:
    """The size of a mesh's last axis; 1 if it has one axis only."""
    return shape[-1] if len(shape) > 1 else 1
