"""Pipelines in processes of your own: the processes of `jax.distributed` as a `WorkerCluster`.

Every process runs the same program, so each makes the same plan and sends the same commands in the
same order: each is a driver, and a worker for the meshes that have devices of it. A command reaches
the workers of this process only; the other processes send it to theirs. So nothing is sent between
processes but tiles (`runtime.transports`), as on Ray, and of answers only what others need:

    transports, open, compiled   through the store of JAX's coordination service
    step                         small results (a loss), from the mesh's first worker to all
    recorded                     the marks of a trace, from every worker to all
    clock                        known: on one machine it is the same, else by the wall clocks
    all others                   of no use elsewhere: they count as answered

Tags name transfers in all processes alike, because all call the same steps in the same order.

A process that fails or is lost ends the session in all of them (`failures.py`, `liveness.py`).
"""

from __future__ import annotations

import itertools
import json
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import numpy as np

from autopar import _jax
from autopar.errors import AutoparError, ClusterError, DataError, WorkerError
from autopar.ir.mesh import ClusterSpec
from autopar.runtime.ranks.consensus import arrival_limit_s
from autopar.runtime.ranks.failures import FailureWatch, failure_watch
from autopar.runtime.ranks.liveness import Lost, ProcessLiveness
from autopar.runtime.ranks.machines import own_place
from autopar.runtime.ranks.process_replies import (
    COMMAND_LIMIT_S,
    Elsewhere,
    OwnReply,
    SentAnswer,
    SentReply,
    StoredReply,
    sent_answer,
)
from autopar.runtime.ranks.process_workers import OwnWorker, ProcessWorker
from autopar.runtime.recording import clock
from autopar.runtime.remote.channel import ChannelClient, ChannelServer
from autopar.runtime.remote.commands import CommandName, StepDone
from autopar.runtime.remote.frames import DataTimeout, PeerGone
from autopar.runtime.remote.mailbox import Mailbox
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.remote.progress import NOWHERE, State

HANG_LIMIT_S = 300.0
LEAVE_LIMIT_S = 60.0  # for the others to have run the last steps
VERDICT_S = 5.0  # for the news that a process is lost, before an error counts as this process's
_CONNECT_LIMIT_S = 30.0
_POLL_S = 0.25
_STORED: tuple[CommandName, ...] = ("transports", "open", "compiled", "has_room")
_EMPTY: dict[str, Any] = {"load": [], "save": [], "hlo_texts": {}, "stats": {"device_bytes": []}}
_sessions = itertools.count()


class ProcessGroup:
    """The workers of one mesh. See `WorkerGroup`."""

    def __init__(
        self, cluster: ProcessCluster, devices: tuple[int, ...], workers: Sequence[ProcessWorker]
    ) -> None:
        self.devices = devices
        self.workers = tuple(workers)
        self.num_arrays = 0
        self.closed = False
        self._cluster = cluster
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((*_STORED, "recorded"), 0)

    def submit(
        self,
        command: CommandName,
        args_per_worker: Sequence[tuple[Any, ...] | None],
        fatal: bool = False,
    ) -> list[Any]:
        self._cluster.check()
        with self._lock:
            count = self._counts.get(command, 0)
            if command in self._counts:
                self._counts[command] += 1
        return [
            self._submit_to(worker, command, args, fatal, count)
            for worker, args in zip(self.workers, args_per_worker, strict=True)
            if args is not None
        ]

    def _submit_to(
        self,
        worker: ProcessWorker,
        command: CommandName,
        args: tuple[Any, ...],
        fatal: bool,
        count: int,
    ) -> Any:
        cluster = self._cluster
        key = f"{cluster.folder_key}/{worker.place.worker}/{command}/{count}"
        sent = sent_answer(worker, command, args, count)
        if worker.own is None:
            if command in _STORED:
                return StoredReply(worker.process, f"the command {command!r}", key, cluster.check)
            if sent is not None:
                return SentReply(sent, partial(cluster.take, worker.process), cluster.has_come)
            if command == "clock":
                return Elsewhere(clock() + cluster.clock_offset_s(worker.process))
            empty = StepDone({}) if command == "step" else _EMPTY.get(command)
            return Elsewhere(empty)
        reply = OwnReply(f"the command {command!r} in this process")
        cluster.expect(reply)
        future = worker.own.submit(command, args, fatal)
        future.add_done_callback(partial(cluster.answered, reply, command, fatal))
        if command in _STORED:
            future.add_done_callback(partial(cluster.store_answer, key))
        elif sent is not None:
            future.add_done_callback(partial(cluster.send_answer, sent))
        return reply


class ProcessCluster:
    """The processes of `jax.distributed`, of which each must create it at the same time. `devices`:
    those that meshes are made of, by the cluster's numbers."""

    ends_idle_groups = False

    def __init__(self, devices: Sequence[Any], spec: ClusterSpec) -> None:
        self.spec = spec
        self.platform: str = devices[0].platform
        self.describe: Callable[[WorkerPlace, State], tuple[int | None, str]] = lambda *_: (
            None,
            "",
        )
        self.process, self.num_processes = jax.process_index(), jax.process_count()
        self.folder_key = f"autopar/pipelines/{next(_sessions)}"
        self._devices = tuple(devices)
        self._watch: FailureWatch = failure_watch()
        self._workers = itertools.count()
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        self._pending: dict[int, OwnReply] = {}
        self._clients: dict[int, ChannelClient] = {}
        self._lock = threading.RLock()
        self._failed: AutoparError | None = None
        self._closed = threading.Event()
        self._folder = tempfile.mkdtemp(prefix="autopar-")
        self._node = socket.gethostname()
        self._address = _own_address()
        token = self._from_first("token", lambda: secrets.token_hex(32))
        self._token = str(token)
        self._server = ChannelServer(self._address, self._token)
        self._liveness = ProcessLiveness(self.process, self._token, self._doing, self._on_lost)
        self._addresses, self._clocks = self._join()
        self._watch.is_waiting_elsewhere = self._has_steps
        threading.Thread(target=self._monitor, name="autopar-monitor", daemon=True).start()

    # -- starting and ending

    def _from_first(self, topic: str, make: Callable[[], Any]) -> Any:
        if self.process == 0:
            self._store(topic, value := make())
            return value
        return self._read(topic, 0)

    def _store(self, topic: str, value: Any) -> None:
        _jax.store_set(f"{self.folder_key}/{topic}", json.dumps(value).encode())

    def _read(self, topic: str, process: int) -> Any:
        limit_s = arrival_limit_s()
        message = _jax.store_get(f"{self.folder_key}/{topic}", limit_s)
        if message is None:
            raise ClusterError(
                f"a pipeline in {self.num_processes} processes: process {process} did not arrive "
                f"within {limit_s:g} s ({topic}). Every process must call the same steps in the "
                "same order."
            )
        return json.loads(message)

    def _join(self) -> tuple[list[tuple[str, int]], list[tuple[str, float]]]:
        """Connects to process 0; returns the data addresses of all processes, and of each its
        machine and when, by the wall clock, its clock of marks was zero."""
        watched_at = self._from_first("liveness", lambda: self._liveness.serve(self._address))
        if self.process != 0:
            self._liveness.join((watched_at[0], watched_at[1]), _CONNECT_LIMIT_S)
        zero_s = time.time() - clock()
        self._store(f"address/{self.process}", [*self._server.address, own_place().machine, zero_s])
        found = [self._read(f"address/{number}", number) for number in range(self.num_processes)]
        addresses = [(str(host), int(port)) for host, port, _, _ in found]
        return addresses, [(str(machine), float(zero_s)) for _, _, machine, zero_s in found]

    def clock_offset_s(self, process: int) -> float:
        """The clock of another process's marks minus that of this one's."""
        (here, own_zero_s), (there, zero_s) = self._clocks[self.process], self._clocks[process]
        return 0.0 if here == there else own_zero_s - zero_s

    def is_on_one_machine(self) -> bool:
        return len({machine for machine, _ in self._clocks}) == 1

    def close(self) -> None:
        """Leave, when all processes have run the steps that they were called for, or a limit is
        over: until then others may need what this one sends."""
        if self._closed.is_set():
            return
        with suppress(AutoparError, jax.errors.JaxRuntimeError):
            self._wait_for_others()
        self._closed.set()
        self._watch.is_waiting_elsewhere = None
        self._liveness.close()
        for group in self._groups.values():
            group.closed = True
            for worker in group.workers:
                if worker.own is not None:
                    worker.own.close()
        for client in self._clients.values():
            client.close()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + LEAVE_LIMIT_S
        while self._pending and time.monotonic() < deadline:
            self.check()
            time.sleep(0.01)
        self._store(f"left/{self.process}", True)
        for number in range(self.num_processes):
            key = f"{self.folder_key}/left/{number}"
            while _jax.store_get(key, 1.0) is None:
                self.check()
                if time.monotonic() > deadline:
                    return

    # -- meshes

    def runs_here(self, devices: Sequence[int]) -> bool:
        """Whether this process has devices of the mesh."""
        return any(self._devices[d].process_index == self.process for d in devices)

    def groups(self, meshes: Sequence[tuple[int, ...]]) -> list[ProcessGroup]:
        self.check()
        with self._lock:
            for devices in meshes:
                if devices not in self._groups:
                    self._groups[devices] = self._make_group(devices)
            return [self._groups[devices] for devices in meshes]

    def _make_group(self, devices: tuple[int, ...]) -> ProcessGroup:
        owners = [self._devices[number].process_index for number in devices]
        processes = sorted(set(owners))
        workers = []
        for rank, process in enumerate(processes):
            place = WorkerPlace(
                worker=next(self._workers),
                rank=rank,
                num_processes=len(processes),
                host=process,
                node=self._node if process == self.process else f"process {process}",
                devices=tuple(d for d, o in zip(devices, owners, strict=True) if o == process),
                mesh_devices=devices,
                platform=self.platform,
                address=self._address,
                token=self._token,
                folder=self._folder,
                device_ids=tuple(self._devices[number].id for number in devices),
            )
            own = OwnWorker(place) if process == self.process else None
            workers.append(ProcessWorker(place, process, own))
        return ProcessGroup(self, devices, workers)

    def mailbox(self, worker: ProcessWorker) -> Mailbox | NoChannel:
        return NoChannel() if worker.own is None else worker.own.mailbox

    def close_group(self, group: ProcessGroup) -> None:
        raise AssertionError("groups of processes share devices and are never closed alone")

    def possible_devices(self) -> int:
        return self.spec.num_devices

    def notice(self) -> str:
        return ""

    # -- answers

    def expect(self, reply: OwnReply) -> None:
        with self._lock:
            self._pending[id(reply)] = reply

    def answered(self, reply: OwnReply, command: str, is_step: bool, future: Future[Any]) -> None:
        """A worker of this process has answered. An error in a step is the end of the session."""
        error = future.exception()
        if error is None:
            reply.settle(future.result())
        elif not is_step:
            reply.settle(None, error)
        else:
            self._step_failed(error)
            reply.settle(None, self._failed)
        with self._lock:
            self._pending.pop(id(reply), None)

    def store_answer(self, key: str, future: Future[Any]) -> None:
        error = future.exception()
        answer = {"error": str(error)} if error is not None else {"value": future.result()}
        with suppress(ClusterError, jax.errors.JaxRuntimeError):  # process 0 is gone
            _jax.store_set(key, json.dumps(answer).encode())

    def send_answer(self, sent: SentAnswer, future: Future[Any]) -> None:
        if future.exception() is None:
            self.send(sent.key, sent.to_arrays(future.result()))

    def send(self, key: int, arrays: Sequence[np.ndarray]) -> None:
        """Send arrays to all other processes. That one is gone, its connection tells process 0."""
        for process in range(self.num_processes):
            if process != self.process:
                with suppress(PeerGone, DataTimeout):
                    self._client(process).send(key, arrays)

    def take(self, process: int, key: int, limit_s: float | None) -> list[np.ndarray]:
        """What another process sends under the key; raises if a process fails meanwhile."""
        limit_s = COMMAND_LIMIT_S if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return self._server.take(key, _POLL_S)
            except PeerGone:  # so far; others may come
                time.sleep(_POLL_S)
            except DataTimeout:
                pass
            self.check()
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"process {process} did not send a value within {limit_s:g} s. Every process "
                    "must call the same steps, and read the same arrays, in the same order."
                )

    def has_come(self, key: int) -> bool:
        return self._server.has(key)

    def _client(self, process: int) -> ChannelClient:
        with self._lock:
            if process not in self._clients:
                self._clients[process] = ChannelClient(
                    self._addresses[process], self._token, _CONNECT_LIMIT_S
                )
            return self._clients[process]

    # -- failures

    def check(self) -> None:
        """Raise if a process has failed or was lost."""
        if self._failed is None and self._watch.failure:
            self._fail(WorkerError(self._watch.failure))
        if self._failed is not None:
            raise WorkerError(str(self._failed)) from self._failed

    def wait_for_failure(self) -> WorkerError | None:
        deadline = time.monotonic() + VERDICT_S
        while time.monotonic() < deadline:
            if self._watch.failure or self._failed is not None:
                return WorkerError(self._watch.failure or str(self._failed))
            time.sleep(0.05)
        return None

    def _fail(self, error: AutoparError) -> None:
        with self._lock:
            if self._failed is None:
                self._failed = error
            pending, self._pending = list(self._pending.values()), {}
        for reply in pending:
            reply.settle(None, self._failed)

    def _step_failed(self, error: BaseException) -> None:
        """A process that was lost is the cause; otherwise this one has failed, and says so."""
        verdict = self.wait_for_failure()
        if verdict is None:
            self._watch.report("a step of a pipeline", error)
            if self._watch.failure:  # another one was first
                verdict = WorkerError(self._watch.failure)
        if verdict is None:
            doing = self._doing()
            at = f" at: {doing}" if doing else ""
            verdict = WorkerError(
                f"process {self.process} raised an exception in a step{at}.\n"
                f"{type(error).__name__}: {error}"
            )
            verdict.__cause__ = error
        self._fail(verdict)

    def _on_lost(self, lost: Lost) -> None:
        if not self._closed.is_set():
            self._watch.tell_lost(lost.process, str(lost))

    def _own_workers(self) -> list[OwnWorker]:
        groups = list(self._groups.values())
        return [w.own for group in groups for w in group.workers if w.own is not None]

    def _doing(self) -> str:
        """What this process is doing, in words; empty between steps."""
        words = []
        for worker in self._own_workers():
            state = worker.progress.state()
            if state.command != NOWHERE:
                stage, instruction = self.describe(worker.place, state)
                where = "" if stage is None else f"stage {stage}, "
                words += [f"{where}{instruction}"] if instruction else []
        return "; ".join(words)

    def _has_steps(self) -> bool:
        """Whether a step runs in this process."""
        found = (worker.commands.standstill() for worker in self._own_workers())
        return any(still is not None and still.is_step for still in found)

    def _monitor(self) -> None:
        """Settles replies when another process fails, and notices steps that stand still."""
        while not self._closed.wait(_POLL_S):
            if self._watch.failure and self._failed is None:
                self._fail(WorkerError(self._watch.failure))
            for worker in self._own_workers():
                still = worker.commands.standstill()
                if still is None or not still.is_step or still.seconds < HANG_LIMIT_S:
                    continue
                if self._failed is None:
                    doing = self._doing() or "between instructions"
                    self._step_failed(
                        WorkerError(
                            f"no progress for {still.seconds:.0f} s in a step, at: {doing}. A "
                            "process that this one waits for may hang, or may call other steps."
                        )
                    )


class NoChannel:
    """The channel to a worker of another process, which gets its values from that process."""

    def send(self, key: int, arrays: Sequence[Any]) -> None:
        pass

    def receive(self, key: int, limit_s: float) -> list[np.ndarray]:
        raise DataError("values of other processes come from them")

    def discard(self, key: int) -> None:
        pass

    def close(self) -> None:
        pass


def _own_address() -> str:
    """The address of this host that leads to process 0."""
    coordinator = _jax.coordinator_address()
    host, _, port = coordinator.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ClusterError(
            f"no way from this host to the coordinator of jax.distributed at {coordinator}: {error}"
        ) from error
