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
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, WorkerError
from autopar.ir.mesh import ClusterSpec
from autopar.runtime.remote.place import Later, WorkerPlace

LIMIT_S = 120.0
ROOT = Path(__file__).parents[2]


class _Progress:
    def at(self, program: int, instruction: int, micro_batch: int) -> None:
        pass


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


# -- in the worker


def work(address: str, key: str) -> None:
    with Client(address, authkey=bytes.fromhex(key)) as connection:
        place, coordinator = connection.recv()
        import jax

        if place.platform == "cpu":
            jax.config.update("jax_num_cpu_devices", len(place.devices))
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if place.num_processes > 1:
            jax.distributed.initialize(coordinator, place.num_processes, place.rank)
        from autopar.runtime.remote.executor import Executor

        executor = Executor(place, _Progress())
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

    def submit(
        self, command: str, args_per_worker: Sequence[tuple[Any, ...] | None], fatal: bool = False
    ) -> list[Any]:
        return [
            worker.submit(command, own)
            for worker, own in zip(self.workers, args_per_worker, strict=True)
            if own is not None
        ]


class ProcessCluster:
    """num_gpus: GPUs that devices are taken from, device n is GPU n; more devices than GPUs share
    them. None: virtual CPU devices."""

    def __init__(self, num_hosts: int, devices_per_host: int, num_gpus: int | None = None) -> None:
        self.platform = "cpu" if num_gpus is None else "gpu"
        self.spec = ClusterSpec(
            num_hosts, devices_per_host, "cpu" if num_gpus is None else "h200-sxm"
        )
        self._num_gpus = num_gpus
        self.started: dict[tuple[int, ...], Group] = {}
        self._key = secrets.token_bytes(16)
        self._folder = tempfile.TemporaryDirectory()
        self._num_workers = 0

    def groups(self, devices: Sequence[tuple[int, ...]]) -> list[Group]:
        for own in devices:
            if own not in self.started:
                self.started[own] = self._start(own)
        return [self.started[own] for own in devices]

    def wait_for_failure(self) -> WorkerError | None:
        return None  # replies tell

    def _start(self, devices: tuple[int, ...]) -> Group:
        per_host = self.spec.devices_per_host
        hosts = sorted({device // per_host for device in devices})
        coordinator = f"127.0.0.1:{free_port()}"
        places = [
            WorkerPlace(
                worker=self._num_workers + rank,
                rank=rank,
                num_processes=len(hosts),
                host=host,
                node=f"host{host}",
                devices=tuple(d for d in devices if d // per_host == host),
                mesh_devices=devices,
                platform=self.platform,
                address="127.0.0.1",
                token=self._key.hex(),
                folder=self._folder.name,
            )
            for rank, host in enumerate(hosts)
        ]
        self._num_workers += len(hosts)
        workers = []
        with Listener(None, "AF_UNIX", authkey=self._key) as listener:
            code = "from tests.remote.process_cluster import work; import sys; work(*sys.argv[1:])"
            for place in places:
                process = subprocess.Popen(
                    [sys.executable, "-c", code, listener.address, self._key.hex()],
                    env=self._environment(place),
                    cwd=ROOT,
                )
                connection = listener.accept()
                connection.send((place, coordinator))
                workers.append(Worker(place, process, connection, {}))
        for worker in workers:
            threading.Thread(target=worker.read, daemon=True).start()
        return Group(devices, workers)

    def _environment(self, place: WorkerPlace) -> dict[str, str]:
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if self._num_gpus is None:
            return env | {
                "JAX_PLATFORMS": "cpu",
                "PJRT_NPROC": "16",  # threads for tiles while collectives wait
                "XLA_FLAGS": "--xla_backend_optimization_level=0",
            }
        gpus = [str(device % self._num_gpus) for device in place.devices]
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        env.pop("XLA_FLAGS", None)
        return env

    def check(self) -> None:
        pass

    def close(self) -> None:
        for group in self.started.values():
            for worker in group.workers:
                with contextlib.suppress(OSError):
                    worker.connection.send(None)
        for group in self.started.values():
            for worker in group.workers:
                try:
                    worker.process.wait(10)
                except subprocess.TimeoutExpired:
                    worker.process.kill()
                    worker.process.wait()
                worker.connection.close()
        self.started.clear()
        self._folder.cleanup()
