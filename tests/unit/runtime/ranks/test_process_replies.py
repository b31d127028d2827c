"""Answers of workers in processes of your own."""

from __future__ import annotations

import json

import numpy as np
import pytest

from autopar import _jax
from autopar.errors import WorkerError
from autopar.runtime.ranks.process_replies import (
    Elsewhere,
    OwnReply,
    SentAnswer,
    SentReply,
    StoredReply,
    step_arrays,
    step_of_arrays,
)


def test_a_reply_keeps_its_first_answer():
    reply = OwnReply("the command 'load'")
    assert not reply.done()
    reply.settle(3)
    reply.settle(None, WorkerError("too late"))
    assert reply.done() and reply.result() == 3


def test_a_reply_raises_what_it_was_settled_with():
    reply = OwnReply("the command 'load'")
    reply.settle(None, WorkerError("process 3 died"))
    with pytest.raises(WorkerError, match="process 3 died"):
        reply.result()


def test_a_reply_that_does_not_come_says_which():
    with pytest.raises(WorkerError, match=r"the command 'load'.* no answer within 0\.01 s"):
        OwnReply("the command 'load'").result(0.01)


def test_an_error_of_a_worker_that_is_a_timeout_is_raised_as_it_is():
    reply = OwnReply("the command 'load'")
    reply.settle(None, TimeoutError("of the worker"))
    with pytest.raises(TimeoutError, match="of the worker"):
        reply.result(1.0)


def test_an_answer_that_nobody_needs_is_there():
    assert Elsewhere([1]).done() and Elsewhere([1]).result() == [1]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What the store of JAX's coordination service holds; only `jax.distributed` has one."""
    kept: dict[str, bytes] = {}
    monkeypatch.setattr(_jax, "store_get", lambda key, limit_s: kept.get(key))
    monkeypatch.setattr(_jax, "store_get_now", kept.get)
    return kept


def test_a_stored_answer(store: dict[str, bytes]):
    reply = StoredReply(2, "the command 'open'", "key", check=lambda: None)
    assert not reply.done()
    store["key"] = json.dumps({"value": ["a", 1]}).encode()
    assert reply.done() and reply.result() == ["a", 1]


def test_a_stored_error_names_its_process(store: dict[str, bytes]):
    store["key"] = json.dumps({"error": "no such file"}).encode()
    with pytest.raises(WorkerError, match="process 2: no such file"):
        StoredReply(2, "the command 'open'", "key", check=lambda: None).result()


def test_waiting_for_a_stored_answer_ends(store: dict[str, bytes]):
    reply = StoredReply(2, "the command 'open'", "key", check=lambda: None)
    with pytest.raises(WorkerError, match=r"process 2 did not answer within 0\.01 s"):
        reply.result(0.01)

    def lost() -> None:
        raise WorkerError("process 1 died")

    with pytest.raises(WorkerError, match="process 1 died"):
        StoredReply(2, "the command 'open'", "key", check=lost).result(60.0)


def test_small_results_are_taken_once():
    taken: list[tuple[int, float | None]] = []

    def take(key: int, limit_s: float | None) -> list[np.ndarray]:
        taken.append((key, limit_s))
        return [np.array([7, 9]), np.float32(0.5), np.arange(2)]

    sent = SentAnswer(12, step_arrays, step_of_arrays)
    reply = SentReply(sent, take, has_come=lambda key: False)
    assert not reply.done()
    values = reply.result(5.0).values
    assert list(values) == [7, 9] and values[7] == 0.5 and values[9].tolist() == [0, 1]
    assert reply.done() and reply.result().values is values
    assert taken == [(12, 5.0)]
