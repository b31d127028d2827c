"""From numbered commands to their answers: runs them one after another on one thread.

Numbers are consecutive from 0. Commands may arrive in any order and run in the order of their
numbers. If a command answers `Later`, other threads wait for its answer while the next command
runs. Those that wait for steps wait for nothing else, so that programs which compile for long do
not keep the answer of a step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from autopar.runtime.remote.place import Later
from autopar.runtime.remote.progress import WorkerProgress

NUM_WAITERS = 16


@dataclass(frozen=True)
class Command:
    """name:    for messages.
    is_step: whether it must make steady progress, as steps do and compiling does not.
    """

    number: int
    name: str
    is_step: bool
    call: Callable[[], Any]
    answer: Future[Any]


@dataclass(frozen=True)
class Standstill:
    """How long the oldest unanswered step has made no progress; without an unanswered step, the
    oldest unanswered command."""

    command: str
    is_step: bool
    seconds: float


class CommandThread:
    """The thread, the commands that wait for their turn, and those without an answer yet."""

    def __init__(self, progress: WorkerProgress) -> None:
        self.progress = progress
        self._arrived: queue.Queue[Command | None] = queue.Queue()
        self._unanswered: dict[int, tuple[Command, float]] = {}
        self._last_answer_s = time.monotonic()
        self._lock = threading.Lock()
        self._waiters = ThreadPoolExecutor(NUM_WAITERS, thread_name_prefix="autopar-answers")
        self._step_waiters = ThreadPoolExecutor(NUM_WAITERS, thread_name_prefix="autopar-steps")
        self._thread = threading.Thread(target=self._work, name="autopar-commands", daemon=True)
        self._thread.start()

    def submit(
        self, number: int, name: str, call: Callable[[], Any], is_step: bool = False
    ) -> Future[Any]:
        """The future answer of the command, or its exception."""
        command = Command(number, name, is_step, call, Future())
        self._arrived.put(command)
        return command.answer

    def standstill(self) -> Standstill | None:
        """None if every command that has begun is answered."""
        with self._lock:
            if not self._unanswered:
                return None
            begun = list(self._unanswered.values())
            steps = [entry for entry in begun if entry[0].is_step]
            command, begun_s = (steps or begun)[0]
            moved_s = max(begun_s, self._last_answer_s, self.progress.moved_s)
        return Standstill(command.name, command.is_step, time.monotonic() - moved_s)

    def close(self) -> None:
        """Run no more commands; does not wait for the current one."""
        self._arrived.put(None)
        for waiters in (self._waiters, self._step_waiters):
            waiters.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        early: dict[int, Command] = {}
        turn = 0
        while (arrived := self._arrived.get()) is not None:
            early[arrived.number] = arrived
            while (command := early.pop(turn, None)) is not None:
                turn += 1
                self._run(command)

    def _run(self, command: Command) -> None:
        with self._lock:
            self._unanswered[command.number] = command, time.monotonic()
        self.progress.begin(command.number)
        try:
            value = command.call()
        except BaseException as error:
            self.progress.end()
            self._fail(command, error)
            return
        self.progress.end()
        if isinstance(value, Later):
            waiters = self._step_waiters if command.is_step else self._waiters
            try:
                waiters.submit(self._wait, command, value)
            except RuntimeError:  # the interpreter ends, and its thread pools take nothing more
                self._wait(command, value)
        else:
            self._answer(command, value)

    def _wait(self, command: Command, later: Later) -> None:
        try:
            value = later.wait()
        except BaseException as error:
            self._fail(command, error)
            return
        self._answer(command, value)

    def _answer(self, command: Command, value: Any) -> None:
        self._forget(command)
        command.answer.set_result(value)

    def _fail(self, command: Command, error: BaseException) -> None:
        self._forget(command)
        if isinstance(error, StopIteration):  # an asyncio future cannot hold it
            said, error = error, RuntimeError(f"{command.name} raised StopIteration")
            error.__cause__ = said
        command.answer.set_exception(error)

    def _forget(self, command: Command) -> None:
        with self._lock:
            del self._unanswered[command.number]
            self._last_answer_s = time.monotonic()
