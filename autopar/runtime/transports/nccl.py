"""Tiles between GPUs by NCCL, through CuPy: device to device, ordered by streams alone.

Every link has its own communicator, with the sender as rank 0, and its own stream on each of its
devices. So a transfer that waits for its other side delays only later transfers of the same link,
in whatever order a schedule posts sends and receives. A transfer is one NCCL group; a tile with
several targets is broadcast. Data is sent as bytes, whatever its type.

Communicators are created in `prepare`, where the processes of a link wait for each other: the
sender makes NCCL's unique id, and the others request it at the sender's port. If a peer dies, NCCL
may leave transfers waiting on the device; the driver's heartbeat then ends the process.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from autopar.errors import ClusterError, DataError, WorkerError
from autopar.ir.remote import Endpoint
from autopar.runtime.remote.frames import write_frame
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.transports.base import InTile, Link, OutTile
from autopar.runtime.transports.cuda import (
    HeldBuffers,
    Landing,
    Lent,
    empty,
    import_cupy,
    import_nccl,
    new_stream,
    ordinal,
    record,
)
from autopar.runtime.transports.numbering import TileKey, incoming_keys, outgoing_keys
from autopar.runtime.transports.ports import MessagePort, dial, receive

PREPARE_LIMIT_S = 120.0


@dataclass(frozen=True)
class _LinkMember:
    """A device's place in a communicator."""

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
        self.devices = jax.local_devices()
        self.addresses: dict[int, Sequence[Any]] = {}
        self._members: dict[tuple[Link, Endpoint], _LinkMember] = {}
        self._joined: set[Link] = set()
        self._ids: dict[str, dict[str, Any]] = {}
        self._new_id = threading.Condition()
        self._held = HeldBuffers()
        self._to_self: dict[int, dict[TileKey, OutTile]] = {}
        self._port = MessagePort(place.address, place.token, self._give_id)

    def address(self) -> dict[str, Any]:
        return {"port": self._port.address}

    def connect(self, addresses: Mapping[int, dict[str, Any]]) -> None:
        self.addresses |= {worker: address["port"] for worker, address in addresses.items()}

    def prepare(self, links: Sequence[Link]) -> None:
        for link in dict.fromkeys(links):
            if link not in self._joined:
                self._join(link)
                self._joined.add(link)

    def send(self, tag: int, tiles: Sequence[OutTile]) -> None:
        self._held.release()
        calls = []
        for key, tile in zip(outgoing_keys(tiles), tiles, strict=True):
            if any(target.worker == self.place.worker for target in tile.targets):
                self._to_self.setdefault(tag, {})[key] = tile
            elif tile.data.size:
                calls.append(self._sending(tile))
        self._post(calls)

    def recv(self, tag: int, tiles: Sequence[InTile]) -> list[jax.Array]:
        self._held.release()
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
        return [
            empty(tile.shape, tile.dtype, self.devices[tile.target.device])
            if landed is None
            else landed[1].array(self.cupy, written[landed[0].stream.ptr])
            for tile, landed in zip(tiles, landings, strict=True)
        ]

    def close(self) -> None:
        self._port.close()
        idle = self._held.release()
        for member in self._members.values():
            if idle:
                member.comm.destroy()
            else:  # destroying would wait for the other side
                member.comm.abort()
        self._members.clear()

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
        """Put the calls on their streams as one group. Returns, by stream, an event after them."""
        if not calls:
            return {}
        for member in {id(call.member): call.member for call in calls}.values():
            member.comm.check_async_error()
        self.nccl.groupStart()
        try:
            for call in calls:
                self._call(call)
        finally:
            self.nccl.groupEnd()
        by_stream: dict[int, list[_Call]] = {}
        for call in calls:
            by_stream.setdefault(call.member.stream.ptr, []).append(call)
        done = {}
        for pointer, stream_calls in by_stream.items():
            member = stream_calls[0].member
            done[pointer] = record(self.cupy, member.device, member.stream)
            self._held.keep(done[pointer], [call.memory for call in stream_calls])
        return done

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
        ends = list(dict.fromkeys((link.source, *link.targets)))
        local = [(rank, end) for rank, end in enumerate(ends) if end.worker == self.place.worker]
        if link.source.worker == self.place.worker:
            unique_id = self.nccl.get_unique_id()
            with self._new_id:
                self._ids[_name(link)] = _packed(unique_id)
                self._new_id.notify_all()
        else:
            unique_id = self._ask_id(link)
        comms: list[Any] = []
        failed: list[BaseException] = []

        def make() -> None:
            for rank, end in local:
                with self.cupy.cuda.Device(ordinal(self.devices[end.device])):
                    comms.append(self.nccl.NcclCommunicator(len(ends), unique_id, rank))

        def join() -> None:
            try:
                if len(local) == 1:
                    make()
                    return
                self.nccl.groupStart()
                try:
                    make()
                finally:
                    self.nccl.groupEnd()
            except BaseException as error:
                failed.append(error)

        # NCCL waits for all ranks without limit.
        thread = threading.Thread(target=join, name="autopar-nccl", daemon=True)
        thread.start()
        thread.join(PREPARE_LIMIT_S)
        if thread.is_alive() or failed:
            why = str(failed[0]) if failed else f"not all joined within {PREPARE_LIMIT_S:g} s"
            raise WorkerError(
                f"worker {self.place.worker} on {self.place.node} could not make an NCCL "
                f"communicator of {', '.join(map(_end, ends))} (worker.device): {why}. NCCL_DEBUG="
                "INFO shows what NCCL does; two processes on one GPU need AUTOPAR_TRANSPORT="
                "cuda_ipc.",
                host=self.place.node,
            ) from (failed[0] if failed else None)
        for (_, end), comm in zip(local, comms, strict=True):
            device = self.devices[end.device]
            stream = new_stream(self.cupy, device)
            self._members[link, end] = _LinkMember(comm, device, stream)

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

    def _give_id(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        name = hello.get("link")
        with self._new_id:
            if not self._new_id.wait_for(lambda: name in self._ids, PREPARE_LIMIT_S):
                return
            packed = self._ids[str(name)]
        write_frame(connection, packed)


def _end(end: Endpoint) -> str:
    return f"{end.worker}.{end.device}"


def _name(link: Link) -> str:
    return f"{_end(link.source)}>{','.join(map(_end, link.targets))}"


def _packed(unique_id: Any) -> dict[str, Any]:
    """CuPy gives unique ids as bytes or, in older releases, as tuples of numbers."""
    return {"bytes": isinstance(unique_id, bytes), "id": list(unique_id)}


def _unpacked(packed: dict[str, Any]) -> Any:
    return bytes(packed["id"]) if packed["bytes"] else tuple(packed["id"])
