"""`autopar.data_loader`: from batches and a parallelized step to the same batches, placed for it.

A thread takes batches from the iterable and places them while the step computes, at most `prefetch`
ahead. It keeps no reference to the `DataLoader`, so dropping the loader ends the thread. The source
is closed by the thread that used it.
"""

from __future__ import annotations

import atexit
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from autopar.api import ParallelFunction
from autopar.errors import ArgumentError, DataError
from autopar.lower.planned_step import PlannedStep
from autopar.tracer.flat_call import argument_names, is_array_leaf

Argument = int | str
Arguments = Argument | tuple[Argument, ...] | None

_JOIN_S = 5.0  # how long `close` waits for a source that is making a batch


def data_loader(
    iterable: Iterable[Any],
    step: ParallelFunction,
    *,
    prefetch: int = 2,
    argument: Argument | Sequence[Argument] | None = None,
) -> DataLoader:
    """Iterate over batches that are placed for `step` in the background.

    iterable: anything with `__iter__`: a list, a generator, a PyTorch, tf.data or grain loader.
              Batches are pytrees; their leaves may be NumPy or JAX arrays, or tensors that NumPy
              can read.
    step:     a parallelized function. Before its first call, batches come as they are.
    prefetch: how many batches to prepare ahead.
    argument: the position or name of the step's argument that a batch is; several if a batch is a
              tuple with one entry for each. Default: the step's batch arguments.

    Returns a `DataLoader`. A loop that ends early leaves the thread waiting: use `with`, or call
    `close()`. The loop raises `DataError` if the source fails, or if a batch has another structure,
    shapes or types than the step was planned for.
    """
    if not isinstance(step, ParallelFunction):
        raise ArgumentError(
            f"data_loader(step={step!r}): needs the parallelized step, to place batches for it: "
            "step = autopar.parallelize(fn), then autopar.data_loader(batches, step)."
        )
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        raise ArgumentError(
            f"data_loader({iterable!r}, …): needs an iterable of batches, such as a list, a "
            "generator or a PyTorch DataLoader."
        )
    if type(prefetch) is not int or prefetch < 1:
        raise ArgumentError(
            f"data_loader(prefetch={prefetch!r}): needs a whole number of batches, at least 1."
        )
    return DataLoader(iterable, step, prefetch, _checked_argument(argument))


def _checked_argument(given: Any) -> Arguments:
    if given is None:
        return None
    checked: Arguments = tuple(given) if isinstance(given, (tuple, list)) else given
    for one in checked if isinstance(checked, tuple) else (checked,):
        if not (isinstance(one, str) or (type(one) is int and one >= 0)):
            raise ArgumentError(
                f"data_loader(argument={given!r}): needs the position (a whole number ≥ 0) or the "
                "name of the step's argument that a batch is, or several of them."
            )
    return checked


class DataLoader:
    """An iterator over placed batches, and a context manager.

    A second loop continues where the first one stopped. At the end the iterable is closed; another
    loop then starts again, if the iterable can.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        step: ParallelFunction,
        prefetch: int,
        argument: Arguments,
    ) -> None:
        self._iterable = iterable
        self._step = step
        self._prefetch = prefetch
        self._argument = argument
        self._queue: _Queue | None = None
        self._closed = False

    @property
    def source(self) -> Iterable[Any]:
        """The iterable that it was made from."""
        return self._iterable

    @property
    def begun(self) -> bool:
        """Whether anything was taken from it, or it is closed."""
        return self._queue is not None or self._closed

    def over(self, iterable: Iterable[Any]) -> DataLoader:
        """A loader of the same kind for other batches."""
        return DataLoader(iterable, self._step, self._prefetch, self._argument)

    def __iter__(self) -> DataLoader:
        if self._queue is not None and self._queue.at_end and not self._closed:
            if isinstance(self._iterable, Iterator):
                return self  # exhausted: the loop ends at once, as it would without a loader
            self._queue = None
        return self

    def __next__(self) -> Any:
        if self._closed:
            raise DataError(
                "next() on a closed data loader. Make a new one with autopar.data_loader(…)."
            )
        if self._queue is None:
            self._queue = _start(self._iterable, self._step, self._prefetch, self._argument)
            weakref.finalize(self, self._queue.stop).atexit = False
        return self._queue.get()

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and close the source; raises what closing the source raises. Waits for a
        source that is making a batch, but not forever."""
        self._closed = True
        if self._queue is not None:
            self._queue.stop()
            self._queue.join()
            self._queue.raise_what_closing_raised()


class _Queue:
    """What the thread and the loader share: prepared batches, and the request to stop."""

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._changed = threading.Condition()
        self._ready: deque[Any] = deque()
        self._stopped = False
        self._error: BaseException | None = None
        self._close_error: BaseException | None = None
        self._finished = False  # the thread adds nothing more
        self.at_end = False  # and nothing is left
        self.thread: threading.Thread | None = None

    # -- the loader's side

    def get(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished)
            if self._ready:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch
            self.at_end = True
            error, self._error = self._error, None
        self.join()
        if error is None:
            self.raise_what_closing_raised()
            raise StopIteration
        raise error

    def stop(self) -> None:
        """Ask the thread to end; does not wait for it."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self) -> None:
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(_JOIN_S)

    def raise_what_closing_raised(self) -> None:
        with self._changed:
            error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    # -- the thread's side

    def wait_for_room(self) -> bool:
        """Wait until a batch may be added; False if the thread should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._prefetch)
            return not self._stopped

    def put(self, batch: Any) -> None:
        with self._changed:
            if not self._stopped:
                self._ready.append(batch)
                self._changed.notify_all()

    def finish(self, error: BaseException | None, close_error: BaseException | None) -> None:
        with self._changed:
            self._error, self._close_error = error, close_error
            self._finished = True
            self._changed.notify_all()


_running: weakref.WeakSet[_Queue] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread inside JAX when the interpreter exits would crash the process."""
    queues = list(_running)
    for queue in queues:
        queue.stop()
    for queue in queues:
        if queue.thread is not None:
            queue.thread.join(_JOIN_S)


def _start(
    iterable: Iterable[Any],
    step: ParallelFunction,
    prefetch: int,
    argument: Arguments,
) -> _Queue:
    queue = _Queue(prefetch)
    queue.thread = threading.Thread(
        target=_load,
        args=(queue, iterable, step, argument),
        name="autopar-data-loader",
        daemon=True,
    )
    _running.add(queue)
    queue.thread.start()
    return queue


def _load(
    queue: _Queue,
    iterable: Iterable[Any],
    step: ParallelFunction,
    argument: Arguments,
) -> None:
    """The thread: take, place and hand over batches until the source ends or it is stopped."""
    error = close_error = None
    source: Any = None
    number = 0
    try:
        source = iter(iterable)
        while queue.wait_for_room():
            try:
                batch = next(source)
            except StopIteration:
                break
            queue.put(_placed(_as_arrays(batch, number), step, argument))
            number += 1
            del batch
    except BaseException as raised:
        raised.add_note(f"autopar.data_loader: this was raised at batch {number}, counted from 0.")
        error = raised
    try:
        close = getattr(source, "close", None)
        if callable(close):
            close()
    except BaseException as raised:
        close_error = raised
    queue.finish(error, close_error)


# -- batches


def _as_arrays(batch: Any, number: int) -> Any:
    """The batch, with tensors of other libraries as NumPy arrays."""
    flat, treedef = tree_flatten_with_path(batch)
    return tree_unflatten(treedef, [_as_array(leaf, path, number) for path, leaf in flat])


def _as_array(leaf: Any, path: Any, number: int) -> Any:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        return leaf
    numpy = getattr(leaf, "numpy", None)
    if not callable(numpy) and not hasattr(leaf, "__array__"):
        return leaf
    try:
        return np.asarray(numpy() if callable(numpy) else leaf)
    except Exception as error:
        raise DataError(
            f"batch{keystr(path)} of batch {number}: a {type(leaf).__name__} that cannot become a "
            f"NumPy array: {error}. Let the iterable give arrays of numbers on the host."
        ) from error


def _placed(batch: Any, step: ParallelFunction, argument: Arguments) -> Any:
    """The batch, placed as a plan of the step wants it. Without a plan for such batches, a copy of
    it on the host."""
    for planned, executable in step.compiled_entries():
        positions = _positions_in(planned, step, batch, argument)
        if positions is None:
            continue
        flat, treedef = tree_flatten_with_path(batch)
        leaves = [leaf for _, leaf in flat]
        wanted = {position: leaves[i] for i, position in positions.items() if _can_move(leaves[i])}
        placed = executable.place_inputs(wanted)
        return tree_unflatten(
            treedef, [placed.get(positions.get(i, -1), leaf) for i, leaf in enumerate(leaves)]
        )
    flat, treedef = tree_flatten_with_path(batch)
    copied = [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for _, leaf in flat]
    return tree_unflatten(treedef, copied)


def _can_move(leaf: Any) -> bool:
    """Whether a leaf is placed ahead. Python numbers go with the call. Arrays on several devices
    stay: moving them may need a program, which must not come between those of the step."""
    if isinstance(leaf, jax.Array):
        return len(leaf.sharding.device_set) == 1
    return isinstance(leaf, (np.ndarray, np.generic))


def _positions_in(
    planned: PlannedStep, step: ParallelFunction, batch: Any, argument: Arguments
) -> dict[int, int] | None:
    """{leaf of the batch: input of the step} if the plan is for such batches, or None."""
    call, avals = planned.traced.call, planned.traced.avals
    if argument is None:
        owners = tuple(dict.fromkeys(call.argument[i] for i in planned.traced.batch))
        values = batch if len(owners) > 1 else [batch]
    else:
        given = argument if isinstance(argument, tuple) else (argument,)
        owners = tuple(_owner(one, step, call.argument) for one in given)
        values = batch if isinstance(argument, tuple) else [batch]
    if not owners or not isinstance(values, (tuple, list)) or len(values) != len(owners):
        return None
    input_of_leaf: dict[int, int] = {}
    num_leaves = 0
    for owner, value in zip(owners, values, strict=True):
        positions = [i for i, one in enumerate(call.argument) if one == owner]
        flat, _ = tree_flatten_with_path(value)
        arrays = [i for i, (_, leaf) in enumerate(flat) if is_array_leaf(leaf)]
        if [flat[i][0] for i in arrays] != [call.key_paths[p] for p in positions]:
            return None
        for i, position in zip(arrays, positions, strict=True):
            if not _has_type(flat[i][1], avals[position]):
                return None
            input_of_leaf[num_leaves + i] = position
        num_leaves += len(flat)
    return input_of_leaf


def _owner(given: Argument, step: ParallelFunction, owners: Sequence[Argument]) -> Argument:
    """An argument as it is passed in the call: its position, or its name if passed by name."""
    names = argument_names(inspect.unwrap(step))
    if isinstance(given, str):
        other = names.index(given) if given in names else given
    else:
        other = names[given] if given < len(names) else given
    return given if given in owners else other


def _has_type(leaf: Any, aval: Any) -> bool:
    try:
        type_ = jax.typeof(leaf)
    except TypeError:
        return False
    return (type_.shape, type_.dtype) == (aval.shape, aval.dtype)
