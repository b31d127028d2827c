"""From the driver's environment and the user's variables to a worker's environment; versions.

JAX reads most of its variables when it is imported, so Ray sets them before the worker starts.
"""

from __future__ import annotations

import platform as _platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from autopar.errors import ArgumentError, ClusterError

_PASSED_ON = ("JAX_", "XLA_", "NCCL_")
# These select the devices and the group of a process: each worker has its own.
_NOT_PASSED_ON = frozenset(
    (
        "JAX_PLATFORMS",
        "JAX_PLATFORM_NAME",
        "JAX_NUM_CPU_DEVICES",
        "JAX_CUDA_VISIBLE_DEVICES",
        "JAX_ROCM_VISIBLE_DEVICES",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_COORDINATOR_BIND_ADDRESS",
        "JAX_NUM_PROCESSES",
        "JAX_PROCESS_ID",
        "JAX_LOCAL_DEVICE_IDS",
        "XLA_FLAGS",
    )
)
# Plans count on 90 % of a GPU's memory, but JAX takes 75 % by default. The rest is for NCCL.
_MEMORY_FRACTION = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
_DEVICE_COUNT = "--xla_force_host_platform_device_count"


def check_environment(env: object) -> dict[str, str]:
    """The user's variables, checked to be names and texts."""
    if env is None:
        return {}
    if not isinstance(env, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str) for name, value in env.items()
    ):
        raise ArgumentError(
            f"init(env={env!r}): needs a dict of names and texts, such as "
            "{'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.9'}."
        )
    return dict(env)


def worker_environment(
    driver: Mapping[str, str],
    wanted: Mapping[str, str],
    platform: str,
    num_devices: int,
    gpu_ids: Sequence[str] = (),
) -> dict[str, str]:
    """Variables of a worker with this many devices. The user's `wanted` ones take precedence, then
    those that the devices need, then the driver's."""
    env = {
        name: value
        for name, value in driver.items()
        if name.startswith(_PASSED_ON) and name not in _NOT_PASSED_ON
    }
    flags = wanted.get("XLA_FLAGS", driver.get("XLA_FLAGS", ""))
    kept = [flag for flag in flags.split() if not flag.startswith(_DEVICE_COUNT)]
    if platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
        kept.append(f"{_DEVICE_COUNT}={num_devices}")
    else:
        env["JAX_PLATFORMS"] = "cuda,cpu"
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        env.setdefault(*_MEMORY_FRACTION)
    env.update(wanted)
    env["XLA_FLAGS"] = " ".join(kept)
    return env


@dataclass(frozen=True)
class Versions:
    """Versions that must be the same everywhere; empty if a process lacks the package."""

    python: str
    autopar: str
    jax: str
    jaxlib: str
    ray: str
    cuda: str
    nccl: str


def versions_here() -> Versions:
    """The versions of this process. CUDA and NCCL are the libraries that pip installed for JAX;
    those of the system are unknown here."""
    installed = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        installed[name] = distribution.version
    cuda = [
        f"{name} {version}"
        for name, version in sorted(installed.items())
        if name.startswith(("nvidia-cuda-runtime", "jax-cuda"))
    ]
    nccl = [v for name, v in sorted(installed.items()) if name.startswith("nvidia-nccl")]
    return Versions(
        ".".join(_platform.python_version_tuple()[:2]),
        getattr(sys.modules["autopar"], "__version__", ""),
        installed.get("jax", ""),
        installed.get("jaxlib", ""),
        installed.get("ray", ""),
        ", ".join(cuda),
        ", ".join(nccl),
    )


def check_versions(driver: Versions, workers: Sequence[tuple[str, Versions]]) -> None:
    """Check that all workers, given as (node, versions), have equal versions, and those of the
    driver for the packages that make programs."""
    for name in ("python", "autopar", "jax", "jaxlib"):
        _check_same(name, [("the driver", driver), *workers])
    for name in asdict(driver):
        _check_same(name, workers)


def _check_same(name: str, processes: Sequence[tuple[str, Versions]]) -> None:
    first = processes[0]
    for where, versions in processes[1:]:
        here, there = getattr(first[1], name), getattr(versions, name)
        if here != there:
            raise ClusterError(
                f"The versions of {name} differ: {here or 'none'} on {first[0]}, "
                f"{there or 'none'} on {where}. Install the same one everywhere."
            )
