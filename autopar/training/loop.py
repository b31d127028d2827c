"""The loop of `run_training`: steps, checkpoints, and going on from the newest good one.

A checkpoint's metadata has, under "training", the position of the data's loader and the metric.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from autopar.api import ParallelFunction
from autopar.errors import ArgumentError, CheckpointError, ClusterError, PlanError, WorkerError
from autopar.progress import LOGGER
from autopar.runtime.checkpoints import files
from autopar.runtime.checkpoints.controllers import is_first_process, num_processes
from autopar.runtime.checkpoints.find import checkpoint_metadata, checkpoint_steps, latest_step
from autopar.runtime.checkpoints.folders import set_aside
from autopar.runtime.checkpoints.leaves import canonical
from autopar.runtime.checkpoints.objects import Location, UnreachableStoreError
from autopar.runtime.checkpoints.restore import OtherModelError
from autopar.runtime.checkpoints.save import (
    CheckpointSave,
    UnfinishedSaveError,
    forget_saves,
    metadata_text,
    start_save,
)
from autopar.runtime.ranks.consensus import Consensus, arrival_limit_s
from autopar.runtime.remote.arrays import DistributedArray
from autopar.tracer.flat_call import is_array_leaf
from autopar.training.batch_source import BatchSource
from autopar.training.keeping import (
    MOST_IN_A_ROW,
    Keeping,
    NonFiniteError,
    ResultCheck,
    scalars,
    superfluous,
)
from autopar.training.last_results import finished_results, write_last_results
from autopar.training.metrics import Meter
from autopar.training.positions import gather_positions, own_position
from autopar.training.preemption import StopRequests
from autopar.training.restarts import ClusterWatch, PlannedRestart
from autopar.training.restore import restore_step

TRAINING = "training"


def saved_by_training(directory: Location, step: int) -> dict[str, Any]:
    """What `run_training` saved with a checkpoint; empty for those of others."""
    saved = checkpoint_metadata(directory, step).get(TRAINING, {})
    return saved if isinstance(saved, dict) else {}


def metrics_of(directory: Location) -> dict[int, float]:
    """The metrics of the checkpoints in a folder; damaged ones have none."""
    metrics = {}
    for step in checkpoint_steps(directory):
        try:
            value = saved_by_training(directory, step).get("metric")
        except UnreachableStoreError:
            raise
        except CheckpointError:
            continue
        if isinstance(value, (int, float)):
            metrics[step] = float(value)
    return metrics


class Training:
    """The state, the number of steps done, and the checkpoints.

    written: the step of the newest checkpoint that is known to be complete.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        state: Any,
        directory: Location,
        keeping: Keeping,
        on_step: Callable[[int, Any], None] | None,
        meter: Meter,
    ) -> None:
        self.written: int | None = None
        self._step, self._on_step, self._meter = step, on_step, meter
        self._directory, self._keeping = directory, keeping
        self._bad_numbers = keeping.policy.bad_numbers
        self._like = jax.tree.map(_shape_of, state)
        self._state: Any = None
        self._results: Any = None
        self._done = 0
        self._save: CheckpointSave | None = None
        self._saved_step = 0
        self._check = ResultCheck(self._bad_numbers is not None)
        self._metrics: dict[int, float] = {}
        self._unproven: set[int] = set()
        self._skipped: set[int] = set()  # numbers of batches that gave bad numbers
        self._num_bad = 0  # since the last proven checkpoint
        self._suspect: int | None = None  # a checkpoint whose first step gave bad numbers
        self._loaded = 0

    def newest(self) -> int | None:
        """The step of the newest checkpoint in the folder."""
        return latest_step(self._directory)

    @property
    def may_repeat(self) -> bool:
        """Whether it may go back to a checkpoint though no worker was lost."""
        return self._bad_numbers in ("skip", "roll back")

    def close(self) -> None:
        """Training has ended."""
        self._meter.close()

    def load(self, state: Any, source: BatchSource) -> None:
        """Restore the newest checkpoint that is in order, placed for the step; without one, take
        the given state and save it."""
        self._check.forget()
        damaged: list[int] = []
        while (newest := latest_step(self._directory)) is not None:
            try:
                self._restore(newest, source, state)
                return
            except (OtherModelError, UnreachableStoreError):
                raise
            except (CheckpointError, PlanError) as error:
                if isinstance(error, PlanError) and num_processes() == 1:
                    raise
                damaged.append(newest)
                self._set_aside(newest, "damaged", str(error))
        if damaged:
            raise CheckpointError(
                f"run_training: none of the checkpoints of steps {damaged} in {self._directory} "
                "can be restored. They have other names now; look at them, or start in another "
                "folder."
            )
        self._state, self._done, self._loaded = state, 0, 0
        self._begin_save(source)
        self._finish_save()  # the step will use up the only copy

    def _restore(self, newest: int, source: BatchSource, given: Any) -> None:
        saved = saved_by_training(self._directory, newest)
        self._metrics = metrics_of(self._directory)
        source.resume(newest, own_position(saved.get("positions")))
        self._done = self.written = self._loaded = newest
        self._meter.saved(newest)
        self._unproven = {newest}
        self._state = None  # freed before the next one is made
        target = self._like
        if isinstance(self._step, ParallelFunction):
            batch = source.get(newest, default=None)
            if batch is not None:
                self._step.plan(self._like, batch)
                _free(given, self._step)  # else two states would be in memory
                target = self._step
        self._state = restore_step(self._directory, target, newest)

    def _set_aside(self, step: int, what: str, why: str) -> None:
        """Give a checkpoint another name, and say so."""

        def rename() -> dict[str, Any]:
            if is_first_process():
                set_aside(self._directory, step, what)
            return {}

        try:
            if num_processes() == 1:
                rename()
            else:
                Consensus(f"checkpoint {step}").agree("set aside", rename, arrival_limit_s())
        except OSError as error:
            raise files.as_checkpoint_error(f"setting aside step {step}", error) from error
        text = (
            f"THE CHECKPOINT OF STEP {step} IS {what.upper()} and is now named "
            f"{what}_step_{step:08d}_…; training goes on from the one before: {why}"
        )
        LOGGER.error("%s", text)
        warnings.warn(text, stacklevel=4)

    def run(
        self,
        source: BatchSource,
        num_steps: int | None,
        stops: StopRequests,
        watch: ClusterWatch,
    ) -> tuple[Any, Any]:
        """All steps. `PlannedRestart` if the cluster should be restarted; what `stops` raises if
        training should end. Both after a checkpoint."""
        self._results, first = None, self._done
        self._meter.begin()
        while num_steps is None or self._done < num_steps:
            if stops.wanted_after(self._done, self.written):
                self._save_in_time(source, stops)
                raise stops.error(self.written)
            if watch.reason:
                self._save_now(source)
                raise PlannedRestart(watch.reason)
            try:
                batch = source.get(self._done)
            except StopIteration:
                break
            if self._done in self._skipped:
                self._done += 1
                continue
            outputs = self._step(self._state, batch)
            self._state, self._results = self._split(outputs)
            self._done += 1
            del outputs, batch
            self._check_results()
            if self._on_step is not None:
                self._on_step(self._done, self._results)
            self._meter.done(self._done, self._loss)
            if self._done % self._keeping.every == 0:
                self._begin_save(source)
            elif self._save is not None and self._save.done:
                self._finish_save()
            source.forget_before(self._done if source.can_forget else self.written or 0)
        self._save_now(source)
        results = self._results
        if self._done > first:
            write_last_results(self._directory, self._done, results)
        elif first:
            results = finished_results(self._directory, first, num_steps)
        return self._state, results

    def _loss(self) -> float | None:
        values = scalars(self._results)
        return float(np.asarray(values[0])) if values else None

    def _check_results(self) -> None:
        self._check.add(self._done, self._results)
        self._note_proof()

    def _note_proof(self) -> None:
        """A step gave finite numbers, so the checkpoints before it are good."""
        for step in self._check.last:
            proven = {one for one in self._unproven if one < step}
            if proven:
                self._unproven -= proven
                self._num_bad, self._suspect = 0, None

    def after_bad_numbers(self, error: NonFiniteError, stops: StopRequests) -> None:
        """Decide from where to go on, and without which batches; raises if training should end."""
        self._check.forget()
        self.settle(stops)
        newest = self.written or 0
        number = error.step - 1  # of the batch
        self._num_bad += 1
        advice = f"{error} The newest checkpoint is that of step {newest}."
        if self._bad_numbers == "stop":
            raise NonFiniteError(
                f"{advice} To go on without such batches: "
                'CheckpointPolicy(bad_numbers="skip"), or "roll back"; None looks at no number.',
                error.step,
            ) from error
        if self._num_bad > MOST_IN_A_ROW:
            raise NonFiniteError(
                f"{advice} This was the case {self._num_bad} times since a checkpoint that is "
                "known to be good. Look at the data, the learning rate and the types of numbers.",
                error.step,
            ) from error
        is_first = all(one in self._skipped for one in range(newest, number))
        if is_first and newest in self._unproven and newest > 0:
            if self._suspect == newest:  # two batches in a row: it is not the batch
                self._set_aside(newest, "bad", str(error))
                self._unproven.discard(newest)
                self._metrics.pop(newest, None)
                self._skipped = {one for one in self._skipped if one < newest} | {newest - 1}
                self._suspect, self.written = None, latest_step(self._directory)
                return
            self._suspect = newest
        begin = newest if self._bad_numbers == "roll back" else number
        self._skipped.update(range(begin, number + 1))
        LOGGER.warning(
            "%s Training goes on from there without the batches %d to %d.", advice, begin, number
        )

    def _save_now(self, source: BatchSource, limit_s: float | None = None) -> None:
        """The state as it is now is in a checkpoint that is complete."""
        until_s = None if limit_s is None else time.monotonic() + limit_s
        self._finish_save(limit_s)
        if self.written != self._done:
            self._begin_save(source)
            self._finish_save(None if until_s is None else max(0.0, until_s - time.monotonic()))

    def _save_in_time(self, source: BatchSource, stops: StopRequests) -> None:
        begun_s = time.monotonic()
        try:
            self._save_now(source, stops.left_s)
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

    def _begin_save(self, source: BatchSource) -> None:
        self._finish_save()
        self._check.check_all()  # a checkpoint after a bad step is of no use
        self._note_proof()
        keeping, step = self._keeping, self._done
        value = keeping.policy.metric_of(self._results)
        if value is not None:
            self._metrics[step] = value
        if self._bad_numbers is not None:
            self._unproven.add(step)
        own = {"positions": gather_positions(source.position(step)), "metric": value}
        metadata: dict[str, Any] = {TRAINING: {n: v for n, v in own.items() if v is not None}}
        if keeping.policy.metadata is not None:
            metadata["user"] = dict(keeping.policy.metadata(step))
        old = partial(
            superfluous,
            keep=keeping.keep,
            keep_every=keeping.policy.keep_every,
            keep_best=keeping.policy.keep_best,
            metrics=dict(self._metrics),
            unproven=frozenset(self._unproven),
        )
        text = metadata_text(metadata)
        save = start_save(self._directory, self._state, step, old, True, True, text)
        assert isinstance(save, CheckpointSave)
        self._save, self._saved_step = save, step

    def _finish_save(self, limit_s: float | None = None) -> None:
        if self._save is not None:
            self._save.wait(limit_s)
            self._save, self.written = None, self._saved_step
            self._meter.saved(self._saved_step)

    def _split(self, outputs: Any) -> tuple[Any, Any]:
        """(new state, other results)."""
        difference = _difference(outputs, self._like)
        if not difference:
            return outputs, None
        if isinstance(outputs, (tuple, list)):
            for i, output in enumerate(outputs):
                if not (of_one := _difference(output, self._like)):
                    rest = (*outputs[:i], *outputs[i + 1 :])
                    return output, rest[0] if len(rest) == 1 else (rest or None)
                if jax.tree.structure(output) == jax.tree.structure(self._like):
                    difference = f"result {i} comes nearest: {of_one}"
        raise ArgumentError(
            f"run_training(step={self._step!r}): nothing that it returned has the structure, "
            f"shapes and types of the state: {difference}. Return the new state, or a tuple that "
            "contains it."
        )


def _free(state: Any, step: ParallelFunction) -> None:
    """Give back the memory of a state, as the first call of the step would."""
    assert step.last_planned is not None
    traced = step.last_planned.traced
    leaves = list(filter(is_array_leaf, jax.tree.leaves(state)))
    positions = [i for i, owner in enumerate(traced.call.argument) if owner == 0]
    if len(leaves) != len(positions):  # objects have other leaves
        return
    for position, leaf in zip(positions, leaves, strict=True):
        is_array = isinstance(leaf, jax.Array | DistributedArray)
        if is_array and position in traced.donated and not leaf.is_deleted():
            leaf.delete()


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


def _difference(output: Any, state: Any) -> str:
    """Where a result differs from the state; nothing if it could be the next one."""
    if jax.tree.structure(output) != jax.tree.structure(state):
        return f"it returned {_summary(output)}, and the state is {_summary(state)}"
    pairs = zip(jax.tree.leaves_with_path(output), jax.tree.leaves(state), strict=True)
    for (path, one), other in pairs:
        if _type_of(one) != _type_of(other):
            return f"state{keystr(path)} is {_type_text(other)}, and {_type_text(one)} was returned"
    return ""


def _summary(tree: Any) -> str:
    """What a tree is at its top: "a tuple of float32[] and a dict with 12 leaves"."""
    if type(tree) in (tuple, list) and len(tree) <= 4:
        parts = [_summary(part) for part in tree] or ["nothing"]
        return f"a {type(tree).__name__} of {' and '.join(parts)}"
    leaves = jax.tree.leaves(tree)
    if jax.tree_util.all_leaves([tree]):
        return _type_text(tree)
    return f"a {type(tree).__name__} with {len(leaves)} leaves"


def _type_text(leaf: Any) -> str:
    found = _type_of(leaf)
    if found is None:
        return f"a {type(leaf).__name__}"
    return f"{found[1]}[{', '.join(map(str, found[0]))}]"


def _type_of(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), canonical(leaf.dtype)
    if isinstance(leaf, (bool, int, float, complex)):
        return (), jax.typeof(leaf).dtype
    return None
