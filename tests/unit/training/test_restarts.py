"""When training starts again, after which pauses, on how many devices; and what is logged."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar import session
from autopar.errors import ArgumentError, ClusterError, WorkerError
from autopar.training import restarts
from autopar.training.restarts import ClusterWatch, RestartPolicy, Restarts


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        monkeypatch.setattr(restarts.time, "monotonic", lambda: self.now_s)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.pauses.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def lost() -> WorkerError:
    return WorkerError("a worker died\nits log")


def test_pauses_between_losses_in_a_row_double(clock: Clock) -> None:
    told: list[Any] = []
    policy = RestartPolicy(first_pause_s=2, max_pause_s=7)
    counted = Restarts(policy, 5, told.append, clock.sleep)
    for _ in range(5):
        counted.after_loss(lost(), has_new_checkpoint=False)
    assert clock.pauses == [0, 2, 4, 7, 7] and counted.count == len(told) == 5
    counted.after_loss(lost(), has_new_checkpoint=True)
    assert clock.pauses[-1] == 0
    for _ in range(4):
        counted.after_loss(lost(), has_new_checkpoint=False)
    with pytest.raises(WorkerError):
        counted.after_loss(lost(), has_new_checkpoint=False)


def test_losses_are_limited_per_hour(clock: Clock) -> None:
    counted = Restarts(RestartPolicy(max_per_hour=3), 9, None, clock.sleep)
    for _ in range(3):
        counted.after_loss(lost(), has_new_checkpoint=True)
        clock.sleep(1000)
    clock.sleep(601)  # the first is more than an hour ago
    counted.after_loss(lost(), has_new_checkpoint=True)
    with pytest.raises(WorkerError):
        counted.after_loss(lost(), has_new_checkpoint=True)


def attempts(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, policy: RestartPolicy, enough_s: float
) -> list[tuple[float, int | None]]:
    """(when, the fewest devices that will do) of all attempts, where 4 of 8 devices are there until
    `enough_s`."""
    tried: list[tuple[float, int | None]] = []

    def restart(min_devices: int | None) -> None:
        tried.append((clock.now_s, min_devices))
        if clock.now_s < enough_s and (min_devices is None or min_devices > 4):
            raise ClusterError("room for 4 devices")

    monkeypatch.setattr(session, "restart", restart)
    Restarts(policy, 3, None, clock.sleep).start_again(lambda: None)
    return tried


def test_nodes_are_waited_for(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing a node takes minutes, and three attempts are over within seconds."""
    policy = RestartPolicy(first_pause_s=2, max_pause_s=60)
    tried = attempts(clock, monkeypatch, policy, enough_s=600)
    assert clock.pauses == [2, 4, 8, 16, 32, *[60] * 9]
    assert {least for _, least in tried} == {None}
    assert 600 <= tried[-1][0] < 660


def test_waiting_has_an_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="room for 4"):
        attempts(clock, monkeypatch, RestartPolicy(wait_s=100), enough_s=600)
    assert clock.now_s == 100


def test_fewer_devices_only_if_allowed_and_after_a_while(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = RestartPolicy(min_devices=3, shrink_after_s=50)
    tried = attempts(clock, monkeypatch, policy, enough_s=600)
    assert tried[-1] == (50, 3) and {least for _, least in tried[:-1]} == {None}
    clock.now_s = 0
    with pytest.raises(ClusterError):  # four are too few
        attempts(clock, monkeypatch, RestartPolicy(min_devices=5, wait_s=200), enough_s=600)


def test_every_decision_is_logged(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        Restarts(RestartPolicy(), 3, None, clock.sleep).after_loss(lost(), False)
        attempts(clock, monkeypatch, RestartPolicy(), enough_s=5)
        with pytest.raises(ClusterError):
            attempts(clock, monkeypatch, RestartPolicy(wait_s=3), enough_s=900)
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("Restart 1, in 0 s (1 in a row of at most 3, 1 within an hour")
    assert said[0].endswith("a worker died")
    assert said[1] == (
        "No cluster after 0 s of at most 1800; the next attempt is in 2 s: room for 4 devices"
    )
    assert said[-1].startswith("Training ends: no cluster within 3 s")


class FakeCluster:
    def __init__(self, now: int, possible: int, leaving: str) -> None:
        self.spec = SimpleNamespace(num_devices=now)
        self.possible_devices = lambda: possible
        self.notice = lambda: leaving


@pytest.mark.parametrize(
    ("now", "possible", "leaving", "grow", "reason"),
    [
        (8, 8, "", True, ""),
        (4, 4, "", True, ""),
        (4, 8, "", True, "8 devices are there again; 4 are in use"),
        (4, 8, "", False, ""),
        (8, 16, "", True, ""),  # nobody asked for more than at the beginning
        (8, 8, "n1 in 30 s", True, "the cluster takes away n1 in 30 s"),
    ],
)
def test_reasons_to_restart_a_cluster_that_works(
    now: int, possible: int, leaving: str, grow: bool, reason: str
) -> None:
    remote = SimpleNamespace(cluster=FakeCluster(now, possible, leaving), close=lambda: None)
    here = session.Session(0, None, cast(Any, remote), wanted_devices=8)
    assert ClusterWatch(RestartPolicy(grow=grow))._look(here, remote.cluster) == reason


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("wait_s", -1, "a number of seconds"),
        ("first_pause_s", "2", "a number of seconds"),
        ("max_per_hour", 0, "a whole number"),
        ("min_devices", 1.5, "a whole number"),
        ("grow", 1, "True or False"),
    ],
)
def test_bad_policies(name: str, value: Any, needed: str) -> None:
    with pytest.raises(ArgumentError, match=rf"RestartPolicy\({name}={value!r}\): needs {needed}"):
        RestartPolicy(**{name: value})
