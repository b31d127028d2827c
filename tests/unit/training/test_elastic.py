"""`run_training` on the devices of this process, with workers that are said to be lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import ParallelFunction, Zero3Parallel
from autopar.api import StepOptions
from autopar.errors import ArgumentError, CheckpointError, ClusterError, WorkerError
from autopar.runtime.checkpoints.save import finish_saves
from autopar.training import batch_source

WIDTH = 8
BATCHES = [np.random.default_rng(i).normal(size=(8, WIDTH)).astype(np.float32) for i in range(12)]


@pytest.fixture(autouse=True)
def all_devices() -> Iterator[None]:
    yield
    autopar.shutdown()


def fresh_state() -> dict[str, Any]:
    weights = np.random.default_rng(99).normal(size=(WIDTH, WIDTH)) / 3
    return {"w": weights.astype(np.float32), "m": np.zeros((WIDTH, WIDTH)), "count": 0}


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(w):
        return (jnp.tanh(batch @ w) ** 2).mean()

    loss, grad = jax.value_and_grad(loss_of)(state["w"])
    m = 0.9 * state["m"] + grad
    return {"w": state["w"] - 0.5 * m, "m": m, "count": state["count"] + 1}, loss


class Failing(ParallelFunction):
    """A parallelized step that loses a worker at chosen calls, after it has taken the state."""

    def __init__(self, calls: set[int], method: Any = None) -> None:
        super().__init__(train_step, method or Zero3Parallel(), StepOptions((), "auto", (1,)))
        self.calls = calls
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = super().__call__(*args, **kwargs)
        self.count += 1
        if self.count - 1 in self.calls:
            raise WorkerError("a worker died", host="h0")
        return results


class Losses:
    """What `on_step` is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []

    def __call__(self, number: int, loss: Any) -> None:
        self.told.append((number, float(loss)))


def uninterrupted() -> tuple[Any, list[tuple[int, float]]]:
    step = autopar.parallelize(train_step, method=Zero3Parallel())
    state, losses = fresh_state(), []
    for number, batch in enumerate(BATCHES, 1):
        state, loss = step(state, batch)
        losses.append((number, float(loss)))
    return state, losses


def assert_equal(one: Any, other: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_without_losses_it_is_a_loop(tmp_path: Path):
    want, losses = uninterrupted()
    told = Losses()
    step = autopar.parallelize(train_step, method=Zero3Parallel())
    state, last = autopar.run_training(
        step, fresh_state(), BATCHES, checkpoint_dir=tmp_path, checkpoint_every=5, on_step=told
    )
    assert told.told == losses and float(last) == losses[-1][1]
    assert_equal(state, want)
    assert autopar.checkpoint_steps(tmp_path) == [10, 12]
    assert_equal(autopar.restore_checkpoint(tmp_path, step), want)


KINDS: dict[str, Callable[[], Any]] = {
    "a list": lambda: BATCHES,
    "an iterator": lambda: iter(BATCHES),
    "a function": lambda: lambda start: iter(BATCHES[start:]),
    "something iterable": lambda: _Iterable(),
    "one buffer": lambda: _refilled(),
}


class _Iterable:
    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)


def _refilled() -> Iterator[Any]:
    """A loader that fills the same array again and again."""
    buffer = np.empty_like(BATCHES[0])
    for batch in BATCHES:
        buffer[:] = batch
        yield buffer


@pytest.mark.representatives("a list", "one buffer")
@pytest.mark.parametrize("batches", KINDS.values(), ids=KINDS.keys())
def test_lost_workers_cost_the_steps_since_the_last_checkpoint(
    tmp_path: Path, batches: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(batch_source, "workers_can_be_lost", lambda: True)
    want, losses = uninterrupted()
    told = Losses()
    step = Failing({3, 5, 9})
    state, _ = autopar.run_training(
        step,
        fresh_state(),
        batches(),
        checkpoint_dir=tmp_path,
        checkpoint_every=2,
        on_step=told,
    )
    assert_equal(state, want)
    assert dict(told.told) == dict(losses)
    numbers = [number for number, _ in told.told]
    assert sorted(set(numbers)) == list(range(1, 13)) and len(numbers) > 12
    for before, after in itertools.pairwise(numbers):
        assert after == before + 1 or before - 2 <= after <= before, "at most two are lost"
    assert set(told.told) == set(losses), "steps done again give exactly the same"
    assert sum(len(plans) for plans in step._plans.values()) == 1


def test_training_goes_on_in_another_run(tmp_path: Path):
    want, losses = uninterrupted()
    for kind in KINDS.values():
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        told = Losses()
        common = dict(checkpoint_dir=folder, checkpoint_every=4, on_step=told)
        first = Failing({6})
        with pytest.raises(WorkerError, match="a worker died"):
            autopar.run_training(first, fresh_state(), kind(), max_restarts=0, **common)
        finish_saves()
        assert autopar.latest_step(folder) == 4
        shapes = jax.eval_shape(fresh_state)
        second = Failing(set())
        state, _ = autopar.run_training(second, shapes, kind(), **common)
        assert_equal(state, want)
        assert told.told == losses[:6] + losses[4:]
        again = autopar.run_training(Failing(set()), shapes, kind(), **common)
        assert again[1] is None
        assert_equal(again[0], want)


def test_it_stops_at_a_number_of_steps_and_goes_on_later(tmp_path: Path):
    want, losses = uninterrupted()
    told = Losses()
    step = Failing(set())
    common = dict(checkpoint_dir=tmp_path, on_step=told)
    autopar.run_training(step, fresh_state(), BATCHES, num_steps=5, **common)
    assert autopar.checkpoint_steps(tmp_path) == [0, 5]
    state, _ = autopar.run_training(step, fresh_state(), BATCHES, **common)
    assert told.told == losses
    assert_equal(state, want)


def test_restarts_are_counted_between_checkpoints(tmp_path: Path):
    common = dict(checkpoint_every=4, max_restarts=2)
    # Six losses, never three without a checkpoint between them.
    step = Failing({1, 2, 8, 9, 14, 15})
    autopar.run_training(step, fresh_state(), BATCHES, checkpoint_dir=tmp_path / "a", **common)
    with pytest.raises(WorkerError):
        autopar.run_training(
            Failing({1, 2, 3}), fresh_state(), BATCHES, checkpoint_dir=tmp_path / "b", **common
        )


def test_other_errors_are_raised_and_the_checkpoints_stay(tmp_path: Path):
    def fail(number: int, loss: Any) -> None:
        if number == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        autopar.run_training(
            Failing(set()),
            fresh_state(),
            BATCHES,
            checkpoint_dir=tmp_path,
            checkpoint_every=3,
            on_step=fail,
        )
    finish_saves()
    assert autopar.checkpoint_steps(tmp_path) == [3, 6]


def test_a_loss_that_shows_when_a_result_is_read(tmp_path: Path):
    want, losses = uninterrupted()
    told: dict[int, float] = {}

    def on_step(number: int, loss: Any) -> None:
        if number == 6 and 6 not in told:
            told[6] = 0.0
            raise WorkerError("a worker died a while ago")
        told[number] = float(loss)

    state, _ = autopar.run_training(
        Failing(set()), fresh_state(), BATCHES, checkpoint_dir=tmp_path, on_step=on_step
    )
    assert_equal(state, want)
    assert told == dict(losses)


@pytest.mark.ci
def test_fewer_devices_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    restarts = []

    def restart(min_devices: int | None) -> None:
        restarts.append(min_devices)
        if len(restarts) == 1:
            raise ClusterError("no nodes yet")
        autopar.init(devices=jax.devices()[:4])

    monkeypatch.setattr("autopar.session.restart", restart)
    want, _ = uninterrupted()
    step = Failing({5})
    policy = autopar.RestartPolicy(min_devices=4, shrink_after_s=0.01, first_pause_s=0.02)
    state, _ = autopar.run_training(
        step,
        fresh_state(),
        BATCHES,
        checkpoint_dir=tmp_path,
        checkpoint_every=2,
        restart_policy=policy,
    )
    assert restarts == [None, 4]
    assert len(state["w"].sharding.device_set) == 4
    assert step.last_planned is not None and step.last_planned.plan.num_devices == 4
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_plain_function_and_other_orders_of_results(tmp_path: Path):
    def step(state: Any, batch: Any) -> Any:
        new, loss = train_step(state, batch)
        return loss, {"norm": (new["w"] ** 2).sum()}, new

    told: list[Any] = []
    state, last = autopar.run_training(
        jax.jit(step),
        fresh_state(),
        BATCHES,
        checkpoint_dir=tmp_path / "a",
        on_step=lambda number, results: told.append(results),
    )
    assert set(state) == {"w", "m", "count"} and int(state["count"]) == 12
    assert len(told) == 12 and told[-1] is last and set(last[1]) == {"norm"}

    only, nothing = autopar.run_training(
        jax.jit(lambda s, b: train_step(s, b)[0]),
        fresh_state(),
        BATCHES,
        checkpoint_dir=tmp_path / "b",
    )
    assert nothing is None
    # Programs with other results are compiled otherwise.
    for ours, theirs in zip(jax.tree.leaves(only), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_function_is_asked_again_after_every_loss(tmp_path: Path):
    """Its batches may be on lost workers: here, every loss closes a loader."""
    asked, open_loaders = [], []
    step = Failing({4, 5})  # the second one at the first step after a restart

    def batches_from(start: int) -> Any:
        assert not any(loader for loader in open_loaders if not loader._closed)
        asked.append(start)
        open_loaders.append(autopar.data_loader(BATCHES[start:], step))
        return open_loaders[-1]

    want, losses = uninterrupted()
    told = Losses()
    state, _ = autopar.run_training(
        step,
        fresh_state(),
        batches_from,
        checkpoint_dir=tmp_path,
        checkpoint_every=4,
        on_step=told,
    )
    assert asked == [0, 4, 4]
    assert_equal(state, want)
    assert set(told.told) == set(losses)
    assert all(loader._closed for loader in open_loaders)


def test_batches_on_workers_are_refused(tmp_path: Path):
    there = autopar.DistributedArray(None, (8, WIDTH), np.dtype(np.float32), False, ())
    with pytest.raises(ArgumentError, match="the batches are on workers"):
        autopar.run_training(
            Failing(set()), fresh_state(), iter([{"x": there}]), checkpoint_dir=tmp_path
        )


def test_bad_arguments(tmp_path: Path):
    def run(**change: Any) -> None:
        given = dict(
            step=Failing(set()), state=fresh_state(), batches=BATCHES, checkpoint_dir=tmp_path
        )
        given |= change
        autopar.run_training(given.pop("step"), given.pop("state"), given.pop("batches"), **given)

    for name, value in (
        ("max_restarts", -1),
        ("checkpoint_every", 0),
        ("keep", 0),
        ("num_steps", 1.5),
    ):
        with pytest.raises(ArgumentError, match=rf"run_training\({name}={value}\): needs a whole"):
            run(**{name: value})
    with pytest.raises(ArgumentError, match=r"grace_s=0\): needs a number of seconds > 0"):
        run(grace_s=0)
    with pytest.raises(ArgumentError, match=r"batches=3\): needs an iterable of batches"):
        run(batches=3)
    with pytest.raises(ArgumentError, match=r"returned None for the batches from number 0 on"):
        run(batches=lambda start: None)
    with pytest.raises(ArgumentError, match="nothing has the structure, shapes and types of the"):
        run(step=lambda state, batch: batch)
    with pytest.raises(CheckpointError, match="is of another model"):
        run(step=lambda state, batch: state, state={"another": np.ones(3)})
