"""The process of one host in one mesh, as a Ray actor.

It joins JAX's process group, runs commands in order, and answers heartbeats meanwhile. The actor's
event loop only hands commands to the executor's thread and waits for answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import importlib
import os
import socket
import stat
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from autopar.errors import AutoparError
from autopar.runtime.ray.agent import started
from autopar.runtime.ray.environment import Versions, check_preloaded, versions_here
from autopar.runtime.remote import command_thread
from autopar.runtime.remote.command_thread import CommandThread, Standstill
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.remote.progress import State, WorkerProgress

_BETWEEN = (__file__, command_thread.__file__)
_TRACING = "/ray/util/tracing/"
# Of JAX's service that joins the processes of a mesh. It measures silence by the wall clock, so a
# jump forward beyond its limit (100 s), or back beyond the last sign of life, ends all processes.
# The driver looks for silence by itself; with a long limit, signs of life are as old as the mesh.
_JAX_HEARTBEAT_LIMIT_S = 1_000_000


@dataclass(frozen=True)
class Hello:
    """What a process reports about itself before it has touched a device."""

    versions: Versions
    pid: int
    started: int
    logs: tuple[str, ...]

    def process(self) -> dict[str, Any]:
        """The process, as the agent of its node knows it."""
        return {"pid": self.pid, "started": self.started, "logs": list(self.logs)}


@dataclass(frozen=True)
class Joined:
    """What a process reports when it has joined its mesh: the devices that JAX gives it."""

    device_kind: str
    num_local_devices: int
    num_mesh_devices: int


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    rss_bytes:    memory of the process.
    device_bytes: memory in use on its fullest device; None if JAX does not report it.
    """

    state: State
    standstill: Standstill | None
    rss_bytes: int
    device_bytes: int | None


@dataclass(frozen=True)
class CommandOutcome:
    """A command's value, or what it raised; `error` is set for errors of autopar."""

    value: Any = None
    error: AutoparError | None = None
    raised: str = ""
    traceback: str = ""


class MeshWorker:
    def __init__(self, env: Mapping[str, str]) -> None:
        # Ray hides all GPUs from actors that reserve none; the agent has reserved them.
        os.environ.update(env)
        self._commands: CommandThread | None = None
        self._devices: list[Any] = []

    async def hello(self) -> Hello:
        check_preloaded(os.environ.get("LD_PRELOAD", ""))
        pid = os.getpid()
        return Hello(versions_here(), pid, started(pid), _log_files())

    async def start(
        self, place: WorkerPlace, coordinator: str | None, executor: str, limit_s: float
    ) -> CommandOutcome:
        """Join the mesh, at the coordinator's address if it has several processes, and create the
        executor, given as 'module:class'."""
        progress = WorkerProgress(progress_path(place))
        self._commands = CommandThread(progress)
        begin = partial(self._begin, place, coordinator, executor, limit_s, progress)
        return await _outcome(self._commands.submit(0, "start", begin))

    async def submit(self, number: int, is_step: bool, command: str, *args: Any) -> CommandOutcome:
        assert self._commands is not None, "start() comes before submit()"
        call = partial(self._call, command, args)
        return await _outcome(self._commands.submit(number, command, call, is_step))

    async def heartbeat(self) -> Beat:
        commands = self._commands
        return Beat(
            commands.progress.state() if commands else State(),
            commands.standstill() if commands else None,
            _rss_bytes(),
            _device_bytes(self._devices),
        )

    async def stop(self, limit_s: float) -> None:
        """Leave the mesh, if the other processes leave too within the limit."""
        leave = asyncio.get_running_loop().run_in_executor(None, self._leave)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(leave, limit_s)

    def _begin(
        self,
        place: WorkerPlace,
        coordinator: str | None,
        executor: str,
        limit_s: float,
        progress: WorkerProgress,
    ) -> Joined:
        if place.platform == "cpu":
            os.environ.setdefault("PJRT_NPROC", str(num_cpu_threads(len(place.devices))))
        if coordinator is not None:
            if place.platform == "cpu":
                jax.config.update("jax_cpu_collectives_implementation", "gloo")
            jax.distributed.initialize(
                coordinator,
                place.num_processes,
                place.rank,
                initialization_timeout=int(limit_s),
                heartbeat_timeout_seconds=_JAX_HEARTBEAT_LIMIT_S,
                coordinator_bind_address=_bind_address(coordinator) if place.rank == 0 else None,
            )
        self._devices = jax.local_devices()
        module, _, name = executor.partition(":")
        self._executor = getattr(importlib.import_module(module), name)(place, progress)
        kind = self._devices[0].device_kind
        return Joined(kind, len(self._devices), len(jax.devices()))

    def _call(self, command: str, args: tuple[Any, ...]) -> Any:
        if command.startswith("_"):
            raise AttributeError(f"{command!r} is not a command")
        return getattr(self._executor, command)(*args)

    def _leave(self) -> None:
        close = getattr(getattr(self, "_executor", None), "close", None)
        if close is not None:
            close()
        if jax.distributed.is_initialized():
            jax.distributed.shutdown()
        if self._devices and self._devices[0].platform == "gpu":
            _destroy_contexts()


def _destroy_contexts() -> None:
    """Leave the GPUs for good. A process that is killed with a CUDA context can make the MPS server
    refuse those that start next."""
    with contextlib.suppress(OSError):
        cuda = ctypes.CDLL("libcuda.so.1")
        num_devices = ctypes.c_int(0)
        cuda.cuDeviceGetCount(ctypes.byref(num_devices))
        for device in range(num_devices.value):
            cuda.cuDevicePrimaryCtxReset_v2(device)


def num_cpu_threads(num_devices: int) -> int:
    """How many threads JAX's CPU devices share. A collective holds one thread per device while it
    waits for other processes, and some must be left to send the tiles that those wait for.
    Otherwise meshes that send to each other can deadlock: with as many threads as cores, a pipeline
    of meshes of two processes each hung occasionally (the cause is inferred from stacks, not
    proven)."""
    return max(os.cpu_count() or 1, 2 * num_devices + 4)


def _bind_address(coordinator: str) -> str | None:
    """Where JAX's coordinator listens: at its own address alone, and not on all interfaces; None if
    that address belongs to a router. Raises if nothing can listen there: JAX would crash."""
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, int(port)))
            return coordinator
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            probe.bind(("", int(port)))
            return None


def progress_path(place: WorkerPlace) -> str:
    return os.path.join(place.folder, f"worker-{place.worker}.progress")


async def _outcome(answer: Future[Any]) -> CommandOutcome:
    try:
        return CommandOutcome(await asyncio.wrap_future(answer))
    except BaseException as error:
        text = _traceback_of(error)
        sent_error = error if isinstance(error, AutoparError) and _travels(error) else None
        return CommandOutcome(None, sent_error, f"{type(error).__name__}: {error}", text)


def _traceback_of(error: BaseException) -> str:
    """The traceback as Python prints it, without the calls between Ray and the executor."""
    said = traceback.TracebackException.from_exception(error)
    inside = [f for f in said.stack if f.filename not in _BETWEEN and _TRACING not in f.filename]
    said.stack = traceback.StackSummary.from_list(inside)
    return "".join(said.format())


def _travels(error: AutoparError) -> bool:
    from ray import cloudpickle

    try:
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:
        return False
    return True


def _log_files() -> tuple[str, ...]:
    """The files of this process's standard output and standard error."""
    paths = []
    for number in (1, 2):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if stat.S_ISREG(os.stat(path).st_mode):
                paths.append(path)
    return tuple(dict.fromkeys(paths))


def _rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _device_bytes(devices: list[Any]) -> int | None:
    stats = [device.memory_stats() or {} for device in devices if device.platform != "cpu"]
    used = [s["bytes_in_use"] for s in stats if "bytes_in_use" in s]
    return max(used, default=None)
