"""Transports between 2, 4 and 8 ranks: on GPUs of their own where the host has enough, else on
shares of one; and from a device to itself.

The processes of a module run all cases, one transport after another. The same bodies run in
`tests/unit/runtime/transports/test_between_processes.py` on CPU devices, where a stand-in for CuPy
takes the part of CUDA; and so do these with AUTOPAR_TEST_RANKS=cpu. Of NCCL only a GPU shows
whether transfers that wait leave room for others: of up to seven links into a device, several wait
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from autopar.runtime.ranks.shared_gpu import SHARE_VARIABLE, Ranks
from autopar.runtime.transports.base import Endpoint
from autopar.runtime.transports.choose import NAMES
from tests.unit.runtime.transports import cases
from tests.unit.runtime.transports.peer import Peer, use

pytestmark = pytest.mark.gpu

WORK = 10  # products of 2048 × 2048 matrices: milliseconds in which a tile is not there yet


def has_cuda(ranks: Ranks) -> bool:
    return ranks.platform == "gpu"


@pytest.fixture(scope="module")
def processes(ranks: Callable[[int], Ranks]) -> Iterator[list[Peer]]:
    """Eight ranks of one device each; on CPUs three, to save time."""
    of_eight = ranks(8)
    fake, count = not has_cuda(of_eight), 8 if has_cuda(of_eight) else 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "12")  # no other processes use the GPU
        with cases.workers(count, "nccl", ranks=of_eight, num_devices=1, fake_cuda=fake) as peers:
            yield peers


@pytest.fixture(scope="module", params=NAMES)
def transport(request: pytest.FixtureRequest, processes: list[Peer]) -> str:
    use(processes, request.param)
    return request.param


@pytest.fixture(scope="module")
def posts_receives_first(ranks: Callable[[int], Ranks], transport: str) -> bool:
    """The stand-in for CuPy waits when it imports what NCCL receives."""
    return has_cuda(ranks(8)) or transport != "nccl"


@pytest.mark.parametrize("which", NAMES)
def test_plans_that_share_links_in_any_order(
    ranks: Callable[[int], Ranks], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks, each with seven links and as many connections as a whole GPU's process has: a
    transfer that waits behind another of its link keeps all streams of its connection waiting.
    First, since eight ranks leave too few connections."""
    of_three = ranks(3)
    fake = not has_cuda(of_three)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with cases.workers(3, which, ranks=of_three, num_devices=1, fake_cuda=fake) as peers:
        for seed in range(2):
            recvs_first = not fake or which != "nccl"
            cases.random_traffic(peers, seed, 4000 + 500 * seed, 3, recvs_first=recvs_first)


def test_every_transport_can_be_used_here(processes: list[Peer]) -> None:
    assert set(processes[0].ask("available")) == set(NAMES)


def test_tiles_of_every_kind_between_two_ranks(processes: list[Peer], transport: str) -> None:
    cases.every_kind(processes[:2], 1000)


def test_tiles_of_every_kind_among_four_ranks(processes: list[Peer], transport: str) -> None:
    cases.every_kind(processes[:4], 2000)


def test_random_tiles_among_all(
    processes: list[Peer], transport: str, posts_receives_first: bool
) -> None:
    numbers = [peer.worker for peer in processes]
    for seed in range(4):
        transfers = {3000 + seed: cases.random_transfer(seed, numbers, 1)}
        cases.carry_out(processes, transfers, seed, sends_first=not posts_receives_first)


def test_tiles_that_are_sent_before_they_are_computed(
    processes: list[Peer], transport: str, ranks: Callable[[int], Ranks]
) -> None:
    work, size = (WORK, 2**20) if has_cuda(ranks(8)) else (0, 2**17)
    cases.carry_out_many(processes[0], processes[1], 50, 6000, size, work=work)


def test_nothing_is_left_of_many_transfers(processes: list[Peer], transport: str) -> None:
    cases.carry_out_many(processes[0], processes[1], 200, 10_000, 2**16)


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"], indirect=True)
def test_a_device_sends_to_itself(
    processes: list[Peer], transport: str, ranks: Callable[[int], Ranks]
) -> None:
    peer = processes[0]
    end = Endpoint(peer.worker, 0)
    draw = np.random.default_rng(0)
    tiles = tuple(
        cases.Sent(draw.integers(0, 2, shape).astype(cases.jnp.dtype(dtype)), end, (end,))
        for dtype in cases.DTYPES
        for shape in cases.SHAPES
    )
    cases.carry_out([peer], {20_001: tiles, 20_002: tiles[::-1]}, sends_first=True)
    work = WORK if has_cuda(ranks(8)) else 0
    for first, size, products in ((20_100, 1000, 0), (20_300, 2**22, work)):
        tags = range(first, first + 50)
        right, in_place = peer.ask("with_itself", tags, end, size, products)
        assert right == len(tags)
        print(f"{transport}: {in_place} of {len(tags)} received arrays were used in place")
    arrays, _ = peer.ask("footprint")
    assert arrays < 50


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_two_meshes_send_to_each_other(
    processes: list[Peer], transport: str, posts_receives_first: bool, num_ranks: int
) -> None:
    if not posts_receives_first:
        pytest.skip("the stand-in for CuPy cannot receive before it sends")
    cases.between_meshes(
        processes[: min(num_ranks, len(processes) // 2 * 2)], 1, 30_000 + num_ranks
    )


def test_two_processes_of_several_gpus(ranks: Callable[[int], Ranks]) -> None:
    """Where ranks share a GPU, a process has one device, and this is the test above."""
    of_four = ranks(4)
    if int(of_four.environment().get(SHARE_VARIABLE, "1")) > 1:
        per_process = 1
    else:
        per_process = 2
    which = "nccl" if has_cuda(of_four) else "jax_transfer"
    with cases.workers(2, which, ranks=of_four, num_devices=per_process) as peers:
        cases.between_meshes(peers, per_process, 1)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_receive_that_cannot_end_is_aborted(ranks: Callable[[int], Ranks], how: str) -> None:
    """A rank is killed or stopped while another waits inside an NCCL receive. These have an MPS
    daemon of their own, since they may harm it."""
    of_three = ranks(3)
    options = {"ranks": of_three, "num_devices": 1, "fake_cuda": not has_cuda(of_three)}
    with cases.workers(2, "nccl", **options) as peers:
        cases.receive_from_one_that_ends(peers, how, first_rank=2, **options)
