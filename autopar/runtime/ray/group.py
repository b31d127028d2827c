"""The workers of one mesh: from commands to replies.

`submit` sends a command to every worker of the mesh, one call each, and returns at once. Workers
run commands in the order in which they were sent.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol

from autopar.errors import AutoparError, WorkerError
from autopar.runtime.ray.session import RaySession, Worker, fresh
from autopar.runtime.ray.worker import CommandOutcome
from autopar.runtime.uninterrupted import uninterrupted


class Watcher(Protocol):
    """Is notified of failures and decides what happens to the session."""

    def lost(self, worker: Worker, error: BaseException) -> None: ...

    def raised(self, worker: Worker, error: AutoparError) -> None: ...

    def expect(self, reply: Reply) -> None: ...

    def settled(self, reply: Reply) -> None: ...


class NoAnswerError(WorkerError, TimeoutError):
    """A worker did not answer a command within its limit. It may still do so."""


class Reply:
    """A worker's answer to one command. It always comes: if the session fails, as its failure."""

    def __init__(self, worker: Worker, command: str, is_step: bool, watcher: Watcher) -> None:
        self.worker = worker
        self.command = command
        self._is_step = is_step
        self._watcher = watcher
        self._future: Future[Any] = Future()

    def result(self, limit_s: float | None = None) -> Any:
        """Wait for the answer; raises what the worker raised, or the failure of the session."""
        try:
            return self._future.result(limit_s)
        except AutoparError as error:
            raise fresh(error) from error.__cause__
        except TimeoutError:
            place = self.worker.place
            raise NoAnswerError(
                f"{self.command!r} on worker {place.worker} (host {place.host}, {place.node}): no "
                f"answer within {limit_s:g} s. It may be busy or hang: look at its log, or restart "
                "from the last checkpoint, as run_training does.",
                host=place.node,
            ) from None

    def done(self) -> bool:
        return self._future.done()

    def fail(self, error: AutoparError) -> None:
        """Answer with this error, if there is no answer yet."""
        self._settle(None, error)

    def arrived(self, call: Future[CommandOutcome]) -> None:
        """Called when Ray has the worker's outcome, or knows that there will be none."""
        error = call.exception()
        if error is not None:
            self._watcher.lost(self.worker, error)
            return
        outcome = call.result()
        if not outcome.raised:
            self._settle(outcome.value, None)
        elif self._is_step:
            self._watcher.raised(self.worker, error_of(self.worker, self.command, outcome))
        else:
            self._settle(None, error_of(self.worker, self.command, outcome))

    def _settle(self, value: Any, error: AutoparError | None) -> None:
        self._watcher.settled(self)
        with contextlib.suppress(InvalidStateError):  # answered already
            if error is None:
                self._future.set_result(value)
            else:
                self._future.set_exception(error)


def error_of(worker: Worker, command: str, outcome: CommandOutcome) -> AutoparError:
    """The error that the driver raises for what a command raised."""
    if outcome.error is not None:
        return outcome.error
    place = worker.place
    if "RESOURCE_EXHAUSTED" in outcome.raised:
        said = (
            f"out of memory on a device: {outcome.raised}\nLower memory_budget, or use more "
            "micro-batches, remat, or more devices."
        )
    elif outcome.raised.startswith("MemoryError"):
        said = f"out of host memory: {outcome.raised}"
    else:
        said = outcome.raised
    return WorkerError(
        f"{command!r} failed on worker {place.worker} (host {place.host}, {place.node}): {said}\n"
        f"{outcome.traceback}",
        host=place.node,
        log_tail=outcome.traceback,
    )


class MeshGroup:
    """devices:    the cluster's numbers of the mesh's devices, in the order of `jax.devices()`.
    mesh:       its place in the last call of `RayCluster.groups`, for messages.
    num_arrays: how many arrays are on it; updated by those who create and drop arrays.
    """

    def __init__(
        self,
        session: RaySession,
        devices: tuple[int, ...],
        workers: Sequence[Worker],
        watcher: Watcher,
    ) -> None:
        self.devices = devices
        self.workers = tuple(workers)
        self.mesh = 0
        self.num_arrays = 0
        self.closed = False
        self._session = session
        self._watcher = watcher
        self._num_sent = [0] * len(self.workers)
        self._names: deque[tuple[Worker, int, str]] = deque(maxlen=64 * len(self.workers))

    def __repr__(self) -> str:
        return f"<mesh of devices {list(self.devices)} in {len(self.workers)} processes>"

    def command_of(self, worker: Worker, number: int) -> str:
        """The name of the command with this number; empty if it was sent long ago."""
        sent = list(self._names)
        return next((name for w, n, name in sent if w is worker and n == number), "")

    def in_use(self) -> bool:
        return self.num_arrays > 0

    def submit(
        self, command: str, args_per_worker: Sequence[tuple[Any, ...] | None], fatal: bool = False
    ) -> list[Reply]:
        """Send a command to every worker, each with its own arguments; None leaves a worker out,
        and it has no reply. `fatal`: the command is a step, so an exception or a standstill in it
        fails the session."""
        assert len(args_per_worker) == len(self.workers)
        with uninterrupted(), self._session.lock:
            self._session.check()
            if self.closed:
                raise WorkerError(f"{command!r}: {self!r} was closed.")
            sent = []
            for index, (worker, args) in enumerate(zip(self.workers, args_per_worker, strict=True)):
                if args is None:
                    continue
                number = self._num_sent[index] + 1
                try:
                    call = worker.actor.submit.remote(number, fatal, command, *args)
                except BaseException as error:
                    # Others have received a step and would wait for this worker. If Ctrl-C came,
                    # nobody knows whether the command was sent.
                    if fatal or not isinstance(error, Exception):
                        said = WorkerError(f"{command!r} was not sent: {error!r}")
                        self._watcher.raised(worker, said)
                    raise
                self._num_sent[index] = number
                self._names.append((worker, number, command))
                reply = Reply(worker, command, fatal, self._watcher)
                self._watcher.expect(reply)
                sent.append((reply, call))
        for reply, call in sent:
            call.future().add_done_callback(reply.arrived)
        return [reply for reply, _ in sent]
