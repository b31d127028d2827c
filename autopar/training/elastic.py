"""`run_training`: a training loop that survives the loss of workers, and its own end.

Step n takes batch n, and the checkpoint `step_n` holds the state after n steps, so a checkpoint
also tells the position in the data. When a worker is lost, the loop restarts the cluster, restores
the newest checkpoint and repeats the batches since then. When training should end or the cluster
takes nodes away, it saves a checkpoint first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from autopar.api import ParallelFunction
from autopar.errors import ArgumentError, ClusterError, WorkerError
from autopar.progress import LOGGER
from autopar.runtime.checkpoints.find import latest_step
from autopar.runtime.checkpoints.leaves import canonical
from autopar.runtime.checkpoints.save import (
    CheckpointSave,
    UnfinishedSaveError,
    forget_saves,
    save_checkpoint,
)
from autopar.training.batch_source import Batches, BatchSource, batch_source
from autopar.training.last_results import finished_results, write_last_results
from autopar.training.preemption import StopRequests
from autopar.training.restarts import ClusterWatch, PlannedRestart, RestartPolicy, Restarts
from autopar.training.restore import restore_checkpoint


def run_training(
    step: Callable[..., Any],
    state: Any,
    batches: Batches,
    *,
    checkpoint_dir: str | Path,
    max_restarts: int = 3,
    restart_policy: RestartPolicy | None = None,
    checkpoint_every: int = 100,
    keep: int | None = 2,
    on_step: Callable[[int, Any], None] | None = None,
    on_restart: Callable[[WorkerError | ClusterError], None] | None = None,
    num_steps: int | None = None,
    grace_s: float = 30.0,
) -> tuple[Any, Any]:
    """Train with checkpoints, and go on when workers are lost. Returns the last state and the other
    results of the last step; a finished run's are read again if they were numbers, else None.

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
    restart_policy:   how long to wait for nodes, whether fewer will do, and more; see
                      `RestartPolicy`.
    checkpoint_every: steps between checkpoints, which are written in the background. A lost worker
                      costs at most these steps, plus those run while a checkpoint is written.
    keep:             how many checkpoints to keep; None for all.
    on_step:          called with the number of steps done and the step's results beside the state
                      (one as it is, several as a tuple, or None); again for repeated steps.
    on_restart:       called with the error before each restart, also after a restart that failed.
    num_steps:        when to stop, counted from the very first step; None: when the batches end.
    grace_s:          after SIGTERM, Ctrl-C, or SIGUSR1 under SLURM, a checkpoint is saved within
                      this time; then `Preempted`, a `SystemExit`, is raised, or `KeyboardInterrupt`
                      after Ctrl-C. The same call in a new process goes on exactly there.
    """
    _check_counts(
        max_restarts=(max_restarts, 0),
        checkpoint_every=(checkpoint_every, 1),
        keep=(keep, 1),
        num_steps=(num_steps, 0),
    )
    if isinstance(grace_s, bool) or not isinstance(grace_s, (int, float)) or not grace_s > 0:
        raise ArgumentError(f"run_training(grace_s={grace_s!r}): needs a number of seconds > 0.")
    policy = restart_policy or RestartPolicy()
    training = _Training(step, state, Path(checkpoint_dir), checkpoint_every, keep, on_step)
    source = batch_source(batches, latest_step(checkpoint_dir) or 0)
    try:
        with StopRequests(grace_s) as stops, ClusterWatch(policy) as watch:
            restarts = Restarts(policy, max_restarts, on_restart, stops.sleep)
            return _run_with_restarts(training, state, source, num_steps, restarts, stops, watch)
    finally:
        source.close()


def _run_with_restarts(
    training: _Training,
    state: Any,
    source: BatchSource,
    num_steps: int | None,
    restarts: Restarts,
    stops: StopRequests,
    watch: ClusterWatch,
) -> tuple[Any, Any]:
    must_restart = False
    while True:
        written = training.written
        try:
            if must_restart:
                restarts.start_again(lambda: training.load(state, source))
            else:
                training.load(state, source)
            watch.watch()
            return training.run(source, num_steps, stops, watch)
        except PlannedRestart as reason:
            watch.forget()
            source.forget_all()
            restarts.planned(reason)
        except WorkerError as error:
            watch.forget()
            training.settle(stops)
            source.forget_all()
            if stops.is_asked:
                raise stops.error(training.written) from error
            restarts.after_loss(error, training.written != written)
        must_restart = True


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

    def run(
        self,
        source: BatchSource,
        num_steps: int | None,
        stops: StopRequests,
        watch: ClusterWatch,
    ) -> tuple[Any, Any]:
        """All steps. `PlannedRestart` if the cluster should be restarted; what `stops` raises if
        training should end. Both after a checkpoint."""
        results, first = None, self._done
        while num_steps is None or self._done < num_steps:
            if stops.wanted_after(self._done, self.written):
                self._save_in_time(stops)
                raise stops.error(self.written)
            if watch.reason:
                self._save_now()
                raise PlannedRestart(watch.reason)
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
        self._save_now()
        if self._done > first:
            write_last_results(self._directory, self._done, results)
        elif first:
            results = finished_results(self._directory, first, num_steps)
        return self._state, results

    def _save_now(self, limit_s: float | None = None) -> None:
        """The state as it is now is in a checkpoint that is complete."""
        until_s = None if limit_s is None else time.monotonic() + limit_s
        self._finish_save(limit_s)
        if self.written != self._done:
            self._begin_save()
            self._finish_save(None if until_s is None else max(0.0, until_s - time.monotonic()))

    def _save_in_time(self, stops: StopRequests) -> None:
        begun_s = time.monotonic()
        try:
            self._save_now(stops.left_s)
        except UnfinishedSaveError as error:
            forget_saves()  # the process may be killed at any moment
            LOGGER.error(
                "The checkpoint of step %d was not written within the grace time of %g s; the "
                "newest one is that of step %s: %s",
                self._done,
                stops.grace_s,
                self.written,
                error,
            )
            return
        LOGGER.warning(
            "The checkpoint of step %d was written in %.1f s, as training should end.",
            self._done,
            time.monotonic() - begun_s,
        )

    def settle(self, stops: StopRequests) -> None:
        """After a loss: finish the checkpoint that was being written, or give it up."""
        try:
            self._finish_save(stops.left_s if stops.is_asked else None)
        except (WorkerError, ClusterError, UnfinishedSaveError):
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

    def _finish_save(self, limit_s: float | None = None) -> None:
        if self._save is not None:
            self._save.wait(limit_s)
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
