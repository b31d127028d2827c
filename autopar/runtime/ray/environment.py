"""From the driver's environment and the user's variables to a worker's environment; versions.

JAX reads most of its variables when it is imported, and the dynamic linker reads LD_PRELOAD when a
program starts. So Ray starts each worker's Python with them.

Workers share GPUs if AUTOPAR_RANKS_PER_GPU says how many devices a GPU counts as. Then the
variables of `SharedGpu.environment()` are all that a worker needs: its NCCL, its MPS daemon, its
share of the memory. Which GPU a worker has is the cluster's choice.
"""

from __future__ import annotations

import ctypes
import os
import platform as _platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from autopar.errors import ArgumentError, ClusterError
from autopar.runtime.ranks.shared_gpu import SHARE_VARIABLE

_PASSED_ON = ("JAX_", "XLA_", "NCCL_")
# Passed on too if the driver itself is one of several processes on a GPU.
_PASSED_ON_SHARES = ("CUDA_MPS_", "CUDA_DEVICE_MAX_CONNECTIONS", "LD_PRELOAD", SHARE_VARIABLE)
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
# Those that `Ranks.environment` sets for one rank: which device it has, and how many.
_OF_ONE_RANK = ("JAX_LOCAL_DEVICE_IDS", "JAX_NUM_CPU_DEVICES")
_GPUS = "CUDA_VISIBLE_DEVICES"
# Every link between meshes has a stream, and CUDA runs that many side by side; by default 8.
_CONNECTIONS = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Plans count on 90 % of a GPU's memory, but JAX takes 75 % by default. The rest is for NCCL. On a
# shared GPU, every process has a CUDA context and buffers of NCCL beside its share.
_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_USED_MEMORY, _USED_SHARED_MEMORY = 0.92, 0.9
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


def shares_per_gpu(driver: Mapping[str, str], wanted: Mapping[str, str]) -> int:
    """How many devices a GPU counts as, by the user's variables or else by the driver's; 1 if
    neither says."""
    given = wanted.get(SHARE_VARIABLE, driver.get(SHARE_VARIABLE, "1"))
    if not (given.isdecimal() and int(given) >= 1):
        raise ArgumentError(
            f"{SHARE_VARIABLE}={given!r}: needs the number of processes that share a GPU, a whole "
            "number ≥ 1, as SharedGpu(…).environment() has it."
        )
    return int(given)


def worker_environment(
    driver: Mapping[str, str],
    wanted: Mapping[str, str],
    platform: str,
    num_devices: int,
    gpu_ids: Sequence[str] = (),
    ranks_per_gpu: int = 1,
) -> dict[str, str]:
    """Variables of a worker with this many devices. The user's `wanted` ones take precedence, then
    those that the devices need, then the driver's. If the user's are those of a rank
    (`Ranks.environment`), the worker still has the devices that it was given here."""
    passed_on = _PASSED_ON + (_PASSED_ON_SHARES if SHARE_VARIABLE in driver else ())
    env = {
        name: value
        for name, value in driver.items()
        if name.startswith(passed_on) and name not in _NOT_PASSED_ON
    }
    of_one_rank = _OF_ONE_RANK + ((_GPUS,) if "JAX_LOCAL_DEVICE_IDS" in wanted else ())
    wanted = {name: value for name, value in wanted.items() if name not in of_one_rank}
    flags = wanted.get("XLA_FLAGS", driver.get("XLA_FLAGS", ""))
    kept = [flag for flag in flags.split() if not flag.startswith(_DEVICE_COUNT)]
    if platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
        kept.append(f"{_DEVICE_COUNT}={num_devices}")
    else:
        env["JAX_PLATFORMS"] = "cuda,cpu"
        env[_GPUS] = ",".join(gpu_ids)
        used = _USED_MEMORY if ranks_per_gpu == 1 else _USED_SHARED_MEMORY / ranks_per_gpu
        env.setdefault(_MEMORY_FRACTION, f"{used:.4g}")
        if ranks_per_gpu == 1:
            env.setdefault(*_CONNECTIONS)
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
    those of the system are unknown here. An NCCL that was preloaded counts instead of pip's."""
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
        preloaded_nccl(os.environ.get("LD_PRELOAD", "")) or ", ".join(nccl),
    )


def preloaded_nccl(preloaded: str) -> str:
    """The version of the NCCL that LD_PRELOAD has added to this process; empty without one."""
    number = ctypes.c_int()
    if not _nccl_files(preloaded):
        return ""
    try:
        ctypes.CDLL(None).ncclGetVersion(ctypes.byref(number))
    except AttributeError:
        return ""
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def check_preloaded(preloaded: str) -> None:
    """Raise if LD_PRELOAD names an NCCL that this process was not started with: the dynamic linker
    only prints a warning."""
    files = _nccl_files(preloaded)
    if files and not preloaded_nccl(preloaded):
        raise ClusterError(
            f"LD_PRELOAD names {files[0]}, but the worker was started without it. Is there such a "
            "library on this node, for its kind of processor?"
        )


def _nccl_files(preloaded: str) -> list[str]:
    return [file for file in preloaded.replace(":", " ").split() if "libnccl" in file]


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
