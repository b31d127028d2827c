"""The data channel within one process."""

import numpy as np
import pytest

from autopar.runtime.remote.frames import DataTimeout, PeerGone
from autopar.runtime.remote.mailbox import Mailbox


def test_both_ways_keep_their_order_and_do_not_mix() -> None:
    box = Mailbox()
    box.send(1, [np.array(1)])
    box.send(1, [np.array(2)])
    box.offer(1, [np.array(3)])
    assert box.receive(1, 1.0)[0] == 3
    assert [int(box.take(1, 1.0)[0]) for _ in range(2)] == [1, 2]


def test_waits_end_at_their_limit_or_when_it_is_closed() -> None:
    box = Mailbox()
    with pytest.raises(DataTimeout, match="key 7"):
        box.take(7, 0.01)
    box.close()
    with pytest.raises(PeerGone, match="closed"):
        box.receive(7, 10.0)


def test_what_nobody_wants_is_not_kept() -> None:
    box = Mailbox()
    box.discard(5)
    box.offer(5, [np.array(1)])
    with pytest.raises(DataTimeout):
        box.receive(5, 0.01)
