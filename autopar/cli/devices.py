"""Devices on the command line: from `--platform`, `--devices` and `--mesh` to devices, a shape."""

from __future__ import annotations

import os
from typing import Any

import jax

from autopar._jax import has_devices
from autopar.errors import ArgumentError

VIRTUAL_DEVICES = 8


def use_devices(platform: str) -> None:
    """Select the GPUs or virtual CPU devices. `platform`: "cpu", "gpu" or "auto" (GPUs if there are
    any). Has no effect once JAX has opened its devices."""
    if has_devices():
        return
    counted = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if platform != "gpu" and not counted:
        jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")


def first_devices(count: int | None) -> tuple[Any, ...]:
    """The first `count` devices of this process, or all."""
    devices = tuple(jax.local_devices())
    if count is not None and count > len(devices):
        raise ArgumentError(f"--devices {count}: requested {count} devices, found {len(devices)}.")
    return devices[:count]


def parse_mesh(text: str | None) -> tuple[int, ...] | None:
    """`8` or `2x4`."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts) or len(parts) > 2:
        raise ArgumentError(f"--mesh {text}: needs one or two sizes, such as 8 or 2x4.")
    return tuple(map(int, parts))
