"""Processes that leave, and processes that are lost."""

import queue
import time

import pytest

from autopar.runtime.ranks.liveness import Lost, ProcessLiveness
from autopar.runtime.remote.sockets import hang_up

TOKEN = "a token"


def connected(lost: "queue.Queue[Lost]") -> tuple[ProcessLiveness, ProcessLiveness]:
    first = ProcessLiveness(0, TOKEN, lambda: "", lost.put)
    other = ProcessLiveness(3, TOKEN, lambda: "stage 1, running a_forward", lambda _: None)
    other.join(first.serve("127.0.0.1"), 10.0)
    return first, other


def test_a_connection_that_ends_without_farewell_is_a_loss() -> None:
    lost: queue.Queue[Lost] = queue.Queue()
    first, other = connected(lost)
    until_s = time.monotonic() + 10.0
    while not (first._peers and first._peers[0]._doing):  # its first sign of life
        assert time.monotonic() < until_s
        time.sleep(0.01)
    hang_up(other._peers[0]._connection)  # as the kernel does for a process that is killed
    found = lost.get(timeout=10.0)
    assert found.process == 3
    assert "Process 3 died" in str(found)
    assert "running a_forward" in str(found)
    first.close()
    other.close()


def test_a_farewell_is_no_loss() -> None:
    lost: queue.Queue[Lost] = queue.Queue()
    first, other = connected(lost)
    other.close()
    with pytest.raises(queue.Empty):
        lost.get(timeout=0.5)
    first.close()


def test_words_for_silence() -> None:
    assert str(Lost(2, "", 31.0)) == "Process 2 has not answered for 31 s."
