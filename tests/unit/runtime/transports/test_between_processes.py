"""Every transport between processes. Those for CUDA run on a stand-in for CuPy (see `fake/cupy`),
which shows ids, slots, messages and errors; what a GPU does is tested in `tests/gpu`."""

from __future__ import annotations

import socket
import time

import numpy as np
import pytest

from autopar.runtime.transports.base import Endpoint, Link
from autopar.runtime.transports.choose import NAMES
from tests.unit.runtime.transports import cases
from tests.unit.runtime.transports.peer import PeerError, use

pytestmark = pytest.mark.ci  # pipelines on Ray send by jax_transfer too


@pytest.fixture(scope="module")
def processes():
    with cases.workers(3, "jax_transfer", num_devices=4, fake_cuda=True) as peers:
        yield peers


@pytest.fixture(scope="module", params=NAMES)
def transport(request, processes):
    use(processes, request.param)
    return request.param


def only(*names):
    return pytest.mark.parametrize("transport", names, indirect=True)


def test_random_tiles_among_three_processes(processes, transport):
    """The stand-in for CuPy has one device, and importing what NCCL receives waits for it."""
    real = transport == "jax_transfer"
    in_order = transport == "nccl"
    for round_ in range(4):
        transfers = {
            100 * round_ + i: cases.random_transfer(100 * round_ + i, (1, 2, 3), 2 if real else 1)
            for i in range(4 if real else 1)
        }
        cases.carry_out(processes, transfers, seed=round_, sends_first=in_order)


def test_a_worker_may_send_to_itself(processes, transport):
    tiles = tuple(
        cases.Sent(np.arange(n, dtype=np.int32), Endpoint(2, 0), (Endpoint(2, 0),))
        for n in (5, 0, 3)
    )
    cases.carry_out(processes[1:2], {5000: tiles}, sends_first=True)


@only("nccl", "cuda_ipc")
def test_what_comes_from_itself_can_be_used_up(processes, transport):
    right, _ = processes[0].ask("with_itself", range(6000, 6020), Endpoint(1, 0), 100, 0)
    assert right == 20


def test_nothing_is_left_of_many_transfers(processes, transport):
    count, size = (1000, 2**15) if transport == "jax_transfer" else (100, 2**17)
    cases.carry_out_many(processes[0], processes[1], count, 10_000, size)


def test_an_unknown_worker_is_named(processes, transport):
    here, there = Endpoint(1, 0), Endpoint(77, 0)
    link = Link(here, (there,)) if transport == "cuda_ipc" else Link(there, (here,))
    with pytest.raises(PeerError, match=r"ClusterError: .*worker 77, but knows only"):
        processes[0].ask("prepare", [link])


@only("jax_transfer")
@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_two_meshes_send_to_each_other(processes, transport, num_devices):
    """As two meshes of GPUs do in `tests/gpu/test_transports_gpu.py`."""
    cases.between_meshes(processes[:2], num_devices // 2, 30_000 + 100 * num_devices)


@only("jax_transfer")
def test_a_pull_may_come_long_before_its_offer(processes, transport):
    first, second, _ = processes
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    sent = cases.Sent(value, Endpoint(1, 1), (Endpoint(2, 0), Endpoint(2, 1)))
    tiles = [tile for tile, _ in cases.incoming((sent,), 2)]
    second.ask("recv", 2**39 + 1, tiles)  # answers although nothing was offered
    second.ask("recv", 2**39 + 2, tiles)
    for tag in (2**39 + 2, 2**39 + 1):
        first.ask("send", tag, cases.outgoing((sent,), 1))
        for got, _ in second.ask("values", tag):
            np.testing.assert_array_equal(got, value)


@only("cuda_ipc")
def test_slots_of_tiles_at_which_nobody_looks_are_free_again(processes, transport):
    first, second, _ = processes
    sent = cases.Sent(np.ones(2**20, np.float32), Endpoint(1, 0), (Endpoint(2, 0),))
    tiles = [tile for tile, _ in cases.incoming((sent,), 2)]
    cases.carry_out(processes[:2], {40_000: (sent,)})
    before = first.ask("num_slots")
    for tag in range(40_001, 40_011):
        first.ask("send", tag, cases.outgoing((sent,), 1))
        second.ask("recv_unseen", tag, tiles)
        cases.carry_out(processes[:2], {tag + 1000: (sent,)})
    assert first.ask("num_slots") <= before + 3


@only("jax_transfer")
def test_a_peer_that_is_not_there_is_an_error(processes, transport):
    """JAX itself would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes[0].ask("connect", {78: {"server": f"127.0.0.1:{port}"}})
    with pytest.raises(PeerError, match="WorkerError: worker 78 does not answer"):
        processes[0].ask("prepare", [Link(Endpoint(78, 0), (Endpoint(1, 0),))])


@only("nccl")
def test_links_must_have_been_prepared(processes, transport):
    sent = cases.Sent(np.ones(3, np.float32), Endpoint(1, 0), (Endpoint(3, 0), Endpoint(2, 0)))
    with pytest.raises(PeerError, match=r"ClusterError: worker 1 has no communicator"):
        processes[0].ask("send", 1, cases.outgoing((sent,), 1))


@only("jax_transfer", "cuda_ipc")
def test_a_dead_peer_is_an_error_within_seconds(processes, transport):
    """It dies while another waits for its tiles."""
    receiver = processes[0]
    with cases.workers(1, transport, first=11, fake_cuda=True) as (victim,):
        cases.join([receiver, victim])
        sent = cases.Sent(np.ones(3, np.float32), Endpoint(11, 0), (Endpoint(1, 0),))
        cases.carry_out((victim, receiver), {1: (sent,)}, sends_first=True)
        receiver.post("recv", 2, [tile for tile, _ in cases.incoming((sent,), 1)])
        receiver.answer()
        receiver.post("values", 2)
        time.sleep(0.2)
        victim.kill()
        started = time.monotonic()
        with pytest.raises(PeerError, match=r"JaxRuntimeError: .*closed|WorkerError: .*worker 11"):
            receiver.answer()
        assert time.monotonic() - started < 10
        if transport == "cuda_ipc":
            with pytest.raises(PeerError, match="WorkerError: worker 11 does not answer"):
                receiver.ask("prepare", [Link(Endpoint(1, 0), (Endpoint(11, 0),))])


def test_plans_that_share_links_in_any_order(processes, transport):
    """Two plans of three meshes, both ways, large and small tiles in turn."""
    for seed in (1, 2):
        cases.random_traffic(
            processes, seed, 50_000 + 1000 * seed, num_rounds=2, recvs_first=transport != "nccl"
        )


@only("nccl")
def test_a_send_waits_for_nobody(processes, transport):
    """NCCL connects two ranks at their first exchange, where a host waits for the other."""
    first, second, _ = processes
    there, back = (
        cases.Sent(np.arange(9, dtype=np.float32), Endpoint(one, 0), (Endpoint(other, 0),))
        for one, other in ((1, 2), (2, 1))
    )
    cases.prepare(processes[:2], [(there,), (back,)])
    for tag in (60_000, 60_001):
        first.ask("send", tag, cases.outgoing((there,), 1))
        second.ask("send", tag + 10, cases.outgoing((back,), 2))
    for tag in (60_000, 60_001):
        second.ask("recv", tag, [tile for tile, _ in cases.incoming((there,), 2)])
        first.ask("recv", tag + 10, [tile for tile, _ in cases.incoming((back,), 1)])
        cases.check_arrived(processes[:2], {tag: (there,), tag + 10: (back,)})


@only("nccl")
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_receive_that_cannot_end_is_aborted(processes, transport, how):
    """Afterwards the transport is made anew, and the other two go on."""
    cases.receive_from_one_that_ends(processes[:2], how, fake_cuda=True)


@only("nccl")
def test_a_sender_hears_of_a_dead_receiver(processes, transport):
    sender = processes[0]
    with cases.workers(1, transport, first=13, fake_cuda=True) as (victim,):
        cases.join([sender, victim])
        sent = cases.Sent(np.ones(3, np.float32), Endpoint(1, 0), (Endpoint(13, 0),))
        cases.carry_out((sender, victim), {70_000: (sent,)}, sends_first=True)
        victim.kill()
        with pytest.raises(PeerError, match=r"WorkerError: .*with worker 13, which is gone"):
            for tag in range(70_001, 70_101):
                sender.ask("send", tag, cases.outgoing((sent,), 1))
                sender.ask("nap", 0.1)
    use(processes, transport)
