"""Devices as data: rates, memory and links of each kind, from data sheets.

A name or the user's own figures → `DeviceSpec`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import TypeGuard

from autopar.errors import ArgumentError, near_names


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class DeviceSpec:
    """The abilities of one device. Peak rates are the vendor's.

    name:                 as plans call it.
    flops_16bit:          of bfloat16 and float16 products, per second.
    flops_32bit:          of float32 products as JAX computes them by default (TF32 where the device
                          has it).
    memory_bytes:         of the device.
    memory_bandwidth:     bytes per second.
    intra_host_bandwidth: of one device's link inside a host, bytes per second each way.
    host_bandwidth:       of a host's whole network, bytes per second each way.
    intra_host_alpha_s, inter_host_alpha_s: latency of a collective, inside a host and between
                          hosts.
    efficiency:           the share of the peak that large matrix products reach in practice.
    host_link_bandwidth:  between a device and its host's memory, bytes per second each way; None
                          for PCIe gen 5.
    blocking_collectives: whether kernels wait while a collective runs, as on CPUs.
    patch_element_s:      to gather one element of a convolution's patches, as CPUs do; None where
                          convolutions need none.
    """

    name: str
    flops_16bit: float
    flops_32bit: float
    memory_bytes: float
    memory_bandwidth: float
    intra_host_bandwidth: float
    host_bandwidth: float
    intra_host_alpha_s: float = 5e-6
    inter_host_alpha_s: float = 15e-6
    efficiency: float = 0.7
    host_link_bandwidth: float | None = field(default=None, metadata={"omit_none": True})
    blocking_collectives: bool | None = field(default=None, metadata={"omit_none": True})
    patch_element_s: float | None = field(default=None, metadata={"omit_none": True})

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ArgumentError(f"DeviceSpec(name={self.name!r}): needs a name, such as 'mi300x'.")
        for figure in fields(self)[1:]:
            given = getattr(self, figure.name)
            if given is None and figure.default is None:
                continue
            if figure.name == "blocking_collectives":
                is_valid, needs = isinstance(given, bool), "True, False or None"
            elif figure.name.endswith("_alpha_s"):
                is_valid, needs = is_number(given) and 0 <= given < inf, "a number ≥ 0"
            else:
                is_valid, needs = is_number(given) and 0 < given < inf, "a number > 0"
            if not is_valid:
                raise ArgumentError(f"DeviceSpec({figure.name}={given!r}): needs {needs}.")
        if self.efficiency > 1:
            raise ArgumentError(
                f"DeviceSpec(efficiency={self.efficiency!r}): needs the share of the peak rate "
                "that matrix products reach, above 0 and at most 1."
            )

    @property
    def hides_collectives(self) -> bool:
        """Whether a collective can run beside kernels."""
        return not self.blocking_collectives

    @property
    def bytes_per_s_to_host(self) -> float:
        """`host_link_bandwidth`, or that of PCIe gen 5 if it is not given."""
        return self.host_link_bandwidth or _PCIE_GEN5

    @property
    def flops_32bit_exact(self) -> float:
        """Of float32 products that are not rounded to TF32, per second."""
        per_byte = _INSTRUCTIONS_PER_BYTE.get(self.name)
        if per_byte is None:
            return self.flops_32bit
        return min(per_byte * self.memory_bandwidth, self.flops_32bit)

    @property
    def instructions_per_byte(self) -> float:
        """Instructions on elements that take as long as moving a byte: what XLA weighs computing a
        value again against writing it by. That of an H100 for devices that are not listed."""
        return _INSTRUCTIONS_PER_BYTE.get(self.name, INSTRUCTIONS_PER_BYTE)


# Instructions on elements that take as long as moving one byte, of an H100: its float32 rate over
# its memory's (`DeviceSpec.instructions_per_byte`).
INSTRUCTIONS_PER_BYTE = 20.0

# Links to the host, each way: PCIe ×16 of gen 3, gen 4 and, for all others, gen 5. An H200 was seen
# at 65 GB/s.
_PCIE_GEN5 = 50e9
_HOST_LINKS = {
    "v100": 11e9, "v100-32gb": 11e9, "t4": 11e9, "l4": 11e9, "a10g": 22e9, "l40s": 22e9,
    "a100-pcie": 22e9, "a100-pcie-80gb": 22e9, "a100-sxm-40gb": 22e9, "a100-sxm": 22e9,
    "h200-sxm": 65e9, "cpu": 4e9,
}  # fmt: skip

# Rates, memory and its bandwidth are from the vendors' data sheets, without sparsity. Links are the
# data sheet's less protocol overhead (about a tenth; more on PCIe); networks are those of a common
# machine with this device, named in the comment.
DEVICES: dict[str, DeviceSpec] = {
    spec.name: replace(spec, host_link_bandwidth=_HOST_LINKS.get(spec.name))
    for spec in (
        # p3.16xlarge: NVLink 8 per host (150 GB/s each way per device), 25 Gb/s between hosts.
        DeviceSpec("v100", 125e12, 15.7e12, 16e9, 0.9e12, 130e9, 25e9 / 8, efficiency=0.55),
        # p3dn.24xlarge: the same with 32 GB, 100 Gb/s between hosts.
        DeviceSpec("v100-32gb", 125e12, 15.7e12, 32e9, 0.9e12, 130e9, 100e9 / 8, efficiency=0.55),
        # T4: PCIe gen 3 ×16, 50 Gb/s per host.
        DeviceSpec("t4", 65e12, 8.1e12, 16e9, 0.32e12, 11e9, 50e9 / 8, efficiency=0.4),
        # A10G: PCIe gen 4 ×16, 100 Gb/s per host (g5.48xlarge).
        DeviceSpec("a10g", 70e12, 35e12, 24e9, 0.6e12, 22e9, 100e9 / 8),
        # L4: PCIe gen 4 ×8, 100 Gb/s per host.
        DeviceSpec("l4", 121e12, 60e12, 24e9, 0.3e12, 12e9, 100e9 / 8),
        # L40S: PCIe gen 4 ×16, 200 Gb/s per host.
        DeviceSpec("l40s", 362e12, 183e12, 48e9, 0.864e12, 22e9, 25e9),
        # A100 40 GB on PCIe gen 4: one link of about 25 GB/s per device.
        DeviceSpec("a100-pcie", 312e12, 156e12, 40e9, 1.55e12, 22e9, 25e9),
        # A100 80 GB on PCIe gen 4.
        DeviceSpec("a100-pcie-80gb", 312e12, 156e12, 80e9, 1.935e12, 22e9, 25e9),
        # p4d.24xlarge: NVLink 300 GB/s each way per device, 4 × 100 Gb/s per host.
        DeviceSpec("a100-sxm-40gb", 312e12, 156e12, 40e9, 1.555e12, 270e9, 50e9),
        # A100 80 GB SXM: NVLink 300 GB/s each way per device, 8 × 200 Gb/s per host.
        DeviceSpec("a100-sxm", 312e12, 156e12, 80e9, 2.0e12, 270e9, 200e9),
        # H100 on PCIe gen 5 ×16, 400 Gb/s per host.
        DeviceSpec("h100-pcie", 756e12, 378e12, 80e9, 2.0e12, 45e9, 50e9),
        # DGX H100: NVLink 450 GB/s each way per device, 8 × 400 Gb/s InfiniBand per host.
        DeviceSpec("h100-sxm", 989e12, 494e12, 80e9, 3.35e12, 400e9, 400e9),
        # H200: the same chip with 141 GB of faster memory; 790 TFLOP/s seen on an 8192³ product.
        DeviceSpec("h200-sxm", 989e12, 494e12, 141e9, 4.8e12, 400e9, 400e9, efficiency=0.8),
        # DGX B200: NVLink 900 GB/s each way per device, 8 × 400 Gb/s InfiniBand per host.
        DeviceSpec("b200-sxm", 2250e12, 1125e12, 180e9, 8.0e12, 800e9, 400e9),
        # Virtual CPU devices of one process: collectives are memory copies between threads. Where
        # devices share cores, all figures shrink alike.
        DeviceSpec(
            *("cpu", 2.5e10, 2.5e10, 8e9, 1e10, 4e9, 1e9, 2e-5, 1e-4, 1.0),
            blocking_collectives=True,
            patch_element_s=2.5e-9,
        ),
    )
}


# Float32 rates without tensor cores, by the vendors' data sheets, over the memory's.
_INSTRUCTIONS_PER_BYTE = {
    name: flops / DEVICES[name].memory_bandwidth
    for names, flops in {
        ("v100", "v100-32gb"): 15.7e12,
        ("t4",): 8.1e12,
        ("a10g",): 31.2e12,
        ("l4",): 30.3e12,
        ("l40s",): 91.6e12,
        ("a100-pcie", "a100-pcie-80gb", "a100-sxm-40gb", "a100-sxm"): 19.5e12,
        ("h100-pcie",): 51e12,
        ("h100-sxm", "h200-sxm"): 67e12,
        ("b200-sxm",): 75e12,
    }.items()
    for name in names
}


# The preset of a device by a part of the vendor's name; the first match counts.
_PRESETS_BY_NAME = (
    ("B200", "b200-sxm"),
    ("H200", "h200-sxm"),
    ("H100 PCI", "h100-pcie"),
    ("H100", "h100-sxm"),
    ("A100-PCI", "a100-pcie"),
    ("A100 80GB PCI", "a100-pcie-80gb"),
    ("A100-SXM4-40GB", "a100-sxm-40gb"),
    ("A100", "a100-sxm"),
    ("V100-SXM2-32GB", "v100-32gb"),
    ("V100-SXM3-32GB", "v100-32gb"),
    ("V100", "v100"),
    ("A10G", "a10g"),
    ("L40S", "l40s"),
    ("NVIDIA L4", "l4"),
    ("TESLA T4", "t4"),
)


FALLBACK_PRESET = "h100-sxm"


def known_preset(platform: str, kind: str) -> str | None:
    """The preset of a device by its platform and its name (`jax.Device.device_kind`), if any."""
    if platform == "cpu":
        return "cpu"
    return next((preset for sign, preset in _PRESETS_BY_NAME if sign in kind.upper()), None)


def preset_of(platform: str, kind: str) -> str:
    """The same; an unknown device gives a warning and the preset of an H100."""
    preset = known_preset(platform, kind)
    if preset is not None:
        return preset
    warnings.warn(
        f"autopar has no preset for the device {kind!r} and prices it as an H100; shardings stay "
        "correct, estimates may be off.",
        stacklevel=3,
    )
    return FALLBACK_PRESET


def device_spec(device: str | DeviceSpec) -> DeviceSpec:
    if isinstance(device, DeviceSpec):
        return device
    if not isinstance(device, str) or device not in DEVICES:
        near = near_names(device, DEVICES) if isinstance(device, str) else ""
        raise ArgumentError(
            f"device={device!r} is not a preset{near}; choose one of {sorted(DEVICES)} or pass an "
            "autopar.DeviceSpec with your own figures."
        )
    return DEVICES[device]


_SHARES_ALPHA_S = 30e-6


def share_of(device: DeviceSpec, num_ranks: int) -> DeviceSpec:
    """One of `num_ranks` equal shares of a device. NCCL's blocks carry bytes between shares through
    the device's memory; with the few that a share can spare, they reach about the same share of the
    device's own links (an eighth of an H200: 40 GB/s, where 450 / 8 = 56). The smallest collective
    takes 24 to 38 µs between two or four shares of an H200, and 42 to 52 µs between eight."""
    return replace(
        device,
        flops_16bit=device.flops_16bit / num_ranks,
        flops_32bit=device.flops_32bit / num_ranks,
        memory_bytes=device.memory_bytes / num_ranks,
        memory_bandwidth=device.memory_bandwidth / num_ranks,
        intra_host_bandwidth=device.intra_host_bandwidth / num_ranks,
        intra_host_alpha_s=max(device.intra_host_alpha_s, _SHARES_ALPHA_S),
        host_link_bandwidth=device.bytes_per_s_to_host / num_ranks,
    )


def preset_or_share(preset: str, num_ranks: int) -> str | DeviceSpec:
    """A device for `ClusterSpec`: the preset, or a share of it if ranks share devices."""
    return preset if num_ranks == 1 else share_of(device_spec(preset), num_ranks)
