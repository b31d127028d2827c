"""A thread that waits for CUDA events one after another and runs a job after each."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import WorkerError

_CLOSE_LIMIT_S = 5.0


@dataclass(frozen=True)
class WaitJob:
    """A job to run after an event, or at once if there is none. Keeps `held` alive until then."""

    event: Any
    held: Sequence[Any]
    then: Callable[[], None]


class Waiter:
    def __init__(self, name: str) -> None:
        self._jobs: queue.Queue[WaitJob | None] = queue.Queue()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"autopar-{name}", daemon=True)
        self._thread.start()

    def put(self, job: WaitJob) -> None:
        self._jobs.put(job)

    def check(self) -> None:
        """Raise the error of a job that failed."""
        if self._failed is not None:
            raise WorkerError(
                f"a transfer to or from another process failed: {self._failed}."
            ) from self._failed

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if job.event is not None:
                    job.event.synchronize()
                job.then()
            except Exception as error:
                self._failed = self._failed or error
            del job
