"""From the batches that `run_training` was given to batches by number, which can be repeated.

Batches are kept, or made again, as they were before anything put them on devices, since a restart
brings other devices. So a data loader is taken apart: the batches of its source are kept, and a new
loader of the same kind is made wherever training starts.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from autopar import session
from autopar.errors import ArgumentError
from autopar.runtime.remote.arrays import DistributedArray
from autopar.training.data_loader import DataLoader

Batches = Iterable[Any] | Callable[[int], Iterable[Any]]


def batch_source(batches: Batches, start: int) -> BatchSource:
    """`start`: the number of the first batch that will be requested."""
    if isinstance(batches, DataLoader) and session.current().remote is not None:
        return _LoadedBatches(batches, start)
    return BatchSource(batches, start)


class BatchSource:
    """Batches by number.

    can_go_back: whether forgotten batches can be made again.
    """

    def __init__(self, batches: Batches, start: int) -> None:
        self._batches = batches
        self._kept: deque[Any] = deque()
        self._first = start  # the number of the first kept batch
        self._taking = threading.Lock()  # guards the source, which may be slow
        self._changing = threading.Lock()  # guards the kept batches
        self.can_go_back = callable(batches) or isinstance(batches, Sequence)
        self._iterator: Iterator[Any] | None = self._from(start)

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
        return itertools.islice(iter(batches), start, None)

    def get(self, number: int, **default: Any) -> Any:
        """Batch `number`, or the default after the last one; without a default, `StopIteration`."""
        with self._taking:
            if self._iterator is None or number < self._first:
                assert self.can_go_back
                self._go_back_to(number)
            assert self._iterator is not None
            try:
                while number >= self._first + len(self._kept):
                    batch = self._checked(next(self._iterator))
                    with self._changing:
                        self._kept.append(batch)
            except StopIteration:
                if "default" in default:
                    return default["default"]
                raise
            with self._changing:
                return self._kept[number - self._first]

    def forget_before(self, number: int) -> None:
        with self._changing:
            while self._kept and self._first < number:
                self._kept.popleft()
                self._first += 1

    def forget_all(self) -> None:
        """After a loss: drop batches that can be made again, since they may be on lost workers."""
        if self.can_go_back:
            self.close()
            with self._taking:
                self._kept.clear()
                self._iterator = None

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
        self._kept.clear()
        self._first, self._iterator = number, self._from(number)


class _LoadedBatches(BatchSource):
    """The batches of a data loader's source by number, and a loader that places them as they are
    requested one after another."""

    def __init__(self, loader: DataLoader, start: int) -> None:
        if loader.begun:
            raise ArgumentError(
                "run_training(batches=…): the data loader has begun, so some batches are on the "
                "cluster already and would be lost with it. Pass a new one, or a function: "
                "batches=lambda start: autopar.data_loader(batches_from(start), step)."
            )
        super().__init__(loader.source, start)
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
