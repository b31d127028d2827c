"""A data channel within one process: where driver and worker are the same process.

It is both ends at once: what one side sends or offers, the other takes, without a copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.runtime.remote.frames import DataTimeout, PeerGone


class Mailbox:
    """See `ChannelServer` (`take`, `offer`) and `ChannelClient` (`send`, `receive`, `discard`)."""

    address = ("", 0)  # nobody connects to it

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._to_worker: dict[int, deque[Sequence[Any]]] = {}
        self._to_driver: dict[int, deque[Sequence[Any]]] = {}
        self._unwanted: set[int] = set()
        self._closed = False

    def send(self, key: int, arrays: Sequence[Any]) -> None:
        self._put(self._to_worker, key, arrays)

    def take(self, key: int, limit_s: float) -> list[np.ndarray]:
        return self._wait(self._to_worker, key, limit_s)

    def offer(self, key: int, arrays: Sequence[Any]) -> None:
        with self._changed:
            if key in self._unwanted:
                self._unwanted.discard(key)
                return
        self._put(self._to_driver, key, arrays)

    def receive(self, key: int, limit_s: float) -> list[np.ndarray]:
        return self._wait(self._to_driver, key, limit_s)

    def discard(self, key: int) -> None:
        """Nobody will receive the value of `key`."""
        with self._changed:
            if self._to_driver.pop(key, None) is None:
                self._unwanted.add(key)

    def close(self) -> None:
        """Threads that wait get an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, box: dict[int, deque[Sequence[Any]]], key: int, arrays: Sequence[Any]) -> None:
        with self._changed:
            box.setdefault(key, deque()).append(arrays)
            self._changed.notify_all()

    def _wait(
        self, box: dict[int, deque[Sequence[Any]]], key: int, limit_s: float
    ) -> list[np.ndarray]:
        with self._changed:
            self._changed.wait_for(lambda: key in box or self._closed, limit_s)
            if key in box:
                first = box[key].popleft()
                if not box[key]:
                    del box[key]
                return list(first)
        if self._closed:
            raise PeerGone(f"Data of key {key}: this channel is closed.")
        raise DataTimeout(f"Data of key {key} did not come within {limit_s:g} s.")
