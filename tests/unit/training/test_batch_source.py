"""Batches by number, and those of data loaders after the cluster was started again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import session
from autopar.errors import ArgumentError, ClusterError
from autopar.training import batch_source as module
from autopar.training.batch_source import BatchSource, _LoadedBatches, batch_source


def step_of() -> Any:
    return autopar.parallelize(lambda state, batch: state + jnp.mean(batch))


def batch_of(index: int) -> np.ndarray:
    return np.full((8, 2), index, np.float32)


class Source:
    """An iterator that can go nowhere but on, and notes what was taken."""

    def __init__(self, num_batches: int) -> None:
        self.num_taken = 0
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        if self.num_taken == self._num_batches:
            raise StopIteration
        self.num_taken += 1
        return batch_of(self.num_taken - 1)


def number_of(batch: Any) -> int:
    return int(np.asarray(batch)[0, 0])


@pytest.fixture
def on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "workers_can_be_lost", lambda: True)


@pytest.mark.usefixtures("on_a_cluster")
def test_a_loader_is_made_again_over_batches_that_were_kept() -> None:
    source = Source(8)
    batches = _LoadedBatches(autopar.data_loader(source, step_of()), 0)
    assert [number_of(batches.get(n)) for n in (0, 0, 1, 2, 3, 4)] == [0, 0, 1, 2, 3, 4]
    batches.forget_before(2)
    batches.forget_all()
    assert [number_of(batches.get(n)) for n in range(2, 8)] == list(range(2, 8))
    assert source.num_taken == 8
    assert batches.get(8, default=None) is None
    with pytest.raises(StopIteration):
        batches.get(8)
    batches.close()


def refilled(num_batches: int) -> Iterator[np.ndarray]:
    """Batches of a loader that has one buffer."""
    buffer = np.zeros((8, 2), np.float32)
    for number in range(num_batches):
        buffer[:] = number
        yield buffer


@pytest.mark.usefixtures("on_a_cluster")
def test_a_buffer_that_is_filled_again_changes_no_repeated_batch() -> None:
    source = BatchSource(refilled(6), 0)
    assert [number_of(source.get(n)) for n in range(4)] == [0, 1, 2, 3]
    source.forget_before(1)
    source.forget_all()
    assert [number_of(source.get(n)) for n in range(1, 6)] == [1, 2, 3, 4, 5]


@pytest.mark.usefixtures("on_a_cluster")
def test_what_is_kept_is_on_the_host() -> None:
    given = [jnp.full((8, 2), n, jnp.int32) for n in range(6)]
    source = BatchSource(iter(given), 0)
    for number in range(6):
        assert source.get(number) is given[number]  # the step gets the batch itself
    source.forget_all()
    kept = [source.get(number) for number in range(6)]
    assert [number_of(one) for one in kept] == list(range(6))
    assert all(type(one) is np.ndarray and one.dtype == np.int32 for one in kept)


@pytest.mark.usefixtures("on_a_cluster")
def test_keys_and_weak_types_are_repeated_as_they_were() -> None:
    key, weak = jax.random.key(3), jnp.asarray(2.0) * 1
    source = BatchSource(iter([(key, weak, 5)]), 0)
    source.get(0)
    source.forget_all()
    assert jax.random.key_data(source.get(0)[0]).tolist() == jax.random.key_data(key).tolist()
    assert source.get(0)[1:] == (weak, 5)
    assert source.get(0)[1].weak_type == weak.weak_type


def test_devices_of_this_process_cannot_be_lost_so_nothing_is_kept() -> None:
    source = BatchSource((jnp.full(4, n) for n in range(60)), 0)
    live = []
    for number in range(60):
        live.append(weakref.ref(source.get(number)))
        assert source.get(number) is live[-1]()
        source.forget_before(number + 1)
    gc.collect()
    assert not any(one() is not None for one in live)


def test_a_loader_of_a_list_keeps_nothing() -> None:
    given = [batch_of(n) for n in range(6)]
    batches = _LoadedBatches(autopar.data_loader(given, step_of()), 2)
    assert batches.can_go_back
    assert [number_of(batches.get(n)) for n in (2, 3, 4)] == [2, 3, 4]
    batches.forget_before(5)
    batches.forget_all()
    assert [number_of(batches.get(n)) for n in (1, 2)] == [1, 2]
    batches.close()


def test_what_a_function_made_is_made_again_even_if_no_batch_was_forgotten() -> None:
    asked, closed = [], []

    def batches(first: int) -> Iterator[Any]:
        asked.append(first)
        try:
            for n in range(first, 6):
                yield batch_of(n)
        finally:
            closed.append(first)

    source = BatchSource(batches, 0)
    assert [number_of(source.get(n)) for n in (0, 1)] == [0, 1]
    source.forget_before(1)
    source.forget_all()
    assert closed == [0]
    assert number_of(source.get(1)) == 1
    assert asked == [0, 1]
    source.close()


def test_a_loader_that_has_begun_cannot_be_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with autopar.data_loader([batch_of(0), batch_of(1)], step_of()) as loader:
        next(loader)
        assert type(batch_source(loader, 0)) is BatchSource  # devices of this process stay
        monkeypatch.setattr(session, "_current", session.Session(0, remote=object()))
        with pytest.raises(ArgumentError, match=r"has begun.*lambda start: autopar\.data_loader"):
            batch_source(loader, 0)


class Remote:
    """A cluster that only says what it consists of."""

    def __init__(self, platform: str) -> None:
        self.cluster = SimpleNamespace(platform=platform)
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_training_on_gpus_does_not_go_on_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = session.Session(0, None, Remote("gpu"), ())
    started = [Remote("cpu"), Remote("gpu")]
    monkeypatch.setattr(session, "_current", ended)
    left = iter(started)

    def start(*_: Any) -> None:
        session._current = session.Session(1, None, next(left), ())

    monkeypatch.setattr(session, "_start_ray", start)
    with pytest.raises(ClusterError, match="ran on GPUs, and the nodes that are left have only CP"):
        session.restart()
    assert session.current() is ended and started[0].is_closed
    session.restart()  # the nodes are back
    assert session.current().remote is started[1] and not started[1].is_closed


def test_a_start_that_fails_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In between, nothing runs on the devices of this process instead."""

    options = (("num_hosts", 3), ("transport", "nccl"), ("hang_limit_s", 9.0))
    ended = session.Session(0, None, Remote("gpu"), options, wanted_devices=24)
    monkeypatch.setattr(session, "_current", ended)
    tries = []

    def start(*given: Any) -> None:
        tries.append(given)
        raise ClusterError("no node")

    monkeypatch.setattr(session, "_start_ray", start)
    for least in (None, 8):
        with pytest.raises(ClusterError):
            session.restart(least)
        assert session.current() is ended
    common = (None, {"num_hosts": 3}, "nccl", {"hang_limit_s": 9.0}, None)
    assert tries == [(*common, 24), (*common, 8)]
