"""Environments for ranks on this host: several share a GPU, each has its own, or they use the CPU.

    number of ranks → variables for the process of each rank

A *rank* is one process with one device. From NCCL 2.30 on, several ranks may use one GPU if asked
to, and CUDA's MPS daemon runs them side by side, each on its share of the multiprocessors. A
program of eight ranks then runs on a host with one GPU: its processes, its NCCL communicators and
its XLA programs are the real ones. Each rank is an eighth of the GPU, and what NVLink would carry
goes through the GPU's own memory, so times are those of a small cluster of its own kind.

The objects here are context managers. A guard process (`guard`) ends the daemon even if this
process is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

from autopar.errors import ArgumentError, ClusterError
from autopar.runtime.ranks.guard import MPS_CONTROL

NCCL_VARIABLE = "AUTOPAR_NCCL"
SHARE_VARIABLE = "AUTOPAR_RANKS_PER_GPU"
OLDEST_NCCL = (2, 30)
MOST_RANKS_PER_GPU = 48  # clients of an MPS server
_USED_MEMORY = 0.9  # of the GPU by XLA; the rest is for CUDA contexts and NCCL's buffers
# Streams run side by side up to a process's connections. On an H200 all processes together had 120
# to 124: the fourth with 32 each could not start, nor the eleventh with 12. A mesh starts while
# another on the same devices still holds its arrays, so two processes per rank must fit.
_CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"  # if set, it decides
_CONNECTIONS = 112
_MOST_CONNECTIONS = 12
# Of the multiprocessors, for a rank. Blocks of a collective wait for each other, so all must be
# resident: with 12 % (15 of an H200's 132) a DLRM's all-to-alls of eight hung in every launch,
# with 14, 18, 25 and 100 % in none.
_LEAST_PERCENT = 18
_START_S = 20.0
_PROBE_S = 60.0
_ON_GPU = {"JAX_PLATFORMS": "cuda,cpu", "JAX_LOCAL_DEVICE_IDS": "0"}  # whatever this process uses
_HOST_DEVICES = "--xla_force_host_platform_device_count"
_SPLIT = "--xla_cpu_multi_thread_eigen"  # whether operations are split among threads
# Defaults for ranks that share a GPU; the environment overrides them. NCCL's blocks take
# multiprocessors from a rank's compute. With two of them, an eighth of an H200 has 74 to 97
# TFLOP/s in bfloat16 and 40 GB/s between ranks: about the ratio of a whole H100 and its NVLink.
_TUNING = {"NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}


class Ranks(ABC):
    """Where ranks run. Enter it before their processes start; leave it after they have ended."""

    platform = "gpu"

    def __init__(self, num_ranks: int) -> None:
        if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or num_ranks < 1:
            raise ArgumentError(f"num_ranks={num_ranks!r}: needs a whole number ≥ 1.")
        self.num_ranks = num_ranks

    @abstractmethod
    def environment(self, rank: int = 0) -> dict[str, str]:
        """Variables to set for the process of this rank, besides those of this process."""

    @abstractmethod
    def describe(self) -> str:
        """Such as '8 ranks on one NVIDIA H200'."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:  # noqa: B027
        """End what was started. May be called twice."""

    def recover(self) -> None:  # noqa: B027
        """Call it when a rank has died, after all have ended and before others start."""


class CpuRanks(Ranks):
    """Ranks on the CPU, with gloo between them."""

    platform = "cpu"

    def __init__(self, num_ranks: int, devices_per_rank: int = 1) -> None:
        super().__init__(num_ranks)
        self.devices_per_rank = devices_per_rank

    def environment(self, rank: int = 0) -> dict[str, str]:
        flags = os.environ.get("XLA_FLAGS", "").split()
        flags = [f for f in flags if not f.startswith(_HOST_DEVICES)]
        if self._cores_per_rank == 1 and not any(f.startswith(_SPLIT) for f in flags):
            flags.append(f"{_SPLIT}=false")
        return {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self.devices_per_rank),
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "PJRT_NPROC": os.environ.get("PJRT_NPROC") or str(self._cores_per_rank),
            "XLA_FLAGS": " ".join(flags),
        }

    @property
    def _cores_per_rank(self) -> int:
        """XLA splits operations among its threads, and runs independent ones side by side: more
        threads than cores cost time and gain nothing. XLA itself has one per device at least,
        which is enough for collectives (`runtime.threads`)."""
        return max(1, (os.cpu_count() or 1) // self.num_ranks)

    def describe(self) -> str:
        return f"{self.num_ranks} ranks on the CPU"


class OwnGpus(Ranks):
    """Ranks with a GPU each."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._gpus = gpu_names()
        if len(self._gpus) < num_ranks:
            raise ClusterError(
                f"{num_ranks} ranks with a GPU each: this host has {len(self._gpus)} GPUs."
            )

    def environment(self, rank: int = 0) -> dict[str, str]:
        return {**_ON_GPU, "CUDA_VISIBLE_DEVICES": str(rank)}

    def describe(self) -> str:
        return f"{self.num_ranks} ranks on {self.num_ranks} × {self._gpus[0]}"


class SharedGpu(Ranks):
    """Ranks that share the GPUs of this host: equally many on each, neighbours together.

    nccl: a libnccl.so.2 from 2.30 on. Default: the file that AUTOPAR_NCCL names, or the installed
          package `nvidia-nccl-cu13` or `nvidia-nccl-cu12`.
    mps:  whether ranks run side by side. Without the MPS daemon they take turns on the GPU: results
          are the same, but collectives are very slow.
    """

    def __init__(self, num_ranks: int, *, nccl: str | Path | None = None, mps: bool = True) -> None:
        super().__init__(num_ranks)
        self._gpus = gpu_names()
        if not self._gpus:
            raise ClusterError(
                "Ranks cannot share a GPU here: nvidia-smi finds none. Use CPU ranks (autopar "
                "launch --platform cpu), or check the driver with nvidia-smi."
            )
        self.num_gpus = min(len(self._gpus), num_ranks)
        self.ranks_per_gpu = -(-num_ranks // self.num_gpus)
        if self.ranks_per_gpu > MOST_RANKS_PER_GPU:
            raise ArgumentError(
                f"num_ranks={num_ranks} on {self.num_gpus} GPUs: at most {MOST_RANKS_PER_GPU} "
                "processes can share a GPU."
            )
        self.nccl_file, self.nccl_version = find_nccl(nccl)
        self._mps = mps
        self._folder = ""
        self._guard: Guard | None = None

    def __enter__(self) -> Self:
        if self._mps:
            self._start_mps()
        return self

    def close(self) -> None:
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def recover(self) -> None:
        """Start another MPS daemon: a process that dies while it uses the GPU leaves the server of
        its daemon unusable for all."""
        if self._guard is not None:
            self.close()
            self._start_mps()

    def environment(self, rank: int = 0) -> dict[str, str]:
        share = self.ranks_per_gpu
        preloaded = [str(self.nccl_file), *os.environ.get("LD_PRELOAD", "").split(":")]
        env = {
            **_ON_GPU,
            "LD_PRELOAD": ":".join(dict.fromkeys(filter(None, preloaded))),
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            **{name: os.environ.get(name, value) for name, value in _TUNING.items()},
            "CUDA_VISIBLE_DEVICES": str(rank // share),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{_USED_MEMORY / share:.4f}",
            SHARE_VARIABLE: str(share),
        }
        if self._mps:
            env |= self._mps_variables()
            env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(max(_LEAST_PERCENT, 100 // share))
            own = max(1, min(_MOST_CONNECTIONS, _CONNECTIONS // (2 * share)))
            env[_CONNECTIONS_VARIABLE] = os.environ.get(_CONNECTIONS_VARIABLE, str(own))
        return env

    def describe(self) -> str:
        gpus = "one" if self.num_gpus == 1 else f"{self.num_gpus} ×"
        how = "" if self._mps else ", taking turns"
        return f"{self.num_ranks} ranks on {gpus} {self._gpus[0]}{how}, NCCL {self.nccl_version}"

    def _mps_variables(self) -> dict[str, str]:
        return {"CUDA_MPS_PIPE_DIRECTORY": self._folder, "CUDA_MPS_LOG_DIRECTORY": self._folder}

    def _start_mps(self) -> None:
        if shutil.which(MPS_CONTROL) is None:
            raise ClusterError(
                f"Ranks share a GPU side by side only with CUDA's MPS daemon, and {MPS_CONTROL} is "
                "not on PATH. It comes with the driver's utilities (Debian, Ubuntu: package "
                "nvidia-compute-utils-…). Without it ranks can take turns, slowly: SharedGpu(…, "
                "mps=False), autopar launch --no-mps."
            )
        self._folder = tempfile.mkdtemp(prefix="autopar-mps-", dir="/tmp")  # a short socket path
        self._guard = Guard()
        self._guard.add_mps(self._folder)
        env = {**os.environ, **self._mps_variables()}
        env.pop("LD_PRELOAD", None)
        try:
            run = subprocess.run(
                [MPS_CONTROL, "-d"], env=env, timeout=_START_S, capture_output=True, text=True
            )
            said = (run.stdout + run.stderr).strip() or f"exit code {run.returncode}"
        except subprocess.TimeoutExpired:
            run, said = None, f"no answer within {_START_S:.0f} s"
        if run is None or run.returncode or not self._is_listening():
            self.close()
            raise ClusterError(
                f"CUDA's MPS daemon did not start: {said}. Is another one running for this GPU? "
                f"(`echo quit | {MPS_CONTROL}` ends it.) A GPU in exclusive mode needs that one; "
                "in a container, MPS needs the host's IPC namespace."
            )

    def _is_listening(self) -> bool:
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s:
            if (Path(self._folder) / "control").exists():
                return True
            time.sleep(0.05)
        return False


class Guard:
    """A process that ends what it was told of when this process ends; see `guard`."""

    def __init__(self) -> None:
        path = Path(__file__).with_name("guard.py")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )

    def add_mps(self, folder: str) -> None:
        self._tell(f"mps {folder}")

    def add_group(self, group: int) -> None:
        self._tell(f"process {group}")

    def forget_group(self, group: int) -> None:
        self._tell(f"gone {group}")

    def close(self) -> None:
        """End everything, and wait for it."""
        pipe = self._process.stdin
        assert pipe is not None
        if not pipe.closed:
            pipe.close()
        try:
            self._process.wait(_PROBE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        pipe.write(f"{line}\n".encode())
        pipe.flush()


def gpu_ranks(num_ranks: int, *, nccl: str | Path | None = None, mps: bool = True) -> Ranks:
    """Ranks with a GPU each if the host has enough, else ranks that share what it has."""
    if len(gpu_names()) >= num_ranks:
        return OwnGpus(num_ranks)
    return SharedGpu(num_ranks, nccl=nccl, mps=mps)


def count_gpus() -> int:
    return len(gpu_names())


def gpu_names() -> list[str]:
    """The GPUs of this host, by nvidia-smi: it opens none of them."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return list(filter(None, run.stdout.splitlines())) if run.returncode == 0 else []


def find_nccl(given: str | Path | None = None) -> tuple[Path, str]:
    """The NCCL that ranks on one GPU can use, and its version."""
    wanted = given or os.environ.get(NCCL_VARIABLE)
    if wanted:
        path = Path(wanted).resolve()
        source = "nccl" if given else f"the variable {NCCL_VARIABLE}"
        if not path.is_file():
            raise ClusterError(
                f"{source}: no file {str(wanted)!r}. Give the path of a libnccl.so.2."
            )
    else:
        path = _installed_nccl()
    remedy = (
        "pip install -U 'nvidia-nccl-cu13>=2.30' (or -cu12, as your JAX has it), or give the path "
        f"of a newer libnccl.so.2 in {NCCL_VARIABLE}."
    )
    if path is None:
        raise ClusterError(
            f"Ranks that share a GPU need NCCL 2.30 or newer, and none is installed: {remedy}"
        )
    version = _version_of(path)
    if version[:2] < OLDEST_NCCL:
        text = ".".join(map(str, version))
        raise ClusterError(
            f"Ranks that share a GPU need NCCL 2.30 or newer; {path} is {text}: {remedy}"
        )
    return path, ".".join(map(str, version))


def _installed_nccl() -> Path | None:
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "libnccl.so.2":
                return Path(str(file.locate()))
    return None


def _version_of(library: Path) -> tuple[int, int, int]:
    """NCCL's own answer, asked in a process of its own: a library stays loaded."""
    code = (
        "import ctypes, sys; n = ctypes.c_int(); "
        "ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(n)); print(n.value)"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", code, str(library)],
        capture_output=True,
        text=True,
        timeout=_PROBE_S,
    )
    if run.returncode:
        raise ClusterError(f"{library} cannot be loaded as NCCL: {run.stderr.strip()[-300:]}")
    number = int(run.stdout)
    return number // 10000, number // 100 % 100, number % 100
