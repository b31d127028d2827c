"""Transfers that every transport must carry out: drawn at random, done by processes, and checked.

The same bodies run on virtual CPU devices by default, and on GPUs in `tests/gpu`.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.runtime.transports.base import Endpoint, InTile, Link
from tests.unit.runtime.transports.peer import Peer, PeerError, join, use

DTYPES = ("float32", "bfloat16", "bool", "int8", "uint32", "float8_e4m3fn", "complex64")
SHAPES = ((), (0,), (1,), (7,), (3, 0, 2), (4, 5), (2, 3, 4), (33, 65))


@dataclass(frozen=True)
class Sent:
    """A tile of a transfer, as a case has it."""

    value: np.ndarray
    source: Endpoint
    targets: tuple[Endpoint, ...]


Transfer = tuple[Sent, ...]


@contextmanager
def workers(
    count: int, transport: str, first: int = 1, *, fake_cuda: bool = False, **options: Any
) -> Iterator[list[Peer]]:
    """Processes that know each other. `ranks`: of GPUs; the processes have one each, or
    `num_devices` where every rank has a GPU of its own, from `first_rank` on."""
    ranks, first_rank = options.pop("ranks", None), options.pop("first_rank", 0)
    peers: list[Peer] = []
    with tempfile.TemporaryDirectory() as folder:
        options["fake_cuda"] = folder if fake_cuda else ""
        try:
            for i in range(count):
                per_process = options.get("num_devices", 1)
                own = range(first_rank + i * per_process, first_rank + (i + 1) * per_process)
                gpus = None if ranks is None or ranks.platform == "cpu" else (ranks, own)
                peers.append(Peer(first + i, transport, gpus=gpus, **options))
            join(peers)
            yield peers
            for peer in peers:
                if peer.process.poll() is None:
                    peer.ask("close")
        finally:
            for peer in peers:
                peer.close()


def random_transfer(seed: int, numbers: Sequence[int], num_devices: int) -> Transfer:
    """Tiles between any workers, with one to three targets, of all kinds and sizes."""
    draw = random.Random(seed)
    values = np.random.default_rng(seed)
    ends = [Endpoint(worker, device) for worker in numbers for device in range(num_devices)]
    tiles = []
    for _ in range(draw.randint(1, 8)):
        source = draw.choice(ends)
        others = [end for end in ends if end.worker != source.worker]
        targets = draw.sample(others, draw.randint(1, min(3, len(others))))
        dtype = jnp.dtype(draw.choice(DTYPES))
        value = values.integers(0, 2 if dtype.kind == "b" else 100, draw.choice(SHAPES)).astype(
            dtype
        )
        tiles.append(Sent(value, source, tuple(targets)))
    return tuple(tiles)


def outgoing(transfer: Transfer, worker: int) -> list[tuple[Any, Endpoint, tuple[Endpoint, ...]]]:
    return [(t.value, t.source, t.targets) for t in transfer if t.source.worker == worker]


def incoming(transfer: Transfer, worker: int) -> list[tuple[InTile, np.ndarray]]:
    return [
        (InTile(t.value.shape, t.value.dtype, t.source, target, t.targets), t.value)
        for t in transfer
        for target in t.targets
        if target.worker == worker
    ]


def links(transfers: Sequence[Transfer]) -> list[Link]:
    """All of them, in the order in which every worker gets its own."""
    return list(dict.fromkeys(Link(t.source, t.targets) for own in transfers for t in own))


def prepare(peers: Sequence[Peer], transfers: Sequence[Transfer]) -> None:
    """Make the links of these transfers, and load what receiving them takes."""
    all_links = links(transfers)
    for peer in peers:
        own = [
            link
            for link in all_links
            if peer.worker in {end.worker for end in (link.source, *link.targets)}
        ]
        peer.post("prepare", own)
        tiles = [tile for one in transfers for tile, _ in incoming(one, peer.worker)]
        peer.post("expect", tiles)
    for peer in peers:
        peer.answer()
        peer.answer()


def carry_out(
    peers: Sequence[Peer],
    transfers: dict[int, Transfer],
    seed: int = 0,
    *,
    sends_first: bool = False,
) -> None:
    """Send and receive the transfers, by tag. Every worker goes through them in the same order, but
    who is early is drawn, and unless `sends_first`, so is whether it first sends or receives."""
    draw = random.Random(seed)
    prepare(peers, list(transfers.values()))
    commands: list[tuple[Peer, list[tuple[str, int, Any]]]] = []
    for peer in peers:
        own: list[tuple[str, int, Any]] = []
        for tag, transfer in transfers.items():
            both = []
            if sent := outgoing(transfer, peer.worker):
                both.append(("send", tag, sent))
            if wanted := incoming(transfer, peer.worker):
                both.append(("recv", tag, [tile for tile, _ in wanted]))
            if not sends_first:
                draw.shuffle(both)
            own += both
        commands.append((peer, own))
    while any(own for _, own in commands):
        peer, own = draw.choice([entry for entry in commands if entry[1]])
        peer.post(*own.pop(0))
    for peer in peers:
        while peer.pending:
            peer.answer()
    check_arrived(peers, transfers)


def check_arrived(peers: Sequence[Peer], transfers: dict[int, Transfer]) -> None:
    for peer in peers:
        for tag, transfer in transfers.items():
            wanted = incoming(transfer, peer.worker)
            if not wanted:
                continue
            for (value, device), (tile, expected) in zip(
                peer.ask("values", tag), wanted, strict=True
            ):
                assert (value.shape, value.dtype) == (tile.shape, tile.dtype), tile
                assert device == tile.target.device, tile
                np.testing.assert_array_equal(_bytes(value), _bytes(expected), err_msg=repr(tile))


def carry_out_many(
    sender: Peer, receiver: Peer, count: int, first_tag: int, size: int, *, work: int = 0
) -> None:
    """Transfers of one tile, in ten rounds, each as fast as it goes. Neither side holds more after
    the last round than after the second. With `work`, tiles are sent long before they are computed:
    by so many products of matrices."""
    source, target = Endpoint(sender.worker, 0), Endpoint(receiver.worker, 0)
    prepare([sender, receiver], [(Sent(np.zeros(size, np.float32), source, (target,)),)])
    tile = InTile((size,), jnp.dtype("float32"), source, target, (target,))
    held: list[list[tuple[int, int]]] = []
    for round_ in range(10):
        first = first_tag + round_ * count // 10
        tags = range(first, first + count // 10)
        sender.post("send_many", tags, source, (target,), size, work)
        receiver.post("recv_many", tags, tile)
        assert receiver.answer() == len(tags)
        sender.answer()
        if round_ in (1, 9):
            held.append([peer.ask("footprint") for peer in (sender, receiver)])
    for (arrays, rss), (earlier, earlier_rss) in zip(held[1], held[0], strict=True):
        assert arrays <= earlier + 5  # threads may still hold the last ones
        grown = rss - earlier_rss
        assert grown < 0.4 * 4 * size * count, f"{grown / 2**20:.0f} MiB more"


def between_meshes(peers: Sequence[Peer], num_devices: int, first_tag: int) -> None:
    """Two meshes, of half of the processes each, send to each other as pipelines do: device to
    device, every tile to all devices of the other mesh, and both ways at once, each side posting
    what it receives before what it sends. `num_devices`: of a process."""
    ends = [Endpoint(peer.worker, d) for peer in peers for d in range(num_devices)]
    meshes = [ends[: len(ends) // 2], ends[len(ends) // 2 :]]
    numbers = itertools.count(first_tag)
    values = np.random.default_rng(first_tag)

    def tile(source: Endpoint, targets: Sequence[Endpoint]) -> Sent:
        return Sent(values.normal(size=(64, 33)).astype(np.float32), source, tuple(targets))

    transfers: dict[int, Transfer] = {}
    for _ in range(3):
        for mesh, others in (meshes, meshes[::-1]):
            pairs = zip(mesh, others, strict=True)
            transfers[next(numbers)] = tuple(tile(end, [target]) for end, target in pairs)
            transfers[next(numbers)] = tuple(tile(end, others) for end in mesh)
    prepare(peers, list(transfers.values()))
    for peer in peers:
        for tag, transfer in transfers.items():
            if wanted := incoming(transfer, peer.worker):
                peer.post("recv", tag, [tile for tile, _ in wanted])
        for tag, transfer in transfers.items():
            if sent := outgoing(transfer, peer.worker):
                peer.post("send", tag, sent)
    for peer in peers:
        while peer.pending:
            peer.answer()
    check_arrived(peers, transfers)


def every_kind(peers: Sequence[Peer], first_tag: int) -> None:
    """Tiles of every type and shape between different processes: from each to the next, and from
    each to all others."""
    draw = np.random.default_rng(first_tag)
    ends = [Endpoint(peer.worker, 0) for peer in peers]
    transfers: dict[int, Transfer] = {}
    for number, source in enumerate(ends):
        others = ends[number + 1 :] + ends[:number]
        for targets in {(others[0],), tuple(others)}:
            transfers[first_tag + len(transfers)] = tuple(
                Sent(draw.integers(0, 2, shape).astype(jnp.dtype(dtype)), source, targets)
                for dtype in (*DTYPES, "float16", "int32", "uint8", "float8_e5m2")
                for shape in SHAPES
            )
    carry_out(peers, transfers, sends_first=True)


def random_traffic(
    peers: Sequence[Peer], seed: int, first_tag: int, num_rounds: int, *, recvs_first: bool
) -> None:
    """Transfers of two plans between all pairs of meshes (processes of one device here), in both
    directions, over the same links, of 0 bytes to 1 MiB. Every mesh goes through its transfers in
    one order, as schedules do, but each is early or late as it happens; with `recvs_first` it posts
    all receives of a round before the sends, which only streams keep from waiting in a circle."""
    draw, values = random.Random(seed), np.random.default_rng(seed)
    ends = [Endpoint(peer.worker, 0) for peer in peers]
    numbers = itertools.count(first_tag)
    for _ in range(num_rounds):
        transfers: dict[int, Transfer] = {}
        for _plan in range(2):
            for source, target in draw.sample(list(itertools.permutations(ends, 2)), len(ends)):
                sizes = [draw.choice((0, 1, 33, 4096, 2**18)) for _ in range(draw.randint(1, 3))]
                others = [end for end in ends if end != source]
                transfers[next(numbers)] = tuple(
                    Sent(
                        values.normal(size=size).astype(np.float32),
                        source,
                        tuple(others) if draw.random() < 0.3 else (target,),
                    )
                    for size in sizes
                )
        _post_traffic(peers, transfers, draw, recvs_first)
        check_arrived(peers, transfers)


def _post_traffic(
    peers: Sequence[Peer], transfers: dict[int, Transfer], draw: random.Random, recvs_first: bool
) -> None:
    prepare(peers, list(transfers.values()))
    posts: dict[Peer, list[tuple[str, int, Any]]] = {}
    for peer in peers:
        sends = [("send", tag, outgoing(own, peer.worker)) for tag, own in transfers.items()]
        recvs = [
            ("recv", tag, [tile for tile, _ in incoming(own, peer.worker)])
            for tag, own in transfers.items()
        ]
        ordered = recvs + sends if recvs_first else sends + recvs
        posts[peer] = [post for post in ordered if post[2]]
    while any(posts.values()):
        peer = draw.choice([peer for peer, own in posts.items() if own])
        peer.post(*posts[peer].pop(0))
        if draw.random() < 0.05:
            peer.post("nap", 0.02)
    for peer in peers:
        while peer.pending:
            peer.answer()


def receive_from_one_that_ends(
    peers: Sequence[Peer], how: str, *, limit_s: float = 3.0, **options: Any
) -> None:
    """A process is killed or stopped while the first of the peers waits inside an NCCL receive for
    it: a named error within the limit. Then the peers make their transports anew and go on."""
    receiver = peers[0]
    with workers(1, "nccl", first=21, **options) as (victim,):
        join([receiver, victim])
        sent = Sent(np.ones(2**16, np.float32), Endpoint(21, 0), (Endpoint(receiver.worker, 0),))
        carry_out((victim, receiver), {1: (sent,)}, sends_first=True)
        receiver.ask("set_limit", limit_s)
        receiver.post("recv", 2, [tile for tile, _ in incoming((sent,), receiver.worker)])
        receiver.post("values", 2)
        receiver.post("nap", 0)
        time.sleep(0.5)
        victim.kill() if how == "kill" else victim.stop()
        reason = "worker 21 is gone" if how == "kill" else "worker 21 did not take part within 3 s"
        with pytest.raises(PeerError, match=rf"WorkerError: .*21\.0>.* failed: {reason}"):
            while receiver.pending:  # where a receive waits depends on the devices
                receiver.answer()
        while receiver.pending:
            with contextlib.suppress(PeerError):
                receiver.answer()
        with pytest.raises(PeerError, match=r"WorkerError: .* failed"):
            receiver.ask("send", 3, [])
        victim.kill()
    use(peers, "nccl")
    for seed in range(3):
        numbers = [peer.worker for peer in peers]
        carry_out(peers, {80_000 + seed: random_transfer(seed, numbers, 1)}, sends_first=True)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
