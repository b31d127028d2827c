"""Answers of workers to commands, in processes of your own.

A worker of this process answers by itself (`OwnReply`); one of another process through the store of
JAX's coordination service (`StoredReply`), over a connection (`SentReply`), or not at all where
nobody here needs its answer, or this process knows it (`Elsewhere`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from autopar import _jax
from autopar.errors import WorkerError
from autopar.runtime.ranks.process_workers import ProcessWorker
from autopar.runtime.remote.commands import CommandName, StepCall, StepDone
from autopar.runtime.remote.recording import marks_from_arrays, marks_to_arrays

COMMAND_LIMIT_S = 3600.0


class OwnReply:
    """The answer of a worker of this process. If the session fails, it is the failure."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._future: Future[Any] = Future()

    def result(self, limit_s: float | None = None) -> Any:
        limit_s = COMMAND_LIMIT_S if limit_s is None else limit_s
        try:
            return self._future.result(limit_s)
        except TimeoutError as error:
            if self._future.done() and self._future.exception() is error:
                raise
            raise WorkerError(f"{self._what}: no answer within {limit_s:g} s.") from None

    def done(self) -> bool:
        return self._future.done()

    def settle(self, value: Any, error: BaseException | None = None) -> None:
        with suppress(InvalidStateError):  # it is settled already
            if error is None:
                self._future.set_result(value)
            else:
                self._future.set_exception(error)


class Elsewhere:
    """The answer of another process's worker that nobody needs here."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self, limit_s: float | None = None) -> Any:
        return self._value

    def done(self) -> bool:
        return True


class StoredReply:
    """The answer of another process's worker, in the store of JAX's coordination service."""

    def __init__(self, process: int, what: str, key: str, check: Callable[[], None]) -> None:
        self._process, self._what, self._key, self._check = process, what, key, check

    def result(self, limit_s: float | None = None) -> Any:
        limit_s = COMMAND_LIMIT_S if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        while (message := _jax.store_get(self._key, 1.0)) is None:
            self._check()
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"{self._what}: process {self._process} did not answer within "
                    f"{limit_s:g} s. Every process must call the same steps in the same order."
                )
        answer = json.loads(message)
        if "error" in answer:
            raise WorkerError(f"process {self._process}: {answer['error']}")
        return answer["value"]

    def done(self) -> bool:
        return _jax.store_get_now(self._key) is not None


class SentAnswer(NamedTuple):
    """An answer that goes from process to process as arrays: its key, and how it becomes arrays and
    is made of them again."""

    key: int
    to_arrays: Callable[[Any], list[np.ndarray]]
    from_arrays: Callable[[list[np.ndarray]], Any]


def step_arrays(done: StepDone) -> list[np.ndarray]:
    return [np.array(list(done.values), np.int64), *done.values.values()]


def step_of_arrays(sent: list[np.ndarray]) -> StepDone:
    return StepDone(dict(zip(sent[0].tolist(), sent[1:], strict=True)))


def sent_answer(
    worker: ProcessWorker, command: CommandName, args: tuple[Any, ...], count: int
) -> SentAnswer | None:
    """How the answer to a command is sent to the other processes; None if it is not."""
    if command == "recorded":
        key = read_key(0, count, worker.place.worker)  # no array has the number 0
        return SentAnswer(key, marks_to_arrays, marks_from_arrays)
    key = sent_key(worker, args[0]) if command == "step" else None
    return None if key is None else SentAnswer(key, step_arrays, step_of_arrays)


def read_key(number: int, nth: int, worker: int) -> int:
    """The key of a worker's shards of an array that is read for the nth time; keys of steps are
    even."""
    return 2 * ((number << 20 | nth) << 22 | worker) + 1


def sent_key(worker: ProcessWorker, call: StepCall) -> int | None:
    """The key under which a worker sends what it was asked for with a step; None if that is
    nothing. Tags are below 2**40, and no two steps have the same first tag."""
    if worker.place.rank != 0 or not call.watched:
        return None
    return 2 * (call.first_tag << 22 | worker.place.worker)


class SentReply:
    """An answer that a worker of another process sends. `take` waits for what comes under a key,
    for a time at most; `has_come` says whether it is there."""

    def __init__(
        self,
        sent: SentAnswer,
        take: Callable[[int, float | None], list[np.ndarray]],
        has_come: Callable[[int], bool],
    ) -> None:
        self._sent, self._take, self._has_come = sent, take, has_come
        self._lock = threading.Lock()
        self._done: Any = None

    def result(self, limit_s: float | None = None) -> Any:
        with self._lock:
            if self._done is None:
                self._done = self._sent.from_arrays(self._take(self._sent.key, limit_s))
            return self._done

    def done(self) -> bool:
        return self._done is not None or self._has_come(self._sent.key)
