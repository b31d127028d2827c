"""From the batches that `run_training` was given to batches by number, which can be repeated.

Batches that cannot be made again are kept, as copies on the host: a loader may use its buffers
again, a restart brings other devices, and devices have no memory to spare. So a data loader is
taken apart: the batches of its source are kept, and a new loader of the same kind is made wherever
training starts. Where no worker can be lost, only the newest batch is kept.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from autopar import session
from autopar.errors import ArgumentError
from autopar.runtime.remote.arrays import DistributedArray
from autopar.training.data_loader import DataLoader
from autopar.training.positions import Positioned

Batches = Iterable[Any] | Callable[[int], Iterable[Any]]


def batch_source(batches: Batches, start: int, must_repeat: bool = False) -> BatchSource:
    """`start`: the number of the first batch that will be requested. `must_repeat`: whether batches
    may be requested again even if no worker can be lost."""
    if isinstance(batches, DataLoader) and (
        session.current().remote is not None or not batches.begun
    ):
        return _LoadedBatches(batches, start, must_repeat)
    return BatchSource(batches, start, must_repeat)


class BatchSource:
    """Batches by number.

    can_go_back: whether forgotten batches can be made again.
    can_forget:  whether no batch before the next step is needed any more.
    """

    _reads_ahead = False

    def __init__(self, batches: Batches, start: int, must_repeat: bool = False) -> None:
        self._batches = batches
        self._positioned: Positioned | None = None
        self._positions: dict[int, Any] = {}  # where the source was before a batch, by its number
        self._newest: tuple[int, Any] | None = None  # as the source gave it
        self._kept: deque[Any] = deque()  # those before `_next`, on the host
        self._next = start  # the number of the batch that the source gives next
        self._taking = threading.Lock()  # guards the source, which may be slow
        self._changing = threading.Lock()  # guards the kept batches
        self.can_go_back = callable(batches) or isinstance(batches, Sequence)
        self.can_forget = self.can_go_back or not (must_repeat or workers_can_be_lost())
        self._iterator: Iterator[Any] | None = self._from(start)
        if start == 0 and self._positioned is not None and self._positioned.has_position:
            self._positions[0] = self._positioned.position()
            self.can_go_back = self.can_forget = True

    def _from(self, start: int) -> Iterator[Any]:
        batches = self._batches
        if callable(batches):
            made = batches(start)
            if not isinstance(made, Iterable):
                raise ArgumentError(
                    f"run_training(batches={batches!r}): the function returned {made!r} for the "
                    f"batches from number {start} on. Return an iterable of batches."
                )
            return iter(made)
        if isinstance(batches, Sequence):
            return (batches[i] for i in range(start, len(batches)))
        if not isinstance(batches, Iterable):
            raise ArgumentError(
                f"run_training(batches={batches!r}): needs an iterable of batches, or a function "
                "from the number of the first batch to such an iterable."
            )
        self._positioned = Positioned(batches)
        if start in self._positions:
            return self._positioned.begin(self._positions[start])
        iterator = self._positioned.begin()
        return itertools.islice(iterator, start, None) if start else iterator

    def resume(self, number: int, position: Any) -> None:
        """The next batch is `number`, and the source was at this position (None: not known) before
        it. A source that knows its position can go back, so no batch need be kept."""
        with self._taking, self._changing:
            if position is None:
                return
            self._positions = {number: position}
            self.can_go_back = self.can_forget = True
            self._kept.clear()
            if self._next != number or self._iterator is None or self._newest is None:
                self._newest, self._next, self._iterator = None, number, self._from(number)

    def position(self, number: int) -> Any:
        """Where the source is before batch `number`, as JSON; None if it does not know."""
        with self._taking:
            if number in self._positions:
                return self._positions[number]
            if self._positioned is None or self._next != number:
                return None
            return self._positioned.position()

    def get(self, number: int, **default: Any) -> Any:
        """Batch `number`, or the default after the last one; without a default, `StopIteration`."""
        with self._taking:
            try:
                return self._get(number)
            except StopIteration:
                if "default" in default:
                    return default["default"]
                raise

    def _get(self, number: int) -> Any:
        with self._changing:
            if self._newest is not None and self._newest[0] == number:
                return self._newest[1]
            if self._next - len(self._kept) <= number < self._next:
                return self._kept[number - self._next]
        if self._iterator is None or number < self._next:
            assert self.can_go_back, f"batch {number} was not kept"
            self._go_back_to(number)
        assert self._iterator is not None
        while True:
            batch = self._checked(next(self._iterator))
            if self._reads_ahead and self._positioned is not None:
                position = self._positioned.position()
                if position is not None:
                    self._positions[self._next + 1] = position
            kept = [] if self.can_forget else [_on_host(batch)]
            with self._changing:
                self._newest = self._next, batch
                self._kept.extend(kept)
                self._next += 1
                if self._newest[0] == number:
                    return batch

    def forget_before(self, number: int) -> None:
        with self._changing:
            if self._newest is not None and self._newest[0] < number:
                self._newest = None
            while self._kept and self._next - len(self._kept) < number:
                self._kept.popleft()
            for old in [one for one in self._positions if one < number]:
                del self._positions[old]

    def forget_all(self) -> None:
        """After a loss: drop what may be on lost workers, and what the source can make again."""
        if self.can_go_back:
            self.close()
        with self._taking:
            if self.can_go_back:
                self._iterator = None
            with self._changing:
                self._newest = None

    def _checked(self, batch: Any) -> Any:
        """A kept batch must outlive the workers."""
        leaves = () if self.can_go_back else jax.tree.leaves(batch)
        if any(isinstance(leaf, DistributedArray) for leaf in leaves):
            raise ArgumentError(
                "run_training(batches=…): the batches are on workers and would be lost with them. "
                "Give the data loader itself, or a function: "
                "batches=lambda start: autopar.data_loader(batches_from(start), step)."
            )
        return batch

    def close(self) -> None:
        """Close an iterator that the user's function made, but not one that the user gave."""
        close = getattr(self._iterator, "close", None)
        if callable(self._batches) and close is not None:
            close()

    def _go_back_to(self, number: int) -> None:
        BatchSource.close(self)
        self._newest, self._next, self._iterator = None, number, self._from(number)


def workers_can_be_lost() -> bool:
    return session.current().remote is not None


def _on_host(batch: Any) -> Any:
    """A copy that shares nothing with the batch. Weak types and keys have no NumPy array that is
    the same to JAX; they are small."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        if isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", True):
            return np.array(leaf)
        return leaf

    return jax.tree.map(copy, batch)


class _LoadedBatches(BatchSource):
    """The batches of a data loader's source by number, and a loader that places them as they are
    requested one after another."""

    _reads_ahead = True

    def __init__(self, loader: DataLoader, start: int, must_repeat: bool = False) -> None:
        if loader.begun:
            raise ArgumentError(
                "run_training(batches=…): the data loader has begun, so some batches are on the "
                "cluster already and would be lost with it. Pass a new one, or a function: "
                "batches=lambda start: autopar.data_loader(batches_from(start), step)."
            )
        super().__init__(loader.source, start, must_repeat)
        self._given = loader
        self._loader: DataLoader | None = None
        self._placed: tuple[int, Any] | None = None  # the last requested batch

    def get(self, number: int, **default: Any) -> Any:
        if self._placed is None or self._placed[0] != number:
            if self._loader is None or self._placed is None or self._placed[0] != number - 1:
                self._end_loader()
                self._loader = self._given.over(self._raw_from(number))
            try:
                self._placed = number, next(self._loader)
            except StopIteration:
                self._end_loader()
                if "default" in default:
                    return default["default"]
                raise
        return self._placed[1]

    def resume(self, number: int, position: Any) -> None:
        if position is not None:
            self._end_loader()
        super().resume(number, position)

    def _raw_from(self, start: int) -> Iterator[Any]:
        for number in itertools.count(start):
            try:
                batch = super().get(number)
            except StopIteration:
                return
            yield batch

    def forget_all(self) -> None:
        self._end_loader()
        super().forget_all()

    def close(self) -> None:
        self._end_loader()
        super().close()

    def _end_loader(self) -> None:
        loader, self._loader, self._placed = self._loader, None, None
        if loader is not None:
            loader.close()
