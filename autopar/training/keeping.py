"""Which checkpoints stay, and which bad numbers training meets.

A checkpoint is *proven* when the step after it gave finite numbers: a bad gradient ruins the
parameters without a trace in the loss of its own step. The newest proven checkpoint always stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import ArgumentError, AutoparError

BAD_NUMBERS = ("stop", "skip", "roll back", None)
MOST_IN_A_ROW = 10  # bad steps without a new checkpoint; one more ends training


class NonFiniteError(AutoparError, FloatingPointError):
    """A step of training gave a result, such as the loss, that is infinite or not a number.

    step: how many steps had been done with it.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


_OPTIONAL = ("keep", "keep_every", "keep_best", "num_steps", "tokens_per_step")


def check_counts(function: str, **counts: tuple[Any, int]) -> None:
    """Raise if an argument, given with the least that it may be, is no such whole number."""
    for name, (given, least) in counts.items():
        if given is None and name in _OPTIONAL:
            continue
        if not isinstance(given, int) or isinstance(given, bool) or given < least:
            raise ArgumentError(f"{function}({name}={given!r}): needs a whole number ≥ {least}.")


@dataclass(frozen=True)
class CheckpointPolicy:
    """Which checkpoints `run_training` keeps besides the newest, and what it saves with each.

    keep_every: keep those of the steps that are multiples of this.
    keep_best:  keep this many with the smallest metric.
    metric:     from the results of a step beside the state to a number, smaller for better;
                default: the first floating-point number among the results, such as the loss.
    metadata:   called with the number of steps done; what it returns, as for `save_checkpoint`, is
                saved with each checkpoint, under "user".
    bad_numbers: what to do when a floating-point number among the results of a step, such as the
                loss, is infinite or not a number: "stop" raises `NonFiniteError`; "skip" goes back
                to the last checkpoint and leaves out the batch; "roll back" leaves out all batches
                since that checkpoint; None looks at no number.
    """

    keep_every: int | None = None
    keep_best: int | None = None
    metric: Callable[[Any], float] | None = None
    metadata: Callable[[int], Mapping[str, Any]] | None = None
    bad_numbers: str | None = "stop"

    def __post_init__(self) -> None:
        check_counts(
            "CheckpointPolicy", keep_every=(self.keep_every, 1), keep_best=(self.keep_best, 1)
        )
        if self.bad_numbers not in BAD_NUMBERS:
            raise ArgumentError(
                f"CheckpointPolicy(bad_numbers={self.bad_numbers!r}): needs one of {BAD_NUMBERS}."
            )

    def metric_of(self, results: Any) -> float | None:
        """None if there is none, or if nobody asks for it."""
        if self.keep_best is None or results is None:
            return None
        values = [self.metric(results)] if self.metric is not None else scalars(results)[:1]
        value = float(np.asarray(values[0])) if values else float("nan")
        return value if isfinite(value) else None


@dataclass(frozen=True)
class Keeping:
    """When to save a checkpoint, and which to keep."""

    every: int
    keep: int | None
    policy: CheckpointPolicy


def superfluous(
    steps: Sequence[int],
    *,
    keep: int | None,
    keep_every: int | None,
    keep_best: int | None,
    metrics: Mapping[int, float],
    unproven: Collection[int],
) -> list[int]:
    """The steps, of those in increasing order, whose checkpoints can be deleted. `metrics`: smaller
    is better."""
    if keep is None:
        return []
    kept = set(steps[-keep:])
    proven = [step for step in steps if step not in unproven]
    kept.update(proven[-1:])
    if keep_every is not None:
        kept.update(step for step in proven if step and step % keep_every == 0)
    if keep_best is not None:
        ranked = sorted(
            (metrics[step], step) for step in proven if isfinite(metrics.get(step, np.nan))
        )
        kept.update(step for _, step in ranked[:keep_best])
    return [step for step in steps if step not in kept]


class ResultCheck:
    """Looks at the scalar results of steps, one step late, so that a step need not wait for the one
    before to be read."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on
        self._waiting: deque[tuple[int, list[Any]]] = deque()
        self.last: dict[int, float] = {}  # the first scalar of the newest step that is in order

    def add(self, step: int, results: Any) -> None:
        """The results of one more step; raises `NonFiniteError` for the one before."""
        self._waiting.append((step, scalars(results)))
        self._check(leave=1)

    def check_all(self) -> None:
        self._check(leave=0)

    def forget(self) -> None:
        self._waiting.clear()
        self.last = {}

    def _check(self, leave: int) -> None:
        while len(self._waiting) > leave:
            step, values = self._waiting.popleft()
            if not self._is_on:
                continue
            numbers = [float(np.asarray(value)) for value in values]
            bad = [number for number in numbers if not isfinite(number)]
            self.last = {step: numbers[0]} if numbers and not bad else {}
            if bad:
                raise NonFiniteError(f"Step {step} gave {bad[0]} (results: {numbers}).", step)


def scalars(results: Any) -> list[Any]:
    """Results that are one floating-point number each, in their order."""
    return [
        leaf
        for leaf in jax.tree.leaves(results)
        if isinstance(leaf, float)
        or (
            hasattr(leaf, "dtype")
            and getattr(leaf, "shape", None) == ()
            and jnp.issubdtype(leaf.dtype, jnp.floating)
        )
    ]
