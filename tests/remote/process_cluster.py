"""Worker processes without Ray: the smallest thing that starts executors and carries commands to
them in order. For tests of everything above the cluster."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, WorkerError
from autopar.ir.mesh import ClusterSpec
from autopar.runtime.ranks.shared_gpu import SHARE_VARIABLE, Ranks
from autopar.runtime.remote.place import Later, WorkerPlace

LIMIT_S = 300.0
START_LIMIT_S = 300.0  # for the processes of all meshes to have their devices
READY = -1  # the number of a worker's first answer
ROOT = Path(__file__).parents[2]


class _Progress:
    def at(self, program: int, instruction: int, micro_batch: int) -> None:
        pass


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


# -- in the worker


def work(address: str, key: str, rank: str) -> None:
    with Client(address, authkey=bytes.fromhex(key)) as connection:
        connection.send(int(rank))
        place, coordinator = connection.recv()
        import jax

        if place.platform == "cpu":
            jax.config.update("jax_num_cpu_devices", len(place.devices))
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if place.num_processes > 1:
            jax.distributed.initialize(coordinator, place.num_processes, place.rank)
        from autopar.runtime.remote.executor import Executor

        lock = threading.Lock()

        def answer(number: int, value: Any, error: BaseException | None) -> None:
            if error is not None and not isinstance(error, AutoparError):
                text = "".join(traceback.format_exception(error))
                error = WorkerError(f"{type(error).__name__}: {error}\n{text}")
            with lock:
                connection.send((number, value, error))

        def finish(number: int, later: Later) -> None:
            try:
                answer(number, later.wait(), None)
            except BaseException as error:
                answer(number, None, error)

        try:
            executor = Executor(place, _Progress())
        except BaseException as error:
            answer(READY, None, error)
            raise
        answer(READY, None, None)
        with ThreadPoolExecutor(4) as waiting:
            while (message := connection.recv()) is not None:
                number, command, args = message
                try:
                    value = getattr(executor, command)(*args)
                except BaseException as error:
                    answer(number, None, error)
                    continue
                if isinstance(value, Later):
                    waiting.submit(finish, number, value)
                else:
                    answer(number, value, None)
        executor.close()


# -- in the driver


class Reply:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def result(self, limit_s: float | None = None) -> Any:
        return self._future.result(min(limit_s or LIMIT_S, LIMIT_S))

    def done(self) -> bool:
        return self._future.done()


@dataclass(frozen=True)
class Worker:
    place: WorkerPlace
    process: subprocess.Popen
    connection: Connection
    waiting: dict[int, Future[Any]]

    def submit(self, command: str, args: tuple[Any, ...]) -> Reply:
        number, future = len(self.waiting), Future()
        self.waiting[number] = future
        self.connection.send((number, command, args))
        return Reply(future)

    def read(self) -> None:
        try:
            while True:
                number, value, error = self.connection.recv()
                if error is None:
                    self.waiting[number].set_result(value)
                else:
                    self.waiting[number].set_exception(error)
        except (EOFError, OSError):
            for future in list(self.waiting.values()):
                if not future.done():
                    future.set_exception(WorkerError(f"worker {self.place.worker} is gone"))


class Group:
    def __init__(self, devices: tuple[int, ...], workers: Sequence[Worker]) -> None:
        self.devices = devices
        self.workers = tuple(workers)
        self.num_arrays = 0
        self.closed = False

    def submit(
        self, command: str, args_per_worker: Sequence[tuple[Any, ...] | None], fatal: bool = False
    ) -> list[Any]:
        return [
            worker.submit(command, own)
            for worker, own in zip(self.workers, args_per_worker, strict=True)
            if own is not None
        ]


def gpu_environment(ranks: Ranks, devices: Sequence[int]) -> dict[str, str]:
    """Variables of a process with the devices of these ranks."""
    env = ranks.environment(devices[0])
    if len(devices) > 1:
        visible = [ranks.environment(device)["CUDA_VISIBLE_DEVICES"] for device in devices]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        env["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(len(devices))))
    return {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # compile time matters more than run time
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # a stream per link, and none behind another
        **env,
        # Transfers that wait must leave multiprocessors to others, and an eighth of a GPU has 16.
        **({"NCCL_MAX_CTAS": "1"} if SHARE_VARIABLE in env else {}),
        "JAX_PLATFORMS": "cuda,cpu",
    }


def _accept_all(
    listener: Listener, processes: Sequence[subprocess.Popen[bytes]]
) -> list[Connection]:
    """The connections of all processes, by rank. If one ends before it connects, all are ended."""
    connections: dict[int, Connection] = {}

    def accept() -> None:
        while len(connections) < len(processes):
            connection = listener.accept()
            connections[connection.recv()] = connection

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    until_s = time.monotonic() + START_LIMIT_S
    while thread.is_alive() and time.monotonic() < until_s:
        if any(process.poll() is not None for process in processes):
            break
        thread.join(0.1)
    if len(connections) < len(processes):
        for process in processes:
            process.kill()
            process.wait()
        codes = [process.returncode for process in processes]
        raise WorkerError(f"worker processes did not start: their exit codes are {codes}.")
    return [connections[rank] for rank in range(len(processes))]


class ProcessCluster:
    """A cluster of this host's processes: one per host of a mesh, as on a real cluster.

    ranks: where the devices are; device n is that of rank n. None: virtual CPU devices. Where ranks
           share a GPU, a process has one device: a host of several devices is several processes.
    devices_per_process: the most that a process has elsewhere; default: those of its host.
    """

    def __init__(
        self,
        num_hosts: int,
        devices_per_host: int,
        ranks: Ranks | None = None,
        devices_per_process: int | None = None,
    ) -> None:
        num_devices = num_hosts * devices_per_host
        assert ranks is None or num_devices <= ranks.num_ranks, (num_devices, ranks)
        self._ranks = None if ranks is None or ranks.platform == "cpu" else ranks
        self.platform = "cpu" if self._ranks is None else "gpu"
        self.ends_idle_groups = self.platform == "gpu"
        self.spec = ClusterSpec(
            num_hosts, devices_per_host, "cpu" if self._ranks is None else "h200-sxm"
        )
        self._devices_per_process = devices_per_process or devices_per_host
        if self._ranks is not None and int(self._ranks.environment().get(SHARE_VARIABLE, "1")) > 1:
            self._devices_per_process = 1
        self.started: dict[tuple[int, ...], Group] = {}
        self._key = secrets.token_bytes(16)
        self._folder = tempfile.TemporaryDirectory()
        self._num_workers = 0

    def possible_devices(self) -> int:
        return self.spec.num_devices

    def notice(self) -> str:
        return ""

    def groups(self, devices: Sequence[tuple[int, ...]]) -> list[Group]:
        fresh = [own for own in dict.fromkeys(devices) if own not in self.started]
        for own in fresh:
            self.started[own] = self._start(own)
        until_s = time.monotonic() + START_LIMIT_S
        for own in fresh:
            for worker in self.started[own].workers:
                worker.waiting[READY].result(max(0.0, until_s - time.monotonic()))
        return [self.started[own] for own in devices]

    def wait_for_failure(self) -> WorkerError | None:
        return None  # replies tell

    def _start(self, devices: tuple[int, ...]) -> Group:
        coordinator = f"127.0.0.1:{free_port()}"
        places = self._places(devices)
        self._num_workers += len(places)
        code = "from tests.remote.process_cluster import work; import sys; work(*sys.argv[1:])"
        with Listener(None, "AF_UNIX", len(places), authkey=self._key) as listener:
            processes = [
                subprocess.Popen(
                    [sys.executable, "-c", code, str(listener.address), self._key.hex(), str(rank)],
                    env=self._environment(place),
                    cwd=ROOT,
                )
                for rank, place in enumerate(places)
            ]
            connections = _accept_all(listener, processes)
        workers = []
        for place, process, connection in zip(places, processes, connections, strict=True):
            connection.send((place, coordinator))
            workers.append(Worker(place, process, connection, {READY: Future()}))
            threading.Thread(target=workers[-1].read, daemon=True).start()
        return Group(devices, workers)

    def _places(self, devices: tuple[int, ...]) -> list[WorkerPlace]:
        """The processes of a mesh."""
        per_host, per_process = self.spec.devices_per_host, self._devices_per_process
        parts: dict[int, list[int]] = {}
        for device in devices:
            parts.setdefault(device // per_process, []).append(device)
        return [
            WorkerPlace(
                worker=self._num_workers + rank,
                rank=rank,
                num_processes=len(parts),
                host=part[0] // per_host,
                node=f"host{part[0] // per_host}",
                devices=tuple(part),
                mesh_devices=devices,
                platform=self.platform,
                address="127.0.0.1",
                token=self._key.hex(),
                folder=self._folder.name,
            )
            for rank, part in enumerate(parts.values())
        ]

    def _environment(self, place: WorkerPlace) -> dict[str, str]:
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if self._ranks is None:
            return env | {
                "JAX_PLATFORMS": "cpu",
                "PJRT_NPROC": "16",  # threads for tiles while collectives wait
                "XLA_FLAGS": "--xla_backend_optimization_level=0",
            }
        return env | gpu_environment(self._ranks, place.devices)

    def check(self) -> None:
        pass

    def close_group(self, group: Group) -> None:
        self._end([group])

    def close(self) -> None:
        self._end(list(self.started.values()))
        self._folder.cleanup()

    def _end(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.closed = True
            del self.started[group.devices]
            for worker in group.workers:
                with contextlib.suppress(OSError):
                    worker.connection.send(None)
        for group in groups:
            for worker in group.workers:
                try:
                    worker.process.wait(10)
                except subprocess.TimeoutExpired:
                    worker.process.kill()
                    worker.process.wait()
                worker.connection.close()
