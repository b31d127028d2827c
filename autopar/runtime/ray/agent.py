"""One agent per Ray node: holds its devices and the session's folder, and watches its processes.

It must answer while the workers beside it are dead or hang, so it does as little as possible. It is
sent to its node by value and imports nothing from autopar: without JAX a process starts faster and
is smaller. Its arguments and answers are plain Python data.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from typing import Any

_PREFIX = "autopar-"
_TAIL_BYTES = 20_000


class NodeAgent:
    def __init__(self, session: str, node_number: int) -> None:
        root = tempfile.gettempdir()
        _remove_folders_of_the_dead(root)
        self._folder = os.path.join(root, f"{_PREFIX}{session}-{node_number}")
        os.mkdir(self._folder, mode=0o700)
        with open(os.path.join(self._folder, "owner"), "w") as file:
            file.write(f"{os.getpid()} {started(os.getpid())}")
        self._raylet = os.getppid()
        self._oom_kills = _oom_kills()
        self._ports: set[int] = set()

    def hello(self) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        return {
            "node_id": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),
            "name": socket.gethostname(),
            "folder": self._folder,
            "pid": os.getpid(),
            "gpu_ids": [str(i) for i in ray.get_gpu_ids()],
            "gpu_names": _gpu_names(),
        }

    def alive(self) -> bool:
        return True

    def free_port(self) -> int:
        """A port that nothing listens on and that was not given out before."""
        while True:
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            if port not in self._ports:
                self._ports.add(port)
                return port

    def report(self, processes: list[dict[str, Any]]) -> dict[str, Any]:
        """The state of processes: whether they run, the ends of their logs, their progress; and
        whether Ray still runs on this node: an agent may outlive it by some seconds."""
        reports = [
            {
                "state": _state(process["pid"], process["started"]),
                "log": _tail(process["logs"]),
                "progress": _bytes_of(process["progress"]),
            }
            for process in processes
        ]
        return {
            "processes": reports,
            "oom_kills": _oom_kills() - self._oom_kills,
            "ray_runs": os.getppid() == self._raylet,
        }

    def end(self, processes: list[tuple[int, int]], patience_s: float, limit_s: float) -> list[int]:
        """Wait for processes, given as (number, start), to end, and kill those that are left after
        `patience_s`. Returns the numbers of those that survive even that."""
        now = time.monotonic()
        running = _still_running(processes, now + patience_s)
        for pid, _ in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [pid for pid, _ in _still_running(running, now + limit_s)]

    def remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def started(pid: int) -> int:
    """When a process began, in the kernel's ticks: with its number, this identifies it uniquely."""
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, which may contain anything."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _state(pid: int, start: int) -> str:
    """The kernel's letter (R, S, D, T …); empty if the process has ended."""
    try:
        fields = _stat(pid)
    except (OSError, IndexError):
        return ""
    return "" if int(fields[19]) != start or fields[0] in "ZX" else fields[0]


def _has_threads(pid: int, start: int) -> bool:
    """Whether an ending process has threads left, which may hold its sockets open."""
    with contextlib.suppress(OSError, IndexError):
        return int(_stat(pid)[19]) == start and len(os.listdir(f"/proc/{pid}/task")) > 1
    return False


def _still_running(processes: list[tuple[int, int]], until_s: float) -> list[tuple[int, int]]:
    while True:
        processes = [process for process in processes if _state(*process) or _has_threads(*process)]
        if not processes or time.monotonic() >= until_s:
            return processes
        time.sleep(0.02)


def _tail(paths: list[str]) -> str:
    tails = []
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            tails.append(file.read().decode(errors="replace").strip())
    return "\n".join(tail for tail in tails if tail)


def _bytes_of(path: str) -> bytes:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(4096)
    return b""


def _oom_kills() -> int:
    """How many processes the kernel has killed to free memory since this machine started."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat") as file:
        for line in file:
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _gpu_names() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in said.stdout.splitlines() if line.strip()]


def _remove_folders_of_the_dead(root: str) -> None:
    """Remove the folders of sessions whose driver was killed."""
    for entry in os.scandir(root):
        if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(entry.path, "owner")) as file:
                pid, start = file.read().split()
            if not _state(int(pid), int(start)):
                shutil.rmtree(entry.path, ignore_errors=True)
