"""Processes that leave, and processes that are lost."""

import queue
import time

from autopar.runtime.ranks.liveness import Liveness, Lost

TOKEN = "a token"


def connected(lost: "queue.Queue[Lost]") -> tuple[Liveness, Liveness]:
    first = Liveness(0, TOKEN, lambda: "", lost.put)
    other = Liveness(3, TOKEN, lambda: "stage 1, running a_forward", lost.put)
    other.join(first.serve("127.0.0.1"), 10.0)
    return first, other


def test_a_connection_that_ends_without_farewell_is_a_loss() -> None:
    lost: queue.Queue[Lost] = queue.Queue()
    first, other = connected(lost)
    until_s = time.monotonic() + 10.0
    while not (first._peers and first._peers[0]._doing):  # its first sign of life
        assert time.monotonic() < until_s
        time.sleep(0.01)
    other._peers[0].close()  # as the kernel does for a process that is killed
    found = lost.get(timeout=10.0)
    assert found.process == 3
    assert "Process 3 died" in str(found)
    assert "running a_forward" in str(found)
    first.close()


def test_a_farewell_is_no_loss() -> None:
    lost: queue.Queue[Lost] = queue.Queue()
    first, other = connected(lost)
    other.close()
    first.close()
    assert lost.empty()


def test_words_for_silence() -> None:
    assert str(Lost(2, "", 31.0)) == "Process 2 has not answered for 31 s."
