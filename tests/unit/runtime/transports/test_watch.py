from __future__ import annotations

import threading
import time

import pytest

from autopar.errors import WorkerError
from autopar.runtime.transports import watch
from autopar.runtime.transports.watch import TransferWatch, Underway, within


class Mark:
    """An event that a test sets."""

    def __init__(self, done=False):
        self.done = done


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    monkeypatch.setattr(watch, "GRACE_S", 0.1)


@pytest.fixture
def watching(fast):
    made = TransferWatch(7, limit_s=0.2)
    yield made
    made.close()


def transfer(*workers, begun=True):
    """One that is done when it is ended, and the event of its end."""
    ended, done = threading.Event(), Mark()

    def end():
        ended.set()
        done.done = True

    return Underway("of 1.0>7.0", frozenset(workers), Mark(begun), done, [object()], end), ended


def test_a_transfer_that_finishes_is_no_failure(watching):
    one, ended = transfer(1)
    watching.add(one)
    assert not watching.release()
    one.done.done = True
    assert watching.release()
    watching.lose(1, "it left")
    time.sleep(0.3)
    watching.check()
    assert not ended.is_set()


def test_a_worker_that_is_gone_ends_its_transfers_only(watching):
    one, ended = transfer(1, begun=False)
    other, other_ended = transfer(2, begun=False)
    watching.add(one)
    watching.add(other)
    watching.lose(1, "it died")
    assert ended.wait(5)
    assert not other_ended.is_set()
    with pytest.raises(
        WorkerError, match=r"worker 7: a transfer of 1\.0>7\.0 failed: worker 1 is gone: it died"
    ):
        watching.check()


def test_the_limit_counts_from_when_the_stream_is_there(watching):
    one, ended = transfer(1, begun=False)
    watching.add(one)
    assert not ended.wait(0.5)
    one.begun.done = True
    assert ended.wait(5)
    with pytest.raises(WorkerError, match=r"worker 1 did not take part within 0\.2 s"):
        watching.check()


def test_the_error_is_there_before_the_end(watching):
    """Whoever waits for the data wakes up when the transfer is ended, and asks then."""
    said = []
    one, _ = transfer(1)
    plain_end = one.end

    def end():
        try:
            watching.check()
        except WorkerError as error:
            said.append(str(error))
        plain_end()

    one.end = end
    watching.add(one)
    deadline = time.monotonic() + 5
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    assert said


def test_whom_one_cannot_reach_any_more(watching):
    watching.lose(3, "it left")
    watching.check()
    watching.check(frozenset({4}))
    with pytest.raises(WorkerError, match="worker 7 cannot exchange tiles with worker 3, which is"):
        watching.check(frozenset({3, 4}))


def test_a_job_within_a_limit():
    assert within(5, lambda: None, "job")
    assert not within(0.05, threading.Event().wait, "job")
    with pytest.raises(ValueError, match="wrong"):
        within(5, _wrong, "job")


def _wrong():
    raise ValueError("wrong")
