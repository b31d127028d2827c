"""One mesh of a cluster as the driver sees it: its workers, their replies and data channels.

`WorkerGroup` is the interface to whoever started the workers (`runtime.ray`, or a test).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from autopar.ir.remote import Endpoint
from autopar.runtime.remote.commands import CommandName
from autopar.runtime.remote.place import WorkerPlace


class PendingReply(Protocol):
    """A worker's answer to one command."""

    def result(self, limit_s: float | None = None) -> Any: ...

    def done(self) -> bool: ...


class WorkerHandle(Protocol):
    @property
    def place(self) -> WorkerPlace: ...


class Channel(Protocol):
    """The driver's end of what carries arrays to one worker and back."""

    def send(self, key: int, arrays: Sequence[Any]) -> None: ...

    def receive(self, key: int, limit_s: float) -> list[np.ndarray]: ...

    def discard(self, key: int) -> None: ...

    def close(self) -> None: ...


class WorkerGroup(Protocol):
    """The workers of one mesh, however they were started. `submit` sends a command to each, with
    arguments of its own, or to those whose arguments are not None; if a `fatal` command raises, the
    session has failed. A group that is `closed` has no workers any more."""

    devices: tuple[int, ...]
    num_arrays: int
    closed: bool

    @property
    def workers(self) -> Sequence[WorkerHandle]: ...

    def submit(
        self,
        command: CommandName,
        args_per_worker: Sequence[tuple[Any, ...] | None],
        fatal: bool = False,
    ) -> Sequence[PendingReply]: ...


class RemoteMesh:
    """The workers of one mesh, with a channel to each."""

    def __init__(self, group: WorkerGroup, channels: Sequence[Channel]) -> None:
        self.group = group
        self.devices = tuple(group.devices)
        self.channels = tuple(channels)
        self.places: list[WorkerPlace] = [worker.place for worker in group.workers]
        self.endpoints: tuple[Endpoint, ...] = tuple(
            Endpoint(place.worker, device)
            for place in self.places
            for device in range(len(place.devices))
        )
        self.owners = [
            (worker, device)
            for worker, place in enumerate(self.places)
            for device in range(len(place.devices))
        ]
        self._released: deque[int] = deque()
        self._ended: deque[int] = deque()

    def release(self, number: int) -> None:
        self._released.append(number)

    def take_released(self) -> tuple[int, ...]:
        """Numbers of the arrays whose handles were dropped since the last time."""
        released = _take_all(self._released)
        self.group.num_arrays -= len(released)
        return released

    def free_released(self) -> None:
        """Free arrays whose handles were dropped now, rather than with the next step."""
        if released := self.take_released():
            self.submit("free", released)

    def end_task(self, number: int) -> None:
        self._ended.append(number)

    def take_ended(self) -> tuple[int, ...]:
        """Numbers of the steps that nobody can call any more."""
        return _take_all(self._ended)

    def submit(
        self, command: CommandName, *args: Any, fatal: bool = False
    ) -> Sequence[PendingReply]:
        """Send the same command to every worker."""
        return self.group.submit(command, [args] * len(self.places), fatal=fatal)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


def _take_all(numbers: deque[int]) -> tuple[int, ...]:
    """Empty a queue that other threads may append to."""
    taken = []
    while numbers:
        taken.append(numbers.popleft())
    return tuple(taken)
