"""Answers of workers to commands, in processes of your own.

A worker of this process answers by itself (`OwnReply`); one of another process through the store of
JAX's coordination service (`StoredReply`), over a connection (`SentReply`), or not at all where
nobody here needs its answer (`Elsewhere`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import numpy as np

from autopar import _jax
from autopar.errors import WorkerError
from autopar.runtime.remote.commands import StepDone

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


class SentReply:
    """The answer to a step, with small results, that a worker of another process sends. `take`
    waits for what comes under a key, for a time at most; `has_come` says whether it is there."""

    def __init__(
        self,
        key: int,
        take: Callable[[int, float | None], list[np.ndarray]],
        has_come: Callable[[int], bool],
    ) -> None:
        self._key, self._take, self._has_come = key, take, has_come
        self._lock = threading.Lock()
        self._done: StepDone | None = None

    def result(self, limit_s: float | None = None) -> StepDone:
        with self._lock:
            if self._done is None:
                sent = self._take(self._key, limit_s)
                values = dict(zip(sent[0].tolist(), sent[1:], strict=True))
                self._done = StepDone(values)
            return self._done

    def done(self) -> bool:
        return self._done is not None or self._has_come(self._key)
