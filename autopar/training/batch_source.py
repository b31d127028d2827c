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

Batches = Iterable[Any] | Callable[[int], Iterable[Any]]


def batch_source(batches: Batches, start: int) -> BatchSource:
    """`start`: the number of the first batch that will be requested."""
    if isinstance(batches, DataLoader) and session.current().remote is not None:
        return _LoadedBatches(batches, start)
    return BatchSource(batches, start)


class BatchSource:
    """Batches by number.

    can_go_back: whether forgotten batches can be made again.
    can_forget:  whether no batch before the next step is needed any more.
    """

    def __init__(self, batches: Batches, start: int) -> None:
        self._batches = batches
        self._newest: tuple[int, Any] | None = None  # as the source gave it
        self._kept: deque[Any] = deque()  # those before `_next`, on the host
        self._next = start  # the number of the batch that the source gives next
        self._taking = threading.Lock()  # guards the source, which may be slow
        self._changing = threading.Lock()  # guards the kept batches
        self.can_go_back = callable(batches) or isinstance(batches, Sequence)
        self.can_forget = self.can_go_back or not workers_can_be_lost()
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
