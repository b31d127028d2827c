"""The hardware of a profile: from devices to `Hardware` and `Abilities`."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from typing import Any

from autopar import _jax
from autopar.errors import ProfileError
from autopar.ir.profile import GpuShare, MachineProfile
from autopar.measure.profile.samples import Abilities
from autopar.runtime.ranks.gpu_share import gpu_share
from autopar.runtime.ranks.machines import places_of_processes


@dataclass(frozen=True)
class Hardware:
    """The fields of a `MachineProfile` that identify where it was measured."""

    platform: str
    device_kind: str
    num_hosts: int
    devices_per_host: int
    versions: dict[str, str]
    gpu_share: GpuShare | None = field(default=None, metadata={"omit_none": True})

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.devices_per_host


def hardware_of(devices: tuple[Any, ...]) -> Hardware:
    first = devices[0]
    num_hosts = len({device.process_index for device in devices})
    return Hardware(
        first.platform,
        first.device_kind,
        num_hosts,
        len(devices) // num_hosts,
        _jax.installed_versions(first.platform),
    )


def hardware_of_ranks(devices: tuple[Any, ...]) -> Hardware:
    """The hardware of all processes. Those of one machine are one host, and each may have only a
    share of its GPU. All processes must call this."""
    places = places_of_processes()
    if places is None:
        raise ProfileError(
            "profile: not every process has said on which machine it is. Start all processes with "
            "the same command."
        )
    hardware = hardware_of(devices)
    machines = [places[device.process_index].machine for device in devices]
    per_host = machines.count(machines[0])
    runs = [machines[at] for at in range(0, len(machines), per_host)]
    if machines != [machine for machine in runs for _ in range(per_host)]:
        raise ProfileError(
            "profile: ranks must be ordered by machine, equally many on each; the machines are "
            f"{', '.join(machines)}."
        )
    versions = hardware.versions
    if hardware.platform == "gpu" and (nccl := _preloaded_nccl()):
        versions = {**versions, "nccl": nccl}
    share = gpu_share(hardware.platform)
    return replace(
        hardware,
        num_hosts=len(runs),
        devices_per_host=per_host,
        versions=versions,
        gpu_share=share,
    )


def _preloaded_nccl() -> str | None:
    """The version of an NCCL that takes the place of JAX's, as ranks that share a GPU need."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(number))
    except AttributeError:
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


def profile_of(hardware: Hardware) -> MachineProfile:
    return MachineProfile(
        hardware.platform,
        hardware.device_kind,
        hardware.num_hosts,
        hardware.devices_per_host,
        hardware.versions,
        gpu_share=hardware.gpu_share,
    )


def first_difference(here: Hardware, there: Hardware | MachineProfile) -> str | None:
    """The first field in which the hardware differs, in words."""
    for name in ("platform", "device_kind", "gpu_share", "num_hosts", "devices_per_host"):
        mine, other = getattr(here, name), getattr(there, name)
        if mine != other:
            return f"{name} is {mine!r} here and {other!r} there"
    for name in sorted({*here.versions, *there.versions}):
        mine, other = here.versions.get(name), there.versions.get(name)
        if mine != other:
            return f"versions[{name!r}] is {mine!r} here and {other!r} there"
    return None


def check_same(path: str, here: Hardware, there: Hardware | MachineProfile) -> None:
    """Raise if a file is of other hardware or versions."""
    difference = first_difference(here, there)
    if difference is not None:
        raise ProfileError(
            f"{path}: measured on other hardware or with other versions: {difference}. Continue it "
            "there, give another --output, or discard it with --restart."
        )


def abilities(hardware: Hardware, capability: str) -> Abilities:
    """`capability`: of GPUs, such as "9.0"."""
    try:
        level = float(capability)
    except ValueError:
        level = 0.0
    return Abilities(
        hardware.platform,
        hardware.num_devices,
        hardware.devices_per_host,
        has_fp8=level >= 8.9,
        has_cudnn=hardware.platform == "gpu" and level >= 8.0,
    )


def others_on_gpu() -> list[str]:
    """Other processes on the GPUs, from `nvidia-smi`; empty without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    ask = [program, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    return [line for line in lines if line.split(",")[0].strip() != str(os.getpid())]
