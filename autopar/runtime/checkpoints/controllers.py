"""What the processes of one `jax.distributed` group tell each other while they save a checkpoint.

Texts go through the group's own key-value store: it needs no device, so a save in the background
does not stand in the way of a step. Without a group there is one process, and nothing to tell.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

from autopar import _jax
from autopar.errors import CheckpointError

WAIT_S = 1800.0  # for the slowest process to write its shards

_saves = itertools.count()


class Controllers:
    """One save's conversation; made by every process, in the same order of saves."""

    def __init__(self) -> None:
        is_group = jax.distributed.is_initialized()
        self.count = jax.process_count() if is_group else 1
        self.process = jax.process_index() if self.count > 1 else 0
        self._name = f"autopar/checkpoint/{next(_saves)}" if self.count > 1 else ""

    @property
    def is_first(self) -> bool:
        return self.process == 0

    def from_first(self, topic: str, make: Callable[[], Any]) -> Any:
        """What `make` gives to the first process, in all of them; if it fails there, all fail."""
        if self.count == 1:
            return make()
        if not self.is_first:
            return _result(self._hear(topic, 0), 0)
        return self._told(topic, make)

    def to_first(self, topic: str, make: Callable[[], Any]) -> None:
        """What `make` gives to this process is told to the first; if it fails, that is."""
        self._told(topic, make)

    def _told(self, topic: str, make: Callable[[], Any]) -> Any:
        try:
            result = make()
        except BaseException as error:
            self._tell(topic, {"error": str(error)})
            raise
        self._tell(topic, {"result": result})
        return result

    def heard_by_first(self, topic: str) -> list[Any]:
        """What the other processes have told; raises if it failed in one of them."""
        others = range(1, self.count)
        return [_result(self._hear(topic, process), process) for process in others]

    def _tell(self, topic: str, what: dict[str, Any]) -> None:
        _jax.store_set(f"{self._name}/{topic}/{self.process}", json.dumps(what).encode())

    def _hear(self, topic: str, process: int) -> dict[str, Any]:
        told = _jax.store_get(f"{self._name}/{topic}/{process}", WAIT_S)
        if told is None:
            raise CheckpointError(
                f"saving a checkpoint: process {process} of {self.count} did not answer within "
                f"{WAIT_S:.0f} s. Every process must call save_checkpoint, in the same order."
            )
        return json.loads(told)


def _result(message: dict[str, Any], process: int) -> Any:
    if "error" in message:
        raise CheckpointError(f"process {process}: {message['error']}")
    return message["result"]
