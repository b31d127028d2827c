"""Processes that agree, played by threads on one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from autopar import _jax
from autopar.errors import ArgumentError, ClusterError, PlanError, TraceError
from autopar.runtime.ranks import consensus
from autopar.runtime.ranks.consensus import Consensus, arrival_limit_s, planning_limit_s

SOON_S = 5.0


class Store:
    """What the coordination service has."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            assert key not in self.values
            self.values[key] = value
            self._changed.notify_all()

    def get(self, key: str, limit_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.values, max(0.0, limit_s))
            return self.values.get(key)


@pytest.fixture
def store(monkeypatch) -> Store:
    store = Store()
    monkeypatch.setattr(_jax, "store_set", store.set)
    monkeypatch.setattr(_jax, "store_get", store.get)
    monkeypatch.setattr(consensus, "_delete_first", lambda count: None)  # threads share the list
    monkeypatch.setattr(consensus, "_SLACK_S", 0.2)
    return store


def run(
    monkeypatch, count: int, play: Callable[[int, Consensus], Any], absent: int = -1
) -> list[Any]:
    """What every process gets: a result, or an exception."""
    who = threading.local()
    processes = SimpleNamespace(process_index=lambda: who.index, process_count=lambda: count)
    monkeypatch.setattr(consensus, "jax", processes)

    def one(index: int) -> Any:
        who.index = index
        agreement = Consensus("step")
        agreement._number = 0  # in a separate process it would be the first
        try:
            return play(index, agreement)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(one, index) for index in range(count) if index != absent]
        return [future.result(SOON_S) for future in futures]


def test_each_gets_its_own_result_where_all_tell_the_same(store, monkeypatch):
    found = run(
        monkeypatch,
        4,
        lambda index, agreement: agreement.agree(
            "x", lambda: index, SOON_S, report=lambda _: {"a": [1, 2]}
        ),
    )
    assert found == [0, 1, 2, 3]


def test_the_largest_numbers_are_those_of_all(store, monkeypatch):
    own = [(1.0, 8.0), (3.0, 2.0), (2.0, 2.0)]
    found = run(monkeypatch, 3, lambda i, agreement: agreement.largest("x", lambda: own[i], SOON_S))
    assert found == [(3.0, 8.0)] * 3


def test_differences_are_named_in_all_and_equal_ones_once(store, monkeypatch):
    told = [{"JAX": "1", "x": "f[8]"}, {"JAX": "1", "x": "f[4]"}, {"JAX": "1", "x": "f[4]"}, {}]
    found = run(monkeypatch, 4, lambda i, agreement: agreement.agree("x", lambda: told[i], SOON_S))
    assert {type(error) for error in found} == {PlanError}
    (message,) = {str(error) for error in found}
    assert "processes 1, 2: x is 'f[4]', not 'f[8]'. " in message
    assert "process 3: JAX is missing, not '1'; x is missing" in message


def test_many_differences_are_counted(store, monkeypatch):
    def told(index: int) -> dict[str, int]:
        return {f"x{n}": index for n in range(10)}

    found = run(monkeypatch, 2, lambda i, agreement: agreement.agree("x", lambda: told(i), SOON_S))
    assert "x2 is 1, not 0; 7 more" in str(found[0])


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_is_itself_where_it_was_and_told_elsewhere(store, monkeypatch, failing):
    def work(index: int) -> dict[str, int]:
        if index == failing:
            raise TraceError("no such layer")
        return {}

    start = time.monotonic()
    found = run(monkeypatch, 4, lambda i, agreement: agreement.agree("x", lambda: work(i), 60))
    assert time.monotonic() - start < SOON_S
    for index, error in enumerate(found):
        assert type(error) is (TraceError if index == failing else PlanError)
        assert "no such layer" in str(error)
        assert index == failing or f"process {failing}" in str(error)


def test_errors_of_others_are_told_with_their_type(store, monkeypatch):
    def work() -> dict[str, int]:
        raise KeyError("w")

    found = run(
        monkeypatch, 2, lambda i, agreement: agreement.agree("x", work if i else dict, SOON_S)
    )
    assert "KeyError: 'w'" in str(found[0])


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_whoever_does_not_come_is_named_when_the_limit_is_over(store, monkeypatch, absent):
    found = run(monkeypatch, 3, lambda i, agreement: agreement.agree("x", dict, 0.2), absent)
    assert len(found) == 2
    for error in found:
        assert isinstance(error, PlanError)
        assert f"process {absent} did not arrive within 0.2 s (x)" in str(error)


def test_what_the_first_makes_all_have(store, monkeypatch):
    text = "plan " * 1000
    monkeypatch.setattr(consensus, "_CHUNK_BYTES", 7)
    made = []

    def work() -> str:
        made.append(1)
        return text

    assert (
        run(monkeypatch, 3, lambda _, agreement: agreement.from_first("x", work, SOON_S))
        == [text] * 3
    )
    assert made == [1]
    assert max(map(len, store.values.values())) <= 7 < len(store.values)


def test_what_the_first_cannot_make_nobody_has(store, monkeypatch):
    def work() -> str:
        raise OSError("solver is not installed")

    found = run(monkeypatch, 3, lambda _, agreement: agreement.from_first("x", work, SOON_S))
    assert [type(error) for error in found] == [OSError, PlanError, PlanError]
    assert "process 0 could not plan it: OSError: solver is not installed" in str(found[2])


def test_a_first_that_is_silent_is_named(store, monkeypatch):
    found = run(monkeypatch, 2, lambda _, agreement: agreement.from_first("x", str, 0.1), absent=0)
    assert "process 0 did not arrive within 0.1 s" in str(found[0])


def test_the_oldest_keys_are_deleted(monkeypatch):
    deleted: list[str] = []
    monkeypatch.setattr(_jax, "store_delete", deleted.append)
    monkeypatch.setattr(consensus, "_written", ["a", "b", "c"])
    consensus._delete_first(2)
    assert (deleted, consensus._written) == (["a", "b"], ["c"])


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan"])
def test_limits_are_numbers_of_seconds(monkeypatch, given):
    monkeypatch.setenv("AUTOPAR_ARRIVAL_LIMIT_S", given)
    with pytest.raises(ArgumentError, match="AUTOPAR_ARRIVAL_LIMIT_S"):
        arrival_limit_s()
    monkeypatch.setenv("AUTOPAR_PLANNING_LIMIT_S", "7.5")
    assert planning_limit_s() == 7.5


def test_without_a_coordination_service_it_is_said_what_to_call():
    with pytest.raises(ClusterError, match=r"jax\.distributed\.initialize"):
        _jax.store_set("autopar/test", b"")
