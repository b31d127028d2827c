"""`run_training`: a training loop that survives the loss of workers.

Step n takes batch n, and the checkpoint `step_n` holds the state after n steps, so a checkpoint
also tells the position in the data. When a worker is lost, the loop restarts the cluster, restores
the newest checkpoint and repeats the batches since then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from autopar import session
from autopar.api import ParallelFunction
from autopar.errors import ArgumentError, ClusterError, WorkerError
from autopar.runtime.checkpoints.find import latest_step
from autopar.runtime.checkpoints.leaves import canonical
from autopar.runtime.checkpoints.save import CheckpointSave, save_checkpoint
from autopar.training.batch_source import Batches, BatchSource, batch_source
from autopar.training.restore import restore_checkpoint

_MAX_WAIT_S = 30.0  # between two attempts to restart a cluster


def run_training(
    step: Callable[..., Any],
    state: Any,
    batches: Batches,
    *,
    checkpoint_dir: str | Path,
    max_restarts: int = 3,
    checkpoint_every: int = 100,
    keep: int | None = 2,
    on_step: Callable[[int, Any], None] | None = None,
    on_restart: Callable[[WorkerError | ClusterError], None] | None = None,
    num_steps: int | None = None,
) -> tuple[Any, Any]:
    """Train with checkpoints, and go on when workers are lost. Returns the last state and the other
    results of the last step.

    step:             takes (state, batch) and returns the new state, alone or in a tuple with other
                      results. The state is the first result with the structure, shapes and types of
                      `state`.
    state:            the initial state. If the folder has a checkpoint, training continues from the
                      newest one, and only the structure, shapes and types of `state` are used.
    batches:          one per step. To continue from step n, the first n are skipped; a function is
                      called with n and returns the batches from there. On a cluster, the host keeps
                      copies of an iterator's batches until the next checkpoint, to repeat them
                      after a restart. A function is called again.
    checkpoint_dir:   the folder of checkpoints, which all hosts must see.
    max_restarts:     how many times in a row to restart the cluster after a `WorkerError` without a
                      new checkpoint in between. Other errors are raised.
    checkpoint_every: steps between checkpoints, which are written in the background. A lost worker
                      costs at most these steps, plus those run while a checkpoint is written.
    keep:             how many checkpoints to keep; None for all.
    on_step:          called with the number of steps done and the step's results beside the state
                      (one as it is, several as a tuple, or None); again for repeated steps.
    on_restart:       called with the error before each restart, also after a restart that failed.
    num_steps:        when to stop, counted from the very first step; None: when the batches end.
    """
    _check_counts(
        max_restarts=(max_restarts, 0),
        checkpoint_every=(checkpoint_every, 1),
        keep=(keep, 1),
        num_steps=(num_steps, 0),
    )
    training = _Training(step, state, Path(checkpoint_dir), checkpoint_every, keep, on_step)
    source = batch_source(batches, latest_step(checkpoint_dir) or 0)
    try:
        return _run_with_restarts(training, state, source, num_steps, max_restarts, on_restart)
    finally:
        source.close()


def _run_with_restarts(
    training: _Training,
    state: Any,
    source: BatchSource,
    num_steps: int | None,
    max_restarts: int,
    on_restart: Callable[[WorkerError | ClusterError], None] | None,
) -> tuple[Any, Any]:
    restarts = 0
    must_restart = False
    while True:
        written = training.written
        try:
            if must_restart:
                session.restart()
            training.load(state, source)
            must_restart = False
            return training.run(source, num_steps)
        except (WorkerError, ClusterError) as error:
            if isinstance(error, ClusterError) and not must_restart:
                raise  # the cluster never started
            must_restart = True
            training.settle()
            source.forget_all()
            restarts = 1 if training.written != written else restarts + 1
            if restarts > max_restarts:
                raise
            if on_restart is not None:
                on_restart(error)
            if isinstance(error, ClusterError):  # nodes may come back
                time.sleep(min(2.0**restarts, _MAX_WAIT_S))


def _check_counts(**counts: tuple[Any, int]) -> None:
    for name, (given, least) in counts.items():
        if given is None and name in ("keep", "num_steps"):
            continue
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            raise ArgumentError(f"run_training({name}={given!r}): needs a whole number ≥ {least}.")


class _Training:
    """The state, the number of steps done, and the checkpoints.

    written: the step of the newest checkpoint that is known to be complete.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        state: Any,
        directory: Path,
        every: int,
        keep: int | None,
        on_step: Callable[[int, Any], None] | None,
    ) -> None:
        self.written: int | None = None
        self._step, self._on_step = step, on_step
        self._directory, self._every, self._keep = directory, every, keep
        self._like = jax.tree.map(_shape_of, state)
        self._state: Any = None
        self._done = 0
        self._save: CheckpointSave | None = None
        self._saved_step = 0

    def load(self, state: Any, source: BatchSource) -> None:
        """Restore the newest checkpoint, placed for the step; without one, take the given state and
        save it."""
        newest = latest_step(self._directory)
        if newest is None:
            self._state, self._done = state, 0
            self._begin_save()
            self._finish_save()  # the step will use up the only copy
            return
        self._done = self.written = newest
        self._state = None  # freed before the next one is made
        target = self._like
        if isinstance(self._step, ParallelFunction):
            batch = source.get(newest, default=None)
            if batch is not None:
                self._step.plan(self._like, batch)
                target = self._step
        self._state = restore_checkpoint(self._directory, target, step=newest)

    def run(self, source: BatchSource, num_steps: int | None) -> tuple[Any, Any]:
        results = None
        while num_steps is None or self._done < num_steps:
            try:
                batch = source.get(self._done)
            except StopIteration:
                break
            outputs = self._step(self._state, batch)
            self._state, results = self._split(outputs)
            self._done += 1
            del outputs, batch
            if self._on_step is not None:
                self._on_step(self._done, results)
            if self._done % self._every == 0:
                self._begin_save()
            elif self._save is not None and self._save.done:
                self._finish_save()
            source.forget_before(self._done if source.can_forget else self.written or 0)
        self._finish_save()
        if self.written != self._done:
            self._begin_save()
            self._finish_save()
        return self._state, results

    def settle(self) -> None:
        """After a loss: finish the checkpoint that was being written, or give it up."""
        try:
            self._finish_save()
        except (WorkerError, ClusterError):
            self._save = None

    def _begin_save(self) -> None:
        self._finish_save()
        save = save_checkpoint(
            self._directory,
            self._state,
            self._done,
            keep=self._keep,
            asynchronous=True,
            overwrite=True,
        )
        assert isinstance(save, CheckpointSave)
        self._save, self._saved_step = save, self._done

    def _finish_save(self) -> None:
        if self._save is not None:
            self._save.wait()
            self._save, self.written = None, self._saved_step

    def _split(self, outputs: Any) -> tuple[Any, Any]:
        """(new state, other results)."""
        if self._is_state(outputs):
            return outputs, None
        if isinstance(outputs, (tuple, list)):
            for i, output in enumerate(outputs):
                if self._is_state(output):
                    rest = (*outputs[:i], *outputs[i + 1 :])
                    return output, rest[0] if len(rest) == 1 else (rest or None)
        raise ArgumentError(
            f"run_training(step={self._step!r}): returned {jax.tree.structure(outputs)}, where "
            f"nothing has the structure, shapes and types of the state, "
            f"{jax.tree.structure(self._like)}. Return the new state, or a tuple that contains it."
        )

    def _is_state(self, output: Any) -> bool:
        if jax.tree.structure(output) != jax.tree.structure(self._like):
            return False
        pairs = zip(jax.tree.leaves(output), jax.tree.leaves(self._like), strict=True)
        return all(_type_of(one) == _type_of(other) for one, other in pairs)


def _shape_of(leaf: Any) -> Any:
    """A leaf without its values; Python numbers, and leaves that are not arrays, as they are."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    is_weak = bool(getattr(leaf, "weak_type", False))
    sharding = None
    if isinstance(leaf, jax.Array) and leaf.committed:
        sharding = leaf.sharding
    dtype = canonical(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding, weak_type=is_weak)


def _type_of(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), canonical(leaf.dtype)
    if isinstance(leaf, (bool, int, float, complex)):
        return (), jax.typeof(leaf).dtype
    return None
