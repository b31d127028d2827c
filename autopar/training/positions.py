"""Where a loader of batches is: its state ↔ JSON, so that a checkpoint can hold it.

Knows loaders with `state_dict` and `load_state_dict` (torchdata's `StatefulDataLoader`), and
iterators with `get_state` and `set_state` (grain's). States are made of plain Python values, bytes,
arrays and tensors; nothing is pickled.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from autopar import _jax
from autopar.errors import ArgumentError, CheckpointError
from autopar.progress import LOGGER
from autopar.runtime.checkpoints.controllers import num_processes
from autopar.runtime.ranks.consensus import arrival_limit_s

_numbers = itertools.count()
_PLAIN = (str, int, float, bool, type(None))


class Positioned:
    """The batches of an iterable, and their position, if the iterable knows it."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable
        self._iterator: Iterator[Any] | None = None
        self._has_dicts = _has(iterable, "state_dict", "load_state_dict")

    def begin(self, position: Any = None) -> Iterator[Any]:
        """The batches, from a position on."""
        if position is not None and self._has_dicts:
            self._iterable.load_state_dict(_decoded(position))  # type: ignore[attr-defined]
        iterator = iter(self._iterable)
        self._iterator = iterator
        if position is not None and not self._has_dicts:
            if not _has(iterator, "get_state", "set_state"):
                raise CheckpointError(
                    f"run_training(batches={self._iterable!r}): the checkpoint has the position of "
                    "a loader that saves its state, and these batches cannot take it. Give the "
                    "loader that was used before, or a function of the first batch's number."
                )
            iterator.set_state(_decoded(position))  # type: ignore[attr-defined]
        return iterator

    @property
    def has_position(self) -> bool:
        return self._has_dicts or _has(self._iterator, "get_state", "set_state")

    def position(self) -> Any:
        """Where it is now, as JSON; None if it does not know."""
        if self._has_dicts:
            return _encoded(self._iterable.state_dict())  # type: ignore[attr-defined]
        if self.has_position:
            return _encoded(self._iterator.get_state())  # type: ignore[union-attr]
        return None


def gather_positions(own: Any) -> list[Any] | None:
    """The positions of all processes, in the first one, which saves them; None if there are none.
    Every process must call this, in the same order."""
    if num_processes() == 1:
        return None if own is None else [own]
    me, count, name = jax.process_index(), jax.process_count(), f"autopar/position/{next(_numbers)}"
    if me != 0:
        _jax.store_set(f"{name}/{me}", json.dumps(own).encode())
        return None
    positions = [own]
    for process in range(1, count):
        text = _jax.store_get(f"{name}/{process}", arrival_limit_s())
        if text is None:
            raise CheckpointError(
                f"run_training: process {process} did not say where its loader is within "
                f"{arrival_limit_s():g} s. Every process must run the same steps."
            )
        positions.append(json.loads(text))
    _jax.store_delete(name)
    return None if None in positions else positions


def own_position(positions: Any) -> Any:
    """This process's, of those that were saved; None if other processes saved them."""
    if not isinstance(positions, list):
        return None
    if len(positions) != num_processes():
        LOGGER.warning(
            "The checkpoint has the positions of %d loaders, and there are %d processes: batches "
            "are drawn and dropped instead.",
            len(positions),
            num_processes(),
        )
        return None
    return positions[jax.process_index() if len(positions) > 1 else 0]


def _has(thing: object, *names: str) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)


def _encoded(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(entry)] for key, entry in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_encoded(entry) for entry in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    is_tensor = type(value).__module__.partition(".")[0] == "torch"
    array = value.numpy() if is_tensor and hasattr(value, "numpy") else value
    if isinstance(array, (np.ndarray, np.generic)) and array.dtype.kind in "biufc":
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        data = base64.b64encode(array.tobytes()).decode()
        kind = "tensor" if is_tensor else "array"
        return {kind: [array.dtype.str, list(array.shape), data]}
    raise ArgumentError(
        f"run_training(batches=…): the state of the loader has a {type(value).__name__}, which "
        "cannot be saved in a checkpoint; it may have plain values, bytes, arrays and tensors. "
        "Give a function of the first batch's number instead of the loader."
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    try:
        ((kind, body),) = value.items()
        if kind == "dict":
            return {_decoded(key): _decoded(entry) for key, entry in body}
        if kind in ("list", "tuple"):
            entries = [_decoded(entry) for entry in body]
            return tuple(entries) if kind == "tuple" else entries
        if kind == "bytes":
            return base64.b64decode(body, validate=True)
        if kind in ("array", "tensor"):
            dtype, shape, data = np.dtype(body[0]), body[1], base64.b64decode(body[2])
            array = np.frombuffer(data, dtype).reshape(shape).copy()
            return _tensor(array) if kind == "tensor" else array
    except (AttributeError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"the saved position of a loader is malformed: {error}") from error
    raise CheckpointError(f"the saved position of a loader is malformed: a {kind!r}")


def _tensor(array: np.ndarray) -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise CheckpointError(
            f"the saved position of a loader has tensors, and torch cannot be imported: {error}"
        ) from error
    return torch.from_numpy(array)
