"""`run_training` on the devices of this process, with workers that are said to be lost."""

from __future__ import annotations

import functools
import itertools
import signal
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
        assert again[1] == losses[-1][1]
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


@pytest.mark.ci
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


def test_signals_are_heard_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`ray.init` sets a handler of its own for SIGTERM, which ends the process at once."""
    before = signal.getsignal(signal.SIGTERM)

    def restart(min_devices: int | None) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: pytest.fail("not ours"))

    def on_step(number: int, loss: Any) -> None:
        if number == 7:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("autopar.session.restart", restart)
    with pytest.raises(autopar.Preempted) as raised:
        autopar.run_training(
            Failing({5}),
            fresh_state(),
            BATCHES,
            checkpoint_dir=tmp_path,
            checkpoint_every=2,
            on_step=on_step,
        )
    assert raised.value.step == 7 == autopar.latest_step(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


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
    with pytest.raises(ArgumentError, match=r"bad_numbers='ignore'\): needs one of"):
        autopar.CheckpointPolicy(bad_numbers="ignore")
    with pytest.raises(ArgumentError, match=r"CheckpointPolicy\(keep_best=0\)"):
        autopar.CheckpointPolicy(keep_best=0)
    with pytest.raises(ArgumentError, match=r"batches=3\): needs an iterable of batches"):
        run(batches=3)
    with pytest.raises(ArgumentError, match=r"returned None for the batches from number 0 on"):
        run(batches=lambda start: None)
    with pytest.raises(
        ArgumentError, match="nothing that it returned has the structure, shapes and"
    ):
        run(step=lambda state, batch: batch)
    with pytest.raises(
        ArgumentError, match=r"it returned a tuple of float32\[.*, and the state is a "
    ):
        run(step=lambda state, batch: (batch, [batch]))
    state, nearly = {"w": np.ones(3, np.float32)}, {"w": np.ones(3, np.float16)}
    with pytest.raises(
        ArgumentError, match=r"result 1 .*: state\['w'\] is float32\[3\], and float16"
    ):
        run(
            step=lambda state, batch: (0.0, nearly), state=state, checkpoint_dir=tmp_path / "nearly"
        )
    with pytest.raises(CheckpointError, match="is of another model"):
        run(step=lambda state, batch: state, state={"another": np.ones(3)})


# -- bad numbers


def poisoned(*numbers: int, value: float = np.nan) -> list[np.ndarray]:
    batches = [batch.copy() for batch in BATCHES]
    for number in numbers:
        batches[number][0, 0] = value
    return batches


def without(*numbers: int) -> tuple[Any, dict[int, float]]:
    """State and losses of training that leaves out these batches, by number."""
    step = autopar.parallelize(train_step, method=Zero3Parallel())
    state, losses = fresh_state(), {}
    for number, batch in enumerate(BATCHES):
        if number not in numbers:
            state, loss = step(state, batch)
            losses[number + 1] = float(loss)
    return state, losses


def test_bad_numbers_end_training(tmp_path: Path):
    with pytest.raises(autopar.NonFiniteError, match=r"Step 8 gave nan.*checkpoint is that of st"):
        autopar.run_training(
            Failing(set()), fresh_state(), poisoned(7), checkpoint_dir=tmp_path, checkpoint_every=3
        )
    finish_saves()
    assert autopar.checkpoint_steps(tmp_path) == [3, 6]


@pytest.mark.parametrize("kind", ["a list", "an iterator"])
@pytest.mark.parametrize(
    ("what", "numbers", "left_out"),
    [
        ("skip", (7,), (7,)),
        ("skip", (4, 5), (4, 5)),
        ("roll back", (7,), (6, 7)),
        ("roll back", (5, 6), (3, 4, 5, 6)),
    ],
)
def test_bad_batches_are_left_out(
    tmp_path: Path, what: str, numbers: tuple[int, ...], left_out: tuple[int, ...], kind: str
):
    want, losses = without(*left_out)
    told = Losses()
    batches = poisoned(*numbers)
    state, _ = autopar.run_training(
        Failing(set()),
        fresh_state(),
        batches if kind == "a list" else iter(batches),
        checkpoint_dir=tmp_path,
        checkpoint_every=3,
        checkpoint_policy=autopar.CheckpointPolicy(bad_numbers=what),
        on_step=told,
    )
    assert_equal(state, want)
    finite = {number: loss for number, loss in told.told if np.isfinite(loss)}
    assert {n: finite[n] for n in losses} == losses
    assert autopar.latest_step(tmp_path) == 12


def test_bad_numbers_are_not_looked_at(tmp_path: Path):
    _, loss = autopar.run_training(
        Failing(set()),
        fresh_state(),
        poisoned(7),
        checkpoint_dir=tmp_path,
        checkpoint_policy=autopar.CheckpointPolicy(bad_numbers=None),
    )
    assert np.isnan(float(loss))


def ruining_step(state: Any, batch: Any) -> tuple[Any, Any]:
    """The gradient is not a number where the loss still is."""
    new, loss = train_step(state, jnp.where(batch > 1e3, 0.0, batch))
    is_bad = (batch > 1e3).any()
    return {**new, "w": jnp.where(is_bad, jnp.nan, new["w"])}, loss


@pytest.mark.filterwarnings("ignore:THE CHECKPOINT OF STEP 6 IS BAD")
def test_a_checkpoint_that_a_bad_gradient_ruined_is_set_aside(tmp_path: Path):
    """The loss of its own step was finite: only the next step shows it."""
    batches = poisoned(5, value=1e6)
    state, _ = autopar.run_training(
        autopar.parallelize(ruining_step, method=Zero3Parallel()),
        fresh_state(),
        batches,
        checkpoint_dir=tmp_path,
        checkpoint_every=3,
        keep=1,
        checkpoint_policy=autopar.CheckpointPolicy(bad_numbers="skip"),
    )
    assert np.isfinite(state["w"]).all() and int(state["count"]) == 11
    assert len(list(tmp_path.glob("bad_step_00000006_*"))) == 1
    clean = [batch for number, batch in enumerate(BATCHES) if number != 5]
    step, want = autopar.parallelize(ruining_step, method=Zero3Parallel()), fresh_state()
    for batch in clean:
        want, _ = step(want, batch)
    assert_equal(state, want)


def test_numbers_that_stay_bad_end_training(tmp_path: Path):
    batches = [batch * np.nan for batch in BATCHES * 2]
    with pytest.raises(autopar.NonFiniteError, match="11 times since a checkpoint"):
        autopar.run_training(
            Failing(set()),
            fresh_state(),
            batches,
            checkpoint_dir=tmp_path,
            checkpoint_policy=autopar.CheckpointPolicy(bad_numbers="skip"),
        )


def test_which_checkpoints_stay(tmp_path: Path):
    autopar.run_training(
        Failing(set()),
        fresh_state(),
        BATCHES,
        checkpoint_dir=tmp_path,
        checkpoint_every=1,
        keep=2,
        checkpoint_policy=autopar.CheckpointPolicy(
            keep_every=5,
            keep_best=2,
            metric=lambda loss: abs(float(loss) - uninterrupted_losses()[3]),
        ),
    )
    assert autopar.checkpoint_steps(tmp_path) == sorted({5, 10, 11, 12, 3, nearest_to_third()})


@functools.cache
def uninterrupted_losses() -> dict[int, float]:
    return dict(uninterrupted()[1])


def nearest_to_third() -> int:
    losses = uninterrupted_losses()
    return sorted((abs(loss - losses[3]), n) for n, loss in losses.items() if n != 3)[0][1]


# -- damaged checkpoints


def damage(folder: Path) -> None:
    """One byte of the data is another one."""
    (data,) = folder.glob("*.data")
    with open(data, "r+b") as file:
        file.seek(1)
        byte = file.read(1)
        file.seek(1)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("how", ["a byte", "a torn manifest"])
def test_training_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path, how: str):
    want, losses = uninterrupted()
    common = dict(checkpoint_dir=tmp_path, checkpoint_every=3)
    autopar.run_training(Failing(set()), fresh_state(), BATCHES, num_steps=6, **common)
    newest = tmp_path / "step_00000006"
    if how == "a byte":
        damage(newest)
    else:
        text = (newest / "manifest.json").read_bytes()
        (newest / "manifest.json").write_bytes(text[: len(text) // 2])
    told = Losses()
    with pytest.warns(UserWarning, match="THE CHECKPOINT OF STEP 6 IS DAMAGED"):
        state, _ = autopar.run_training(
            Failing(set()), fresh_state(), BATCHES, on_step=told, **common
        )
    assert_equal(state, want)
    assert told.told == losses[3:]
    assert len(list(tmp_path.glob("damaged_step_00000006_*"))) == 1


@pytest.mark.filterwarnings("ignore:THE CHECKPOINT OF STEP")
def test_no_checkpoint_is_in_order(tmp_path: Path):
    common = dict(checkpoint_dir=tmp_path, checkpoint_every=3)
    autopar.run_training(Failing(set()), fresh_state(), BATCHES, num_steps=3, **common)
    for folder in tmp_path.glob("step_*"):
        damage(folder)
    with pytest.raises(CheckpointError, match=r"none of the checkpoints of steps \[3, 0\]"):
        autopar.run_training(Failing(set()), fresh_state(), BATCHES, **common)


def test_restore_takes_the_one_before(tmp_path: Path):
    for number in (1, 2):
        autopar.save_checkpoint(tmp_path, {"x": np.arange(50) * number}, number)
    damage(tmp_path / "step_00000002")
    with pytest.warns(UserWarning, match="THE CHECKPOINT OF STEP 2 IS DAMAGED"):
        restored = autopar.restore_checkpoint(tmp_path)
    np.testing.assert_array_equal(restored["x"], np.arange(50))
    with pytest.raises(CheckpointError):
        autopar.restore_checkpoint(tmp_path, step=2)


# -- positions of loaders


class GrainLike:
    """An iterator as grain's: its state is a dict, and a shuffled order that nobody can guess."""

    def __init__(self) -> None:
        self.drawn: list[int] = []
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> GrainLike:
        return self

    def __next__(self) -> np.ndarray:
        number = int(self.rng.integers(len(BATCHES)))
        self.drawn.append(number)
        return BATCHES[number]

    def get_state(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class TorchLike:
    """A loader as torchdata's: the loader has the state, with bytes and arrays."""

    def __init__(self) -> None:
        self.start = 0
        self.drawn: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        order = GrainLike()
        for number in range(1000):
            batch = next(order)
            if number >= self.start:
                self.start = number + 1
                self.drawn.append(order.drawn[-1])
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"start": np.array(self.start), "_worker": {0: b"abc", "t": (1, None, 2.5)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["_worker"] == {0: b"abc", "t": (1, None, 2.5)}
        self.start = int(state["start"])


@pytest.mark.parametrize("with_loader", [False, True], ids=["plain", "data_loader"])
@pytest.mark.parametrize("kind", [GrainLike, TorchLike])
def test_loaders_go_on_where_they_were(tmp_path: Path, kind: Any, with_loader: bool):
    def run(folder: str, source: Any, num_steps: int, calls: set[int]) -> Any:
        step = Failing(calls)
        batches = autopar.data_loader(source, step) if with_loader else source
        told = Losses()
        state, _ = autopar.run_training(
            step,
            fresh_state(),
            batches,
            checkpoint_dir=tmp_path / folder,
            checkpoint_every=4,
            num_steps=num_steps,
            on_step=told,
        )
        return state, told.told

    want, losses = run("whole", kind(), 12, set())
    _, first = run("parts", kind(), 6, {5})
    assert sorted(set(first)) == losses[:6]
    again = kind()
    state, second = run("parts", again, 12, set())
    assert second == losses[6:], "no batch twice, none left out"
    assert_equal(state, want)
    if not with_loader:
        assert len(again.drawn) == 6, "nothing is drawn to be dropped"


def test_metadata_of_users_is_beside_the_state(tmp_path: Path):
    autopar.run_training(
        Failing(set()),
        fresh_state(),
        BATCHES,
        checkpoint_dir=tmp_path,
        num_steps=4,
        checkpoint_policy=autopar.CheckpointPolicy(
            metadata=lambda step: {"tokens": 1000 * step, "run": "a"}
        ),
    )
    assert autopar.checkpoint_metadata(tmp_path)["user"] == {"tokens": 4000, "run": "a"}
    assert autopar.checkpoint_metadata(tmp_path, 0)["user"]["tokens"] == 0


def test_a_state_that_a_checkpoint_replaces_is_freed(tmp_path: Path):
    """Else a run that fits would not fit when it is resumed: two states would be in memory."""

    def resume(step: Any) -> Any:
        given = fresh_state()  # with a Python number among its leaves
        given |= {name: jnp.asarray(given[name]) for name in ("w", "m")}
        autopar.run_training(step, given, BATCHES[:4], checkpoint_dir=tmp_path)
        return given["w"], given["m"]

    autopar.run_training(Failing(set()), fresh_state(), BATCHES[:2], checkpoint_dir=tmp_path)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(resume(Failing(set()))))
    kept = autopar.parallelize(train_step, donate_argnums=())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(resume(kept)))
