"""Workers of meshes in processes of your own: the executor of one mesh, and its thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autopar.runtime.remote.command_thread import CommandThread
from autopar.runtime.remote.executor import Executor
from autopar.runtime.remote.mailbox import Mailbox
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.remote.progress import WorkerProgress


@dataclass(frozen=True)
class ProcessWorker:
    """A process's part of one mesh. `own`: what runs it, if it is of this process."""

    place: WorkerPlace
    process: int
    own: OwnWorker | None


class OwnWorker:
    """The executor of one mesh in this process, with its thread."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.mailbox = Mailbox()
        self.progress = WorkerProgress(str(Path(place.folder) / f"worker-{place.worker}"))
        self.executor = Executor(place, self.progress, self.mailbox)
        self.commands = CommandThread(self.progress)
        self._num_sent = 0
        self._lock = threading.Lock()

    def submit(self, command: str, args: tuple[Any, ...], is_step: bool) -> Future[Any]:
        call = partial(getattr(self.executor, command), *args)
        with self._lock:
            number, self._num_sent = self._num_sent, self._num_sent + 1
            return self.commands.submit(number, command, call, is_step)

    def close(self) -> None:
        self.commands.close()
        self.executor.close()
