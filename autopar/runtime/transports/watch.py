"""Transfers under way on streams: keeps their memory, and ends those that cannot finish.

A transfer waits on the device for its other side, where no host call has a limit. A thread looks at
the events of every transfer: one before it, when its stream has reached it, and one after it. If a
worker on the other side is gone, or if it does not come within the limit, the transfer *failed*:
the error is recorded first, then the transfer is ended (`end`, such as NCCL's abort). What it
should have written then looks ready and holds anything, so whoever reads received data asks `check`
afterwards. An error stays: a transport that failed is closed and made anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import WorkerError

LOOK_S = 0.3
GRACE_S = 2.0  # for transfers that were finishing when a worker left


@dataclass(eq=False)
class Underway:
    """name:    for messages, such as "of link 1.0>2.0".
    workers: on the other side.
    begun:   event before it; done: event after it.
    held:    objects that must live until then.
    end:     makes the device stop waiting.
    """

    name: str
    workers: frozenset[int]
    begun: Any
    done: Any
    held: Sequence[Any]
    end: Callable[[], None]
    begun_s: float | None = None
    ended: bool = False


class TransferWatch:
    """`limit_s`: for the other side to come, from when this side's stream has reached the
    transfer."""

    def __init__(self, worker: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self._worker = worker
        self._underway: list[Underway] = []
        self._lost: dict[int, tuple[float, str]] = {}
        self._failed: WorkerError | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="autopar-watch", daemon=True)
        self._thread.start()

    def add(self, transfer: Underway) -> None:
        with self._changed:
            if not self._underway:
                self._changed.notify_all()
            self._underway.append(transfer)

    def lose(self, worker: int, why: str) -> None:
        """A worker is gone: transfers with it cannot finish."""
        with self._changed:
            self._lost.setdefault(worker, (time.monotonic(), why))
            self._changed.notify_all()

    def is_lost(self, worker: int) -> bool:
        return worker in self._lost

    def check(self, workers: frozenset[int] = frozenset()) -> None:
        """Raise if a transfer has failed, or if one of these workers is gone."""
        if self._failed is not None:
            raise WorkerError(str(self._failed)) from self._failed
        for worker in sorted(workers & self._lost.keys()):
            raise WorkerError(
                f"worker {self._worker} cannot exchange tiles with worker {worker}, which is gone: "
                f"{self._lost[worker][1]}."
            )

    def release(self) -> bool:
        """Release what finished transfers held; whether all have finished."""
        with self._changed:
            finished = [one for one in self._underway if one.done.done]
            self._underway = [one for one in self._underway if one not in finished]
            return not self._underway

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(GRACE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._underway)
                if self._closed:
                    return
                underway = list(self._underway)
            for transfer in underway:
                if not (transfer.ended or transfer.done.done):
                    self._look_at(transfer)
            del underway
            self.release()
            time.sleep(LOOK_S)

    def _look_at(self, transfer: Underway) -> None:
        if not (why := self._why_failed(transfer)):
            return
        message = f"worker {self._worker}: a transfer {transfer.name} failed: {why}."
        self._failed = self._failed or WorkerError(message)
        transfer.ended = True
        threading.Thread(target=transfer.end, name="autopar-abort", daemon=True).start()

    def _why_failed(self, transfer: Underway) -> str:
        now = time.monotonic()
        for worker in sorted(transfer.workers & self._lost.keys()):
            lost_s, why = self._lost[worker]
            if now - lost_s > GRACE_S:
                return f"worker {worker} is gone: {why}"
        if transfer.begun_s is None:
            transfer.begun_s = now if transfer.begun.done else None
        elif now - transfer.begun_s > self.limit_s:
            others = ", ".join(map(str, sorted(transfer.workers))) or str(self._worker)
            return (
                f"worker {others} did not take part within {self.limit_s:g} s. It has stopped, or "
                "waits for something else; py-spy dump --pid … shows where"
            )
        return ""


def within(limit_s: float, job: Callable[[], object], name: str) -> bool:
    """Run a job that may wait for ever; whether it was done within the limit. Raises its error."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            job()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    return not thread.is_alive()
