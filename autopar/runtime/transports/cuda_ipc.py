"""Tiles between processes of one host by memory that both map (CUDA IPC), through CuPy.

Processes that share a GPU need it where NCCL refuses them: before 2.30.

    sender                                       receiver
    tile ─copy─▶ slot of staging memory          │
    copy done ── {tag, slot, places} ── TCP ──▶  │ slot ─copy─▶ array
    slot is free ◀───────── {done} ──────────────│ copy done

The sender owns the slots; they are allocated once and reused, and each receiver opens their handles
once. There are as many as transfers in flight, so `send` never waits: threads wait for copies and
notify the other side. `recv` does not wait either, but **reading its result waits until the
sender's copies are done**, since only then their place is known. The copies to arrays run on a
stream, in JAX's order.

A process can open memory of a GPU only if it sees that GPU (CUDA_VISIBLE_DEVICES).
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax

from autopar.errors import ClusterError, DataError, WorkerError
from autopar.runtime.remote.frames import write_frame
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.transports.base import InTile, Link, OutTile
from autopar.runtime.transports.cuda import (
    Landing,
    Lent,
    empty,
    expect_landings,
    import_cupy,
    new_stream,
    ordinal,
    record,
)
from autopar.runtime.transports.numbering import TileKey, incoming_keys, outgoing_keys
from autopar.runtime.transports.ports import MessagePort, dial, receive
from autopar.runtime.transports.slots import StagingSlot, StagingSlots
from autopar.runtime.transports.waiter import Waiter, WaitJob

RECV_LIMIT_S = 600.0  # for a sender to reach its send: the other stage may be compiling
CONNECT_LIMIT_S = 20.0

_ANY_DIRECTION = 4  # cudaMemcpyDefault: inferred from the pointers


class CudaIpc:
    """See `Transport`. Tiles are received, and the sender is waited for, when the result of `recv`
    is first read, so schedules may post receives early."""

    name = "cuda_ipc"

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.cupy = import_cupy(self.name)
        self.runtime = self.cupy.cuda.runtime
        self.devices = place.local_devices()
        self.addresses: dict[int, Sequence[Any]] = {}
        self._out = [new_stream(self.cupy, device) for device in self.devices]
        self._in = [new_stream(self.cupy, device) for device in self.devices]
        self._slots = [StagingSlots(self._allocator(device)) for device in self.devices]
        self._tickets = itertools.count()
        self._on_the_way: dict[int, tuple[int, StagingSlot, set[int]]] = {}
        self._outgoing: dict[int, socket.socket] = {}
        self._opened: dict[tuple[int, str], int] = {}
        self._changed = threading.Condition()
        self._inbox: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._incoming: dict[int, socket.socket] = {}
        self._gone: dict[int, str] = {}
        self._unread: deque[tuple[int, int, set[TileKey]]] = deque()
        self._senders, self._receivers = Waiter("send"), Waiter("recv")
        self._port = MessagePort(place.address, place.token, self._read_messages)

    def address(self) -> dict[str, Any]:
        return {"port": self._port.address}

    def connect(self, addresses: Mapping[int, dict[str, Any]]) -> None:
        self.addresses |= {worker: address["port"] for worker, address in addresses.items()}
        self.addresses.setdefault(self.place.worker, self._port.address)

    def prepare(self, links: Sequence[Link]) -> None:
        for link in links:
            if link.source.worker == self.place.worker:
                for target in link.targets:
                    self._connection(target.worker)

    def expect(self, tiles: Sequence[InTile]) -> None:
        expect_landings(tiles, self.devices)

    def send(self, tag: int, tiles: Sequence[OutTile]) -> None:
        self._senders.check()
        by_device: dict[int, list[tuple[TileKey, OutTile]]] = {}
        for key, tile in zip(outgoing_keys(tiles), tiles, strict=True):
            if tile.data.size:
                by_device.setdefault(tile.source.device, []).append((key, tile))
        for device, keyed_tiles in by_device.items():
            self._stage(tag, device, keyed_tiles)

    def recv(self, tag: int, tiles: Sequence[InTile]) -> Sequence[jax.Array]:
        self._receivers.check()
        self._drop_unread()
        listed = list(tiles)
        wanted = self._wanted(listed)

        def unseen() -> None:
            self._unread.extend((worker, tag, keys) for worker, keys in wanted.items())

        return _ReceivedOnRead(len(listed), lambda: self._receive(tag, listed), unseen)

    def _receive(self, tag: int, tiles: Sequence[InTile]) -> list[jax.Array]:
        keys = incoming_keys(tiles)
        wanted = self._wanted(tiles)
        places = {
            (worker, key): place
            for worker, tile_keys in wanted.items()
            for key, place in self._wait_for(worker, tag, tile_keys).items()
        }
        arrays: list[Any] = [None] * len(tiles)
        landed: dict[int, list[tuple[int, Landing]]] = {}
        for i, (key, tile) in enumerate(zip(keys, tiles, strict=True)):
            device = self.devices[tile.target.device]
            if not prod(tile.shape):
                arrays[i] = empty(tile.shape, tile.dtype, device)
                continue
            landing = Landing(tile.shape, tile.dtype, device, self._in[tile.target.device])
            self._copy(
                landing.pointer,
                places[tile.source.worker, key].pointer(self, device),
                landing.num_bytes,
                tile.target.device,
                self._in[tile.target.device],
            )
            landed.setdefault(tile.target.device, []).append((i, landing))
        tickets = {(worker, place.ticket) for (worker, _), place in places.items()}
        self._acknowledge(tickets, landed, arrays)
        return arrays

    def check(self) -> None:
        self._senders.check()
        self._receivers.check()

    def close(self) -> None:
        self._port.close()
        self._senders.close()
        self._receivers.close()
        for connection in self._outgoing.values():
            connection.close()
        for pointer in self._opened.values():
            self.runtime.ipcCloseMemHandle(pointer)
        self._opened.clear()
        for device, slots in zip(self.devices, self._slots, strict=True):
            with self.cupy.cuda.Device(ordinal(device)):
                for slot in slots.drain():
                    self.runtime.free(slot.pointer)

    # -- sending

    def _allocator(self, device: Any) -> Callable[[int], tuple[int, str]]:
        def allocate(num_bytes: int) -> tuple[int, str]:
            with self.cupy.cuda.Device(ordinal(device)):
                try:
                    pointer = self.runtime.malloc(num_bytes)
                except self.runtime.CUDARuntimeError as error:
                    raise ClusterError(
                        f"cannot allocate {num_bytes / 2**20:.0f} MiB on {device} for tiles to "
                        f"another process ({error}). JAX takes most of a GPU's memory when it "
                        "starts: lower XLA_PYTHON_CLIENT_MEM_FRACTION."
                    ) from error
                return pointer, bytes(self.runtime.ipcGetMemHandle(pointer)).hex()

        return allocate

    def _stage(self, tag: int, device: int, tiles: Sequence[tuple[TileKey, OutTile]]) -> None:
        """Copy the tiles of one device to a slot, and notify their receivers when that is done."""
        stream, starts, size = self._out[device], [], 0
        for _, tile in tiles:
            starts.append(size)
            size += -(-tile.data.nbytes // 256) * 256
        places: dict[int, list[Any]] = {}
        for (key, tile), start in zip(tiles, starts, strict=True):
            for worker in {target.worker for target in tile.targets}:
                places.setdefault(worker, []).append([key, start])
        connections = {worker: self._connection(worker) for worker in places}
        with self._changed:
            slot = self._slots[device].take(size)
            ticket = next(self._tickets)
            self._on_the_way[ticket] = (device, slot, set(places))
        lent = []
        for (_, tile), start in zip(tiles, starts, strict=True):
            memory = Lent(tile.data, stream)
            self._copy(slot.pointer + start, memory.pointer, memory.num_bytes, device, stream)
            lent.append(memory)
        about = {"tag": tag, "ticket": ticket, "handle": slot.handle, "slot": slot.pointer}

        def tell() -> None:
            for worker, placed in places.items():
                write_frame(connections[worker], {**about, "places": placed})

        copied = record(self.cupy, self.devices[device], stream, block=True)
        self._senders.put(WaitJob(copied, lent, tell))

    def _copy(self, to: int, source: int, num_bytes: int, device: int, stream: Any) -> None:
        with self.cupy.cuda.Device(ordinal(self.devices[device])):
            self.runtime.memcpyAsync(to, source, num_bytes, _ANY_DIRECTION, stream.ptr)

    def _connection(self, worker: int) -> socket.socket:
        if worker not in self._outgoing:
            if worker not in self.addresses:
                raise ClusterError(
                    f"worker {self.place.worker} must send to worker {worker}, but knows only the "
                    f"addresses of workers {sorted(self.addresses)}."
                )
            hello = {"worker": self.place.worker}
            self._outgoing[worker] = dial(
                worker, self.addresses[worker], self.place.token, hello, CONNECT_LIMIT_S
            )
            threading.Thread(
                target=self._read_acknowledgements,
                args=(worker, self._outgoing[worker]),
                name="autopar-ipc",
                daemon=True,
            ).start()
        return self._outgoing[worker]

    def _read_acknowledgements(self, worker: int, connection: socket.socket) -> None:
        try:
            while True:
                ticket = receive(connection)["done"]
                with self._changed:
                    device, slot, readers = self._on_the_way[ticket]
                    readers.discard(worker)
                    if not readers:
                        del self._on_the_way[ticket]
                        self._slots[device].give_back(slot)
        except (DataError, OSError) as error:
            self._lost(worker, error)

    # -- receiving

    def _read_messages(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        worker = int(hello["worker"])
        with self._changed:
            self._incoming[worker] = connection
        try:
            while True:
                message = receive(connection)
                with self._changed:
                    self._inbox.setdefault((worker, message["tag"]), []).append(message)
                    self._changed.notify_all()
        except (DataError, OSError) as error:
            self._lost(worker, error)

    def _lost(self, worker: int, error: Exception) -> None:
        with self._changed:
            self._gone.setdefault(worker, str(error))
            self._changed.notify_all()

    @staticmethod
    def _wanted(tiles: Sequence[InTile]) -> dict[int, set[TileKey]]:
        """The tiles to receive, by worker."""
        wanted: dict[int, set[TileKey]] = {}
        for key, tile in zip(incoming_keys(tiles), tiles, strict=True):
            if prod(tile.shape):
                wanted.setdefault(tile.source.worker, set()).add(key)
        return wanted

    def _wait_for(self, worker: int, tag: int, keys: set[TileKey]) -> dict[TileKey, _IpcPlace]:
        """Where the sender has put the tiles; it sends one message per device."""
        places: dict[TileKey, _IpcPlace] = {}
        deadline = time.monotonic() + RECV_LIMIT_S
        while set(places) != keys:
            with self._changed:
                self._changed.wait_for(
                    lambda: (worker, tag) in self._inbox or worker in self._gone,
                    max(0.0, deadline - time.monotonic()),
                )
                messages = self._inbox.pop((worker, tag), [])
                gone = self._gone.get(worker)
            if not messages:
                late = f"it did not send within {RECV_LIMIT_S:g} s"
                raise WorkerError(
                    f"worker {self.place.worker} waits for tiles of transfer {tag} from worker "
                    f"{worker}, which will not come: {gone or late}."
                )
            for message in messages:
                for key, start in message["places"]:
                    places[_key(key)] = _IpcPlace(worker, message, start)
        return places

    def _acknowledge(
        self,
        tickets: set[tuple[int, int]],
        landed: Mapping[int, Sequence[tuple[int, Landing]]],
        arrays: list[Any],
    ) -> None:
        """Make arrays of what is being copied, and notify the senders when that is done."""
        jobs = []
        for device, arriving in landed.items():
            stream = self._in[device]
            event = record(self.cupy, self.devices[device], stream, block=True)
            landings = [landing for _, landing in arriving]
            jobs.append((event, landings))
            for i, landing in arriving:
                arrays[i] = landing.array(self.cupy, event)

        for number, (event, landings) in enumerate(jobs, 1):
            last = number == len(jobs)
            then = partial(self._tell, tickets) if last else _nothing
            self._receivers.put(WaitJob(event, landings, then))

    def _drop_unread(self) -> None:
        """Free the sender's slots of transfers that were never read."""
        for _ in range(len(self._unread)):
            worker, tag, keys = self._unread.popleft()
            with self._changed:
                messages = self._inbox.pop((worker, tag), [])
            tickets = {(worker, message["ticket"]) for message in messages}
            if tickets:
                self._receivers.put(WaitJob(None, (), partial(self._tell, tickets)))
            left = keys - {_key(key) for message in messages for key, _ in message["places"]}
            if left:
                self._unread.append((worker, tag, left))

    def _tell(self, tickets: Collection[tuple[int, int]]) -> None:
        for worker, ticket in tickets:
            write_frame(self._incoming[worker], {"done": ticket})

    def _mapped(self, worker: int, message: dict[str, Any], device: Any) -> int:
        """The address of a sender's slot in this process."""
        if worker == self.place.worker:
            return message["slot"]
        handle = message["handle"]
        if (worker, handle) not in self._opened:
            with self.cupy.cuda.Device(ordinal(device)):
                try:
                    pointer = self.runtime.ipcOpenMemHandle(bytes.fromhex(handle))
                except self.runtime.CUDARuntimeError as error:
                    raise ClusterError(
                        f"worker {self.place.worker} cannot map GPU memory of worker {worker} "
                        f"({error}). Both must be on one host, in one container, and see the same "
                        "GPUs (CUDA_VISIBLE_DEVICES); otherwise set AUTOPAR_TRANSPORT to nccl "
                        "or jax_transfer."
                    ) from error
                self._opened[worker, handle] = pointer
        return self._opened[worker, handle]


class _ReceivedOnRead(Sequence[jax.Array]):
    """Arrays that are received when the first of them is read; `unseen` is called if that never
    happens."""

    def __init__(
        self, count: int, receive: Callable[[], list[jax.Array]], unseen: Callable[[], None]
    ) -> None:
        self._count = count
        self._receive: Callable[[], list[jax.Array]] | None = receive
        self._unseen = unseen
        self._arrays: list[jax.Array] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if self._receive is not None:
            receive, self._receive = self._receive, None
            self._arrays = receive()
        return self._arrays[index]

    def __del__(self) -> None:
        if self._receive is not None:
            self._unseen()


@dataclass(frozen=True)
class _IpcPlace:
    """The place of a tile in its sender's slot."""

    worker: int
    message: dict[str, Any]
    start: int

    @property
    def ticket(self) -> int:
        return self.message["ticket"]

    def pointer(self, transport: CudaIpc, device: Any) -> int:
        return transport._mapped(self.worker, self.message, device) + self.start


def _nothing() -> None:
    pass


def _key(listed: Any) -> TileKey:
    """A key, from JSON."""
    device, targets, place = listed
    return device, tuple((worker, target) for worker, target in targets), place
