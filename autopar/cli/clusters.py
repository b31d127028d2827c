"""Clusters described by text: from `50x4:v100-32gb` or a TOML file to a `ClusterTarget`.

    [cluster]
    hosts = 50
    devices_per_host = 4
    profile = "my_machine.json"
    [device]
    preset = "v100"
    name = "my device"
    memory = "32 GB"
    flops_16bit = "125 TFLOP/s"
    flops_32bit = "15.7 TFLOP/s"
    memory_bandwidth = "900 GB/s"
    efficiency = 0.55
    [links]
    intra_host_bandwidth = "130 GB/s"
    inter_host_bandwidth = "25 Gb/s"
    intra_host_latency = "5 us"
    inter_host_latency = "15 us"

Missing values come from the preset. Without a preset, all values of [device] and both bandwidths
are required, unless a profile names the device. A profile's path is relative to the file.
`inter_host_bandwidth` is that of a whole host, `intra_host_bandwidth` of one device's link, per
direction.

Links may be in relative units instead, `alpha = [1, 1]` and `beta = [1, 0.01]`: between hosts, then
inside a host. Then only communication is priced, on one mesh of hosts × devices.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cli.units import parse_quantity
from autopar.errors import ArgumentError, near_names, shortened
from autopar.ir.devices import DEVICES, DeviceSpec, device_spec, known_preset
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.profile import MachineProfile, find_profile

MOST_DEVICES = 65_536

_KNOWN = ", ".join(sorted(DEVICES))
_SHAPE = re.compile(r"\s*([0-9]+)\s*[x×]\s*([0-9]+)\s*(?::\s*(\S+)\s*)?")
# Field of a file -> field of `DeviceSpec`, kind of quantity.
_DEVICE_FIELDS = {
    "flops_16bit": ("flops_16bit", "speed"),
    "flops_32bit": ("flops_32bit", "speed"),
    "memory": ("memory_bytes", "memory"),
    "memory_bandwidth": ("memory_bandwidth", "bandwidth"),
}
_LINK_FIELDS = {
    "intra_host_bandwidth": ("intra_host_bandwidth", "bandwidth"),
    "inter_host_bandwidth": ("host_bandwidth", "bandwidth"),
    "intra_host_latency": ("intra_host_alpha_s", "time"),
    "inter_host_latency": ("inter_host_alpha_s", "time"),
}
_NEEDED = ("flops_16bit", "flops_32bit", "memory", "memory_bandwidth")
_NEEDED_LINKS = ("intra_host_bandwidth", "inter_host_bandwidth")
_FIELDS = {
    "cluster": ("hosts", "devices_per_host", "profile"),
    "device": ("preset", "name", "efficiency", *_DEVICE_FIELDS),
    "links": ("alpha", "beta", *_LINK_FIELDS),
}


@dataclass(frozen=True)
class ClusterTarget:
    """The cluster to plan for. `mesh`: the whole cluster as one mesh with links in relative units,
    which replace the cluster's; costs are then in these units, not seconds."""

    cluster: ClusterSpec
    mesh: LogicalMesh | None = None


@dataclass(frozen=True)
class Overrides:
    """Options that replace values of the device, as text with units. `profile`: a file's path, or
    the name of a built-in profile."""

    memory: str | None = None
    intra_bandwidth: str | None = None
    inter_bandwidth: str | None = None
    profile: str | None = None


def parse_target(text: str, overrides: Overrides | None = None) -> ClusterTarget:
    """From `HOSTSxDEVICES:DEVICE`, `HOSTSxDEVICES` (the profile's device, or h100-sxm), or the path
    of a TOML file."""
    profile = None if overrides is None else overrides.profile
    match = _SHAPE.fullmatch(text)
    if match is not None:
        hosts, per_host = int(match[1]), int(match[2])
        _check_size(hosts, per_host, f"--cluster {text}")
        device = match[3] or ""
        if device and device not in DEVICES:
            raise ArgumentError(
                f"--cluster {text}: unknown device {device!r}{near_names(device, DEVICES)}; choose "
                f"from {_KNOWN} (`autopar devices` shows them), or describe yours in a TOML file "
                "and give its path."
            )
        target = ClusterTarget(ClusterSpec(hosts, per_host, device, profile=profile))
    elif text.endswith(".toml") or Path(text).is_file():
        target = _read_toml(Path(text), profile)
    else:
        raise ArgumentError(
            f"--cluster {text}: needs HOSTSxDEVICES:DEVICE, such as 50x4:v100-32gb, or the path of "
            "a TOML file that describes the cluster."
        )
    return target if overrides is None else _overridden(target, overrides)


def _overridden(target: ClusterTarget, overrides: Overrides) -> ClusterTarget:
    given = {
        "memory_bytes": ("--memory", overrides.memory, "memory"),
        "intra_host_bandwidth": ("--intra-bandwidth", overrides.intra_bandwidth, "bandwidth"),
        "host_bandwidth": ("--inter-bandwidth", overrides.inter_bandwidth, "bandwidth"),
    }
    values = {
        field: parse_quantity(text, kind, flag)
        for field, (flag, text, kind) in given.items()
        if text is not None
    }
    cluster = replace(target.cluster, **values)
    mesh = target.mesh
    if mesh is not None:
        if set(values) - {"memory_bytes"}:
            raise ArgumentError(
                "--intra-bandwidth, --inter-bandwidth: the file's links are in relative units "
                "(alpha, beta). Change them in the file, or replace them by bandwidths."
            )
        mesh = replace(mesh, memory_bytes=cluster.spec.memory_bytes)
    return ClusterTarget(cluster, mesh)


def with_devices(target: ClusterTarget, num_devices: int) -> ClusterTarget:
    """The same cluster with another number of devices: whole hosts, or part of one."""
    cluster = target.cluster
    per_host = cluster.devices_per_host
    where = f"--devices {num_devices}"
    if target.mesh is not None:
        raise ArgumentError(f"{where}: a cluster with links in relative units has a fixed size.")
    if num_devices > per_host and num_devices % per_host:
        raise ArgumentError(
            f"{where}: hosts have {per_host} devices; more than one host needs a multiple of that."
        )
    hosts = max(1, num_devices // per_host)
    _check_size(hosts, min(num_devices, per_host), where)
    return ClusterTarget(
        replace(cluster, num_hosts=hosts, devices_per_host=min(num_devices, per_host)), None
    )


# -- files


def _read_toml(path: Path, profile: str | None) -> ClusterTarget:
    """`profile`: of the command line, which overrides the file's."""
    where = f"--cluster {path}"
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{where}: cannot read the file: {error.strerror or error}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{where}: not TOML: {error}.") from error
    _check_names(body, _FIELDS, str(path))
    for section, names in _FIELDS.items():
        table = body.get(section, {})
        if not isinstance(table, dict):
            raise ArgumentError(
                f"{path}: {section} is {shortened(table)}; needs a table [{section}]."
            )
        _check_names(table, names, f"{path}: [{section}]")
    cluster_table = body.get("cluster", {})
    hosts, per_host = (_count(cluster_table, name, path) for name in ("hosts", "devices_per_host"))
    _check_size(hosts, per_host, str(path))
    links = body.get("links", {})
    is_relative = "alpha" in links or "beta" in links
    measured = find_profile(profile) if profile else _profile(cluster_table, path)
    if measured is not None and is_relative:
        raise ArgumentError(
            f"{path}: [links] is in relative units (alpha, beta), a profile in seconds. Give only "
            "one of them."
        )
    device = _device(body.get("device", {}), links, path, is_relative, measured)
    cluster = ClusterSpec(hosts, per_host, device, profile=measured)
    return ClusterTarget(cluster, _relative_mesh(cluster, links, path) if is_relative else None)


def _check_names(body: Mapping[str, Any], known: Any, where: str) -> None:
    for name in body:
        if name not in known:
            raise ArgumentError(
                f"{where}: unknown name {name!r}{near_names(name, known)}; choose from "
                f"{', '.join(known)}."
            )


def _count(body: Mapping[str, Any], name: str, path: Path) -> int:
    given = body.get(name)
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        said = "is missing" if given is None else f"= {shortened(given)}"
        raise ArgumentError(f"{path}: [cluster] {name} {said}; needs a whole number ≥ 1.")
    return given


def _profile(body: Mapping[str, Any], path: Path) -> MachineProfile | None:
    given = body.get("profile")
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise ArgumentError(
            f"{path}: [cluster] profile = {shortened(given)}: needs the path of a file that "
            "`autopar profile` wrote, or the name of a built-in profile."
        )
    beside = path.parent / given
    return find_profile(str(beside) if beside.is_file() else given)


def _device(
    body: Mapping[str, Any],
    links: Mapping[str, Any],
    path: Path,
    is_relative: bool,
    profile: MachineProfile | None,
) -> DeviceSpec:
    values: dict[str, Any] = {}
    for section, table, fields in (
        ("device", body, _DEVICE_FIELDS),
        ("links", links, _LINK_FIELDS),
    ):
        for name, (field, kind) in fields.items():
            if name in table:
                values[field] = parse_quantity(table[name], kind, f"{path}: [{section}] {name}")
    if "efficiency" in body:
        given = body["efficiency"]
        if not isinstance(given, (int, float)) or isinstance(given, bool) or not 0 < given <= 1:
            raise ArgumentError(
                f"{path}: [device] efficiency = {shortened(given)}: needs the share of the peak "
                "rate that matrix products reach, above 0 and at most 1."
            )
        values["efficiency"] = float(given)
    for name in ("name", "preset"):
        if name in body and not (isinstance(body[name], str) and body[name]):
            raise ArgumentError(f"{path}: [device] {name} = {shortened(body[name])}: needs text.")
    measured = None if profile is None else known_preset(profile.platform, profile.device_kind)
    if measured is not None and not any(name in body for name in ("preset", "name")):
        return replace(device_spec(measured), **values)
    if "preset" in body:
        if body["preset"] not in DEVICES:
            raise ArgumentError(
                f"{path}: [device] preset = {body['preset']!r}: unknown device"
                f"{near_names(body['preset'], DEVICES)}; choose from {_KNOWN}."
            )
        base = device_spec(body["preset"])
        return replace(base, **values, name=body.get("name", base.name))
    if is_relative:  # compute and bandwidths are not used
        if "memory" not in body:
            raise ArgumentError(f"{path}: [device] memory is missing; needs text such as '32 GB'.")
        base = replace(device_spec("h100-sxm"), **values)
        return replace(base, name=body.get("name", "device"))
    for section, table, needed in (("device", body, _NEEDED), ("links", links, _NEEDED_LINKS)):
        missing = [name for name in needed if name not in table]
        if missing:
            raise ArgumentError(
                f"{path}: [{section}] {', '.join(missing)} missing. Give them, or a preset that "
                "has them: preset = 'h100-sxm' in [device]."
            )
    return DeviceSpec(name=body.get("name", "device"), **values)


def _relative_mesh(cluster: ClusterSpec, links: Mapping[str, Any], path: Path) -> LogicalMesh:
    both = {}
    for name in ("alpha", "beta"):
        given = links.get(name)
        if not isinstance(given, list) or len(given) != 2 or not all(map(_is_cost, given)):
            said = "is missing" if given is None else f"= {shortened(given)}"
            raise ArgumentError(
                f"{path}: [links] {name} {said}; needs two numbers ≥ 0, between hosts and inside a "
                "host, such as [1, 0.01]. For links with units, use intra_host_bandwidth etc."
            )
        both[name] = tuple(float(value) for value in given)
    mixed = [name for name in links if name not in both]
    if mixed:
        raise ArgumentError(
            f"{path}: [links] mixes relative units (alpha, beta) with {', '.join(mixed)}. Give "
            "only one of them."
        )
    shape = (cluster.num_hosts, cluster.devices_per_host)
    return LogicalMesh(
        shape, alpha=both["alpha"], beta=both["beta"], memory_bytes=cluster.spec.memory_bytes
    )


def _is_cost(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _check_size(hosts: int, per_host: int, where: str) -> None:
    if hosts < 1 or per_host < 1:
        raise ArgumentError(f"{where}: needs at least one host with one device.")
    if hosts * per_host > MOST_DEVICES:
        raise ArgumentError(
            f"{where}: {hosts * per_host} devices; plans are made for at most {MOST_DEVICES}."
        )
