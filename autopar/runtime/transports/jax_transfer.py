"""Tiles by JAX's own transfer server (`jax.experimental.transfer`): TCP between hosts of any kind.

It serves CPUs, and GPUs without CuPy.

A sender *offers* arrays under a number, and a receiver *pulls* that number, in any order: a pull
waits for its offer. All tiles of a transfer from one worker to another are one offer and one pull.
Pulled arrays are returned before their data has arrived; if the peer dies, waiting for them raises
`JaxRuntimeError`. A peer that is alive but never offers is waited for without limit; the driver's
heartbeat notices that.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Hashable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from autopar import _jax
from autopar.errors import ClusterError, WorkerError
from autopar.runtime.remote.place import WorkerPlace
from autopar.runtime.transports.base import InTile, Link, OutTile
from autopar.runtime.transports.numbering import TileKey, incoming_keys, outgoing_keys

# The fastest of several settings, for tiles of 1 to 256 MiB between two processes of one host. Raw
# buffers (`use_raw_buffers`) are a little faster, but send whatever a donation left in the buffer.
NUM_CONNECTIONS = 2
CHUNK_BYTES = 16 * 2**20

CONNECT_LIMIT_S = 10.0
_WORKER_BITS = 22

# Per sender, the types of what is pulled at once; and per tile, where it is among them: the number
# of the sender, and its place there. None for a tile without data.
_Pulls = tuple[list[tuple[int, list[jax.ShapeDtypeStruct]]], list[tuple[int, int] | None]]


class JaxTransfer:
    """See `Transport`. Devices of both sides may be of different kinds."""

    name = "jax_transfer"

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.devices = place.local_devices()
        self.server: Any = _start_server(place, self.devices[0].client)
        self.addresses: dict[int, str] = {place.worker: self.server.address()}
        self.connections: dict[int, Any] = {}
        # What is the same in every step, by the ends of tiles that are sent, and by those received.
        self._offers: dict[Hashable, list[tuple[int, list[int]]]] = {}
        self._pulls: dict[tuple[InTile, ...], _Pulls] = {}

    def address(self) -> dict[str, Any]:
        return {"server": self.addresses[self.place.worker]}

    def connect(self, addresses: Mapping[int, dict[str, Any]]) -> None:
        self.addresses |= {worker: address["server"] for worker, address in addresses.items()}

    def prepare(self, links: Sequence[Link]) -> None:
        for link in links:
            if any(target.worker == self.place.worker for target in link.targets):
                self._connection(link.source.worker)

    def expect(self, tiles: Sequence[InTile]) -> None:
        """JAX itself makes the arrays that arrive, with no program."""

    def send(self, tag: int, tiles: Sequence[OutTile]) -> None:
        ends = tuple([(tile.source, tile.targets, tile.data.size > 0) for tile in tiles])
        offers = self._offers.get(ends)
        if offers is None:
            offers = self._offers[ends] = _offers(tiles)
        for worker, numbers in offers:
            self.server.await_pull(_number(tag, worker), [tiles[n].data for n in numbers])

    def recv(self, tag: int, tiles: Sequence[InTile]) -> list[jax.Array]:
        tiles = tuple(tiles)
        known = self._pulls.get(tiles)
        if known is None:
            known = self._pulls[tiles] = self._pulls_of(tiles)
        pulls, places = known
        number = _number(tag, self.place.worker)
        arrived = [self._connection(worker).pull(number, avals) for worker, avals in pulls]
        return [
            self._placed(tile, None if place is None else arrived[place[0]][place[1]])
            for tile, place in zip(tiles, places, strict=True)
        ]

    def _pulls_of(self, tiles: Sequence[InTile]) -> _Pulls:
        # A tile for several devices of this worker is sent once.
        wanted: dict[int, dict[TileKey, InTile]] = {}
        keys = incoming_keys(tiles)
        for key, tile in zip(keys, tiles, strict=True):
            if prod(tile.shape):
                wanted.setdefault(tile.source.worker, {}).setdefault(key, tile)
        pulls, place_of = [], {}
        for number, (worker, by_key) in enumerate(wanted.items()):
            order = sorted(by_key)
            pulls.append((worker, [self._aval(by_key[key]) for key in order]))
            place_of |= {(worker, key): (number, n) for n, key in enumerate(order)}
        places = [
            place_of.get((tile.source.worker, key)) for key, tile in zip(keys, tiles, strict=True)
        ]
        return pulls, places

    def check(self) -> None:
        """Nothing to do: reading an array whose sender is gone raises."""

    def close(self) -> None:
        self.connections.clear()
        self.server = None

    def _placed(self, tile: InTile, array: jax.Array | None) -> jax.Array:
        device = self.devices[tile.target.device]
        if array is None:
            return jnp.empty(tile.shape, tile.dtype, device=device)
        return array if array.devices() == {device} else jax.device_put(array, device)

    def _aval(self, tile: InTile) -> jax.ShapeDtypeStruct:
        place = SingleDeviceSharding(self.devices[tile.target.device])
        return jax.ShapeDtypeStruct(tile.shape, tile.dtype, sharding=place)

    def _connection(self, worker: int) -> Any:
        if worker not in self.connections:
            if worker not in self.addresses:
                raise ClusterError(
                    f"worker {self.place.worker} must receive from worker {worker}, but knows only "
                    f"the addresses of workers {sorted(self.addresses)}."
                )
            _check_answers(worker, self.addresses[worker])
            self.connections[worker] = self.server.connect(self.addresses[worker])
        return self.connections[worker]


def _start_server(place: WorkerPlace, client: Any) -> Any:
    host = f"[{place.address}]" if ":" in place.address else place.address

    def start(pinned: bool) -> Any:
        return _jax.start_transfer_server(
            client,
            f"{host}:0",
            [f"{host}:0"] * NUM_CONNECTIONS,
            transfer_size=CHUNK_BYTES,
            supports_pinned_allocator=pinned,
        )

    if place.platform == "gpu":
        # Pinned memory is faster, but on some hosts (in containers) CUDA cannot register any.
        with contextlib.suppress(RuntimeError):
            return start(pinned=True)
    try:
        return start(pinned=False)
    except RuntimeError as error:
        raise ClusterError(
            f"JAX's transfer server did not start on {place.node} at the address {place.address}: "
            f"{error}. It must be an address of that host that the other hosts can reach."
        ) from error


def _offers(tiles: Sequence[OutTile]) -> list[tuple[int, list[int]]]:
    """Per receiver, the tiles that it pulls at once, by their places here."""
    offers: dict[int, dict[TileKey, int]] = {}
    for place, (key, tile) in enumerate(zip(outgoing_keys(tiles), tiles, strict=True)):
        if tile.data.size:  # JAX's server would wait for one without data
            for worker in {target.worker for target in tile.targets}:
                offers.setdefault(worker, {})[key] = place
    return [(worker, [by_key[k] for k in sorted(by_key)]) for worker, by_key in offers.items()]


def _number(tag: int, worker: int) -> int:
    """The number of a transfer to a worker. It is local to the sender's server, so it need not name
    the sender."""
    assert worker < 2**_WORKER_BITS and tag < 2**40, (worker, tag)
    return tag << _WORKER_BITS | worker


def _check_answers(worker: int, address: str) -> None:
    """Check that a server answers: JAX would wait forever for one that does not exist."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_LIMIT_S):
            pass
    except OSError as error:
        raise WorkerError(
            f"worker {worker} does not answer at {address} ({error}): it has died, or this host "
            "cannot reach it. All ports between the cluster's hosts must be open."
        ) from error
