"""Tiles between GPUs by NCCL, through CuPy: device to device, ordered by streams alone.

Every link has its own communicator, with the sender as rank 0, and its own stream on each of its
devices. So a transfer that waits for its other side delays only later transfers of the same link,
in whatever order a schedule posts sends and receives. A transfer is one NCCL group; a tile with
several targets is broadcast. Data is sent as bytes, whatever its type.

Communicators are created in `prepare`, where the processes of a link wait for each other: the
sender makes NCCL's unique id, and the others request it at the sender's port. That takes a good
part of a second, so several links are made at once; all workers begin theirs in one global order,
so the first unfinished link is always under way on all its workers. NCCL connects two ranks at
their first exchange, and the host waits there for the other rank; so `prepare` then sends a byte
over each link, one after the other. After that, `send` and `recv` wait for nobody.

A waiting transfer occupies multiprocessors of its device: a device needs as many as it has links,
times NCCL_MAX_CTAS, besides those that its programs need. CUDA runs streams side by side only up to
CUDA_DEVICE_MAX_CONNECTIONS, and may load no program while a transfer waits: hence `expect`.

Workers of a link keep a connection to each other, which ends with either of them. Then, or after
`TRANSFER_LIMIT_S`, transfers that wait are aborted, and `check` raises (`watch`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax

from autopar.errors import ClusterError, DataError, WorkerError
from autopar.ir.remote import Endpoint
from autopar.runtime.remote.frames import write_frame
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.remote.sockets import hang_up
from autopar.runtime.transports.base import InTile, Link, OutTile
from autopar.runtime.transports.cuda import (
    Landing,
    Lent,
    empty,
    expect_landings,
    import_cupy,
    import_nccl,
    new_stream,
    ordinal,
    record,
)
from autopar.runtime.transports.numbering import TileKey, incoming_keys, outgoing_keys
from autopar.runtime.transports.ports import MessagePort, dial, receive
from autopar.runtime.transports.watch import TransferWatch, Underway, within

PREPARE_LIMIT_S = 300.0  # for the other side to be done with earlier links
LINKS_AT_ONCE = 8
TRANSFER_LIMIT_S = 600.0  # for the other side to come: it may compute or read a checkpoint
CLOSE_LIMIT_S = 10.0


@dataclass(frozen=True)
class _LinkMember:
    """A device's place in the communicator of a link."""

    link: Link
    comm: Any
    device: Any
    stream: Any


@dataclass(frozen=True)
class _Call:
    """One call of a group: a member reads or writes memory. `peer`: the rank of the other side, or
    None in a broadcast."""

    member: _LinkMember
    memory: Lent | Landing
    sends: bool
    peer: int | None


class Nccl:
    """See `Transport`. A worker may send to itself, even to the same device: then `send` only notes
    the tiles and must come before `recv`, which posts both sides as one group."""

    name = "nccl"

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.cupy, self.nccl = import_cupy(self.name), import_nccl()
        self.devices = place.local_devices()
        self.addresses: dict[int, Sequence[Any]] = {}
        self._members: dict[tuple[Link, Endpoint], _LinkMember] = {}
        self._joined: set[Link] = set()
        self._ids: dict[str, dict[str, Any]] = {}
        self._new_id = threading.Condition()
        self._aborted: set[int] = set()  # by id of the member
        self._watch = TransferWatch(place.worker, TRANSFER_LIMIT_S)
        self._watched: dict[int, socket.socket] = {}
        self._to_self: dict[int, dict[TileKey, OutTile]] = {}
        self._port = MessagePort(place.address, place.token, self._serve)

    def address(self) -> dict[str, Any]:
        return {"port": self._port.address}

    def connect(self, addresses: Mapping[int, dict[str, Any]]) -> None:
        self.addresses |= {worker: address["port"] for worker, address in addresses.items()}

    def prepare(self, links: Sequence[Link]) -> None:
        new = [link for link in dict.fromkeys(links) if link not in self._joined]
        for link in new:
            self._keep_connected(link)
        pool = ThreadPoolExecutor(LINKS_AT_ONCE, "autopar-nccl")
        try:
            for joined in [pool.submit(self._join, link) for link in new]:
                joined.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        for link in new:
            self._within_limit(link, partial(self._connect_ranks, link))
            self._joined.add(link)

    def expect(self, tiles: Sequence[InTile]) -> None:
        expect_landings(tiles, self.devices)

    def send(self, tag: int, tiles: Sequence[OutTile]) -> None:
        self._watch.check()
        self._watch.release()
        calls = []
        for key, tile in zip(outgoing_keys(tiles), tiles, strict=True):
            if any(target.worker == self.place.worker for target in tile.targets):
                self._to_self.setdefault(tag, {})[key] = tile
            elif tile.data.size:
                calls.append(self._sending(tile))
        self._post(calls)

    def recv(self, tag: int, tiles: Sequence[InTile]) -> list[jax.Array]:
        self._watch.check()
        self._watch.release()
        noted = self._to_self.pop(tag, {})
        calls: list[_Call] = []
        landings: list[tuple[_LinkMember, Landing] | None] = []
        for key, tile in zip(incoming_keys(tiles), tiles, strict=True):
            if not prod(tile.shape):
                landings.append(None)
                continue
            if tile.source.worker == self.place.worker and key in noted:
                calls.append(self._sending(noted.pop(key)))
            member = self._member(Link(tile.source, tile.targets), tile.target)
            landing = Landing(tile.shape, tile.dtype, member.device, member.stream)
            landings.append((member, landing))
            peer = 0 if len(tile.targets) == 1 else None
            calls.append(_Call(member, landing, sends=False, peer=peer))
        written = self._post(calls)
        arrays = [
            empty(tile.shape, tile.dtype, self.devices[tile.target.device])
            if landed is None
            else landed[1].array(self.cupy, written[id(landed[0])])
            for tile, landed in zip(tiles, landings, strict=True)
        ]
        self._watch.check()
        return arrays

    def check(self) -> None:
        self._watch.check()

    def close(self) -> None:
        self._port.close()
        for connection in self._watched.values():
            hang_up(connection)
        idle = self._watch.release()
        members = [m for m in self._members.values() if id(m) not in self._aborted]
        self._members.clear()

        def end() -> None:
            for member in members:
                with contextlib.suppress(self.nccl.NcclError):
                    if idle and not any(map(self._watch.is_lost, self._others(member.link))):
                        member.comm.destroy()
                    else:  # destroying would wait for the other side
                        member.comm.abort()

        within(CLOSE_LIMIT_S, end, "autopar-nccl")
        self._watch.close()

    def _sending(self, tile: OutTile) -> _Call:
        member = self._member(Link(tile.source, tile.targets), tile.source)
        (target, *others) = tile.targets
        peer = None if others else (0 if target == tile.source else 1)
        return _Call(member, Lent(tile.data, member.stream), sends=True, peer=peer)

    def _member(self, link: Link, end: Endpoint) -> _LinkMember:
        member = self._members.get((link, end))
        if member is None:
            raise ClusterError(
                f"worker {self.place.worker} has no communicator for {link}: prepare links before "
                "sending tiles."
            )
        return member

    def _post(self, calls: Sequence[_Call]) -> dict[int, Any]:
        """Put the calls on their streams as one group. Returns, by id of the member,
        an event after them."""
        by_member: dict[int, list[_Call]] = {}
        for call in calls:
            by_member.setdefault(id(call.member), []).append(call)
        members = [member_calls[0].member for member_calls in by_member.values()]
        for member in members:
            self._watch.check(self._others(member.link))
        begun = [record(self.cupy, member.device, member.stream) for member in members]
        try:
            for member in members:
                member.comm.check_async_error()
            self._group(calls)
        except self.nccl.NcclError as error:
            self._watch.check()  # it was aborted meanwhile
            names = ", ".join(_name(member.link) for member in members)
            raise WorkerError(
                f"NCCL failed on worker {self.place.worker} in a transfer of {names} "
                f"(worker.device): {error}. NCCL_DEBUG=INFO shows what NCCL does.",
                host=self.place.node,
            ) from error
        done = {}
        for member, before, member_calls in zip(members, begun, by_member.values(), strict=True):
            after = done[id(member)] = record(self.cupy, member.device, member.stream)
            self._watch.add(
                Underway(
                    f"of {_name(member.link)} (worker.device)",
                    self._others(member.link),
                    before,
                    after,
                    [call.memory for call in member_calls],
                    partial(self._abort, member),
                )
            )
        return done

    def _group(self, calls: Sequence[_Call]) -> None:
        if calls:
            with self._grouped():
                for call in calls:
                    self._call(call)

    def _abort(self, member: _LinkMember) -> None:
        if id(member) not in self._aborted:
            self._aborted.add(id(member))
            with contextlib.suppress(self.nccl.NcclError):
                member.comm.abort()

    def _others(self, link: Link) -> frozenset[int]:
        workers = {end.worker for end in (link.source, *link.targets)}
        return frozenset(workers - {self.place.worker})

    def _call(self, call: _Call) -> None:
        comm, pointer, size = call.member.comm, call.memory.pointer, call.memory.num_bytes
        kind, stream = self.nccl.NCCL_UINT8, call.member.stream.ptr
        if call.peer is None:
            comm.broadcast(pointer, pointer, size, kind, 0, stream)
        elif call.sends:
            comm.send(pointer, size, kind, call.peer, stream)
        else:
            comm.recv(pointer, size, kind, call.peer, stream)

    def _join(self, link: Link) -> None:
        """Make the link's communicator."""
        ends = _ends(link)
        local = [(rank, end) for rank, end in enumerate(ends) if end.worker == self.place.worker]
        if link.source.worker == self.place.worker:
            unique_id = self.nccl.get_unique_id()
            with self._new_id:
                self._ids[_name(link)] = _packed(unique_id)
                self._new_id.notify_all()
        else:
            unique_id = self._ask_id(link)

        def join() -> None:
            comms = self._communicators(len(ends), unique_id, local)
            for (_, end), comm in zip(local, comms, strict=True):
                device = self.devices[end.device]
                stream = new_stream(self.cupy, device)
                self._members[link, end] = _LinkMember(link, comm, device, stream)

        self._within_limit(link, join)

    def _within_limit(self, link: Link, job: Callable[[], None]) -> None:
        """Run a job in which NCCL waits for all ranks of a link without limit."""
        why, cause = f"not all joined within {PREPARE_LIMIT_S:g} s", None
        try:
            done = within(PREPARE_LIMIT_S, job, "autopar-nccl")
        except Exception as error:
            done, why, cause = False, str(error), error
        if not done:
            raise WorkerError(
                f"worker {self.place.worker} on {self.place.node} could not make an NCCL "
                f"communicator of {', '.join(map(_end, _ends(link)))} (worker.device): {why}. "
                "NCCL_DEBUG=INFO shows what NCCL does. Processes that share a GPU need NCCL 2.30 "
                "with NCCL_MULTI_RANK_GPU_ENABLE=1 (autopar launch sets both), or "
                "AUTOPAR_TRANSPORT=cuda_ipc.",
                host=self.place.node,
            ) from cause

    def _communicators(
        self, size: int, unique_id: Any, local: Sequence[tuple[int, Endpoint]]
    ) -> list[Any]:
        comms = []
        with self._grouped() if len(local) > 1 else contextlib.nullcontext():
            for rank, end in local:
                with self.cupy.cuda.Device(ordinal(self.devices[end.device])):
                    comms.append(self.nccl.NcclCommunicator(size, unique_id, rank))
        return comms

    def _connect_ranks(self, link: Link) -> None:
        """Send a first byte over the link, which also loads NCCL's kernel."""
        ends = _ends(link)
        if len(ends) == 1:
            return
        calls = []
        for rank, end in enumerate(ends):
            if end.worker == self.place.worker:
                member = self._members[link, end]
                byte = Landing((1,), "uint8", member.device, member.stream)
                peer = None if len(link.targets) > 1 else 1 - rank
                calls.append(_Call(member, byte, sends=rank == 0, peer=peer))
        self._group(calls)
        for call in calls:
            record(self.cupy, call.member.device, call.member.stream, block=True).synchronize()

    @contextlib.contextmanager
    def _grouped(self) -> Iterator[None]:
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()

    def _keep_connected(self, link: Link) -> None:
        """Have a connection to the workers of a link; the one with the higher number dials."""
        for worker in sorted(self._others(link)):
            if worker >= self.place.worker or worker in self._watched:
                continue
            if worker not in self.addresses:
                continue  # `_ask_id` says so
            hello = {"watch": self.place.worker}
            address, token = self.addresses[worker], self.place.token
            connection = dial(worker, address, token, hello, PREPARE_LIMIT_S)
            self._watched[worker] = connection
            threading.Thread(
                target=self._wait_for_end,
                args=(worker, connection),
                name="autopar-peer",
                daemon=True,
            ).start()

    def _wait_for_end(self, worker: int, connection: socket.socket) -> None:
        try:
            with connection:
                receive(connection)
        except (DataError, OSError) as error:
            self._watch.lose(worker, str(error))

    def _ask_id(self, link: Link) -> Any:
        source = link.source.worker
        if source not in self.addresses:
            raise ClusterError(
                f"worker {self.place.worker} must receive from worker {source}, but knows only the "
                f"addresses of workers {sorted(self.addresses)}."
            )
        hello = {"link": _name(link)}
        address, token = self.addresses[source], self.place.token
        with dial(source, address, token, hello, PREPARE_LIMIT_S) as connection:
            try:
                return _unpacked(receive(connection, time.monotonic() + PREPARE_LIMIT_S))
            except DataError as error:
                raise WorkerError(
                    f"worker {source} gave worker {self.place.worker} no NCCL id for {_name(link)} "
                    f"(worker.device) within {PREPARE_LIMIT_S:g} s: {error}"
                ) from error

    def _serve(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        if "watch" in hello:
            self._wait_for_end(int(hello["watch"]), connection)
            return
        name = hello.get("link")
        with self._new_id:
            if not self._new_id.wait_for(lambda: name in self._ids, PREPARE_LIMIT_S):
                return
            packed = self._ids[str(name)]
        write_frame(connection, packed)


def _end(end: Endpoint) -> str:
    return f"{end.worker}.{end.device}"


def _ends(link: Link) -> list[Endpoint]:
    """The devices of a link, by their ranks in its communicator."""
    return list(dict.fromkeys((link.source, *link.targets)))


def _name(link: Link) -> str:
    return f"{_end(link.source)}>{','.join(map(_end, link.targets))}"


def _packed(unique_id: Any) -> dict[str, Any]:
    """CuPy gives unique ids as bytes or, in older releases, as tuples of numbers."""
    return {"bytes": isinstance(unique_id, bytes), "id": list(unique_id)}


def _unpacked(packed: dict[str, Any]) -> Any:
    return bytes(packed["id"]) if packed["bytes"] else tuple(packed["id"])
