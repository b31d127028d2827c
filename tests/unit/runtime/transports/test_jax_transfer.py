from __future__ import annotations

import socket
import time

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.runtime.transports.base import End, InTile, Link
from tests.unit.runtime.transports import cases
from tests.unit.runtime.transports.peer import PeerError


@pytest.fixture(scope="module")
def three():
    with cases.workers(3, "jax_transfer") as peers:
        yield peers


def test_random_tiles_among_three_processes(three):
    for round_ in range(6):
        transfers = {
            100 * round_ + i: cases.random_transfer(100 * round_ + i, (1, 2, 3), 2)
            for i in range(4)
        }
        cases.carry_out(three, transfers, seed=round_)


def test_a_pull_may_come_long_before_its_offer(three):
    first, second, _ = three
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    sent = cases.Sent(value, End(1, 1), (End(2, 0), End(2, 1)))
    tiles = [tile for tile, _ in cases.incoming((sent,), 2)]
    second.ask("recv", 2**39 + 1, tiles)  # answers although nothing was offered
    second.ask("recv", 2**39 + 2, tiles)
    for tag in (2**39 + 2, 2**39 + 1):
        first.ask("send", tag, cases.outgoing((sent,), 1))
        for got, _ in second.ask("values", tag):
            np.testing.assert_array_equal(got, value)


def test_a_worker_may_send_to_itself(three):
    value = np.arange(5, dtype=np.int32)
    sent = cases.Sent(value, End(1, 0), (End(1, 1),))
    cases.carry_out(three[:1], {5000: (sent,)})


def test_nothing_is_left_of_a_thousand_transfers(three):
    cases.carry_out_many(three[0], three[1], 1000, 10_000, 32 * 1024)


def test_an_unknown_worker_is_named(three):
    tile = InTile((2,), jnp.dtype("float32"), End(77, 0), End(1, 0), (End(1, 0),))
    with pytest.raises(PeerError, match=r"ClusterError: .*worker 77, whose address it was not"):
        three[0].ask("recv", 1, [tile])


def test_a_dead_peer_is_an_error_within_seconds():
    with cases.workers(2, "jax_transfer", first=11) as (first, second):
        sent = cases.Sent(np.ones(3, np.float32), End(11, 0), (End(12, 0),))
        cases.carry_out((first, second), {1: (sent,)})
        tiles = [tile for tile, _ in cases.incoming((sent,), 12)]
        second.ask("recv", 2, tiles)
        second.post("values", 2)  # waits
        time.sleep(0.2)
        first.kill()
        started = time.monotonic()
        with pytest.raises(PeerError, match=r"JaxRuntimeError: .*closed"):
            second.answer()
        assert time.monotonic() - started < 10


def test_a_peer_that_is_not_there_is_an_error(three):
    """JAX itself would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    three[0].ask("connect", {78: {"server": f"127.0.0.1:{port}"}})
    link = Link(End(78, 0), (End(1, 0),))
    with pytest.raises(PeerError, match="WorkerError: worker 78 does not answer"):
        three[0].ask("prepare", [link])
