"""Messages between the processes of one `jax.distributed` group that save a checkpoint.

Messages are JSON in the group's key-value store. It needs no device, so a save in the background
does not delay a step. Without a group there is one process, and no message.
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


def num_processes() -> int:
    """How many processes run this program. Without a group, JAX's devices are left alone."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first_process() -> bool:
    return num_processes() == 1 or jax.process_index() == 0


class Controllers:
    """The messages of one save. Every process creates these in the same order of saves."""

    def __init__(self) -> None:
        self.count = num_processes()
        self.process = jax.process_index() if self.count > 1 else 0
        self._number = next(_saves) if self.count > 1 else 0
        self._name = _folder(self._number)

    @property
    def is_first(self) -> bool:
        return self.process == 0

    def from_first(self, topic: str, make: Callable[[], Any]) -> Any:
        """The result of `make` in the first process, for all; if it fails there, all fail."""
        if self.count == 1:
            return make()
        if not self.is_first:
            return _result(self._receive(topic, 0), 0)
        return self._shared(topic, make)

    def to_first(self, topic: str, make: Callable[[], Any]) -> None:
        """Sends the result of `make`, or its error, to the first process."""
        self._shared(topic, make)

    def _shared(self, topic: str, make: Callable[[], Any]) -> Any:
        try:
            result = make()
        except BaseException as error:
            self._send(topic, {"error": str(error)})
            raise
        self._send(topic, {"result": result})
        return result

    def heard_by_first(self, topic: str) -> list[Any]:
        """The results of the other processes; raises if one failed."""
        others = range(1, self.count)
        results = [_result(self._receive(topic, process), process) for process in others]
        if self.count > 1 and self._number > 0:  # all have ended the save before: nobody reads it
            _jax.store_delete(_folder(self._number - 1))
        return results

    def _send(self, topic: str, message: dict[str, Any]) -> None:
        _jax.store_set(f"{self._name}/{topic}/{self.process}", json.dumps(message).encode())

    def _receive(self, topic: str, process: int) -> dict[str, Any]:
        message = _jax.store_get(f"{self._name}/{topic}/{process}", WAIT_S)
        if message is None:
            raise CheckpointError(
                f"saving a checkpoint: process {process} of {self.count} did not answer within "
                f"{WAIT_S:.0f} s. Every process must call save_checkpoint, in the same order."
            )
        return json.loads(message)


def _folder(number: int) -> str:
    """Of the keys of a save."""
    return f"autopar/checkpoint/{number}"


def _result(message: dict[str, Any], process: int) -> Any:
    if "error" in message:
        text = message["error"]  # the first passes on what it heard from another
        raise CheckpointError(text if text.startswith("process ") else f"process {process}: {text}")
    return message["result"]
