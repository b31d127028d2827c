"""The interface of all transports: tiles from devices of this process to others, and back.

A *transfer* is all that one `Send` moves to one `Recv`, between two meshes; each process sends and
receives its share of it. Workers have one number per session. Tiles are dense arrays on one device;
they never pass through the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from autopar.ir.remote import Endpoint


@dataclass(frozen=True)
class OutTile:
    """A tile to send: its data, on the device `source` of this worker, and its receivers. A tile
    with several targets is sent to all of them, by a broadcast if the transport has one."""

    data: jax.Array
    source: Endpoint
    targets: tuple[Endpoint, ...]


@dataclass(frozen=True)
class InTile:
    """A tile to receive on the device `target` of this worker. `targets`: all devices that receive
    it, in the sender's order, for transports that must know them."""

    shape: tuple[int, ...]
    dtype: Any
    source: Endpoint
    target: Endpoint
    targets: tuple[Endpoint, ...]


@dataclass(frozen=True)
class Link:
    """A sender and all receivers of the same tile; each link has a communicator."""

    source: Endpoint
    targets: tuple[Endpoint, ...]


class Transport(Protocol):
    """How a worker sends and receives. All methods are called from one thread. Neither `send` nor
    `recv` waits for the other side: the arrays that `recv` returns may still be in flight, and
    programs that read them wait for them. (If a transport cannot do that, reading an element of
    the result of `recv` waits.) A transport keeps what it sends alive until it has left, but the
    caller must not donate or delete it meanwhile; where that may happen, send a copy.

    Both sides list the tiles of a transfer in the same order, each side only its own. `tag` names
    the transfer: unique in the session, the same on both sides, below 2**40. Transfers from one
    worker to another are received in the order in which they are sent.
    """

    name: str

    def address(self) -> dict[str, Any]:
        """How other workers reach this one, as JSON data."""
        ...

    def connect(self, addresses: Mapping[int, dict[str, Any]]) -> None:
        """Learn the addresses of other workers; called again when there are more."""
        ...

    def prepare(self, links: Sequence[Link]) -> None:
        """Prepare these links of this worker. All workers prepare their links in one global order,
        so that workers which must act together never wait in a circle."""
        ...

    def expect(self, tiles: Sequence[InTile]) -> None:
        """Load what receiving such tiles takes, while nothing is under way: CUDA may load no
        program while a transfer waits on the device."""
        ...

    def send(self, tag: int, tiles: Sequence[OutTile]) -> None: ...

    def recv(self, tag: int, tiles: Sequence[InTile]) -> Sequence[jax.Array]: ...

    def check(self) -> None:
        """Raise if a transfer has failed. Of some transports, arrays that were being received then
        look ready and hold anything: call this after reading."""
        ...

    def close(self) -> None: ...
