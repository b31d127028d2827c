"""Devices on the command line: from `--platform` and `--mesh` to JAX's devices and a mesh shape."""

from __future__ import annotations

import os

from autopar._jax import has_devices
from autopar.errors import ArgumentError

VIRTUAL_DEVICES = 8


def use_devices(platform: str) -> None:
    """`platform`: "cpu", "gpu", or "auto" for the GPUs found, else virtual CPU devices. To be
    called before JAX has opened its devices; later it changes nothing."""
    import jax

    if has_devices():
        return
    counted = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if platform != "gpu" and not counted:
        jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")


def parse_mesh(text: str | None) -> tuple[int, ...] | None:
    """`8` or `2x4`."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) for part in parts) or len(parts) > 2:
        raise ArgumentError(f"--mesh {text}: needs one or two sizes, such as 8 or 2x4.")
    return tuple(map(int, parts))
