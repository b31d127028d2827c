"""The interface of all transports: tiles from devices of this process to others, and back.

A *transfer* is all that one `Send` moves to one `Recv`, between two meshes; each process sends and
receives its own part of it. Workers are numbered once per session. Tiles are dense arrays on one
device, which leave it (and arrive) without passing through the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from autopar.ir.remote import End


@dataclass(frozen=True)
class OutTile:
    """A tile that leaves: its data, on the device `source` of this worker, and who receives it.
    One with several targets is sent to all of them (a broadcast where the transport has one)."""

    data: jax.Array
    source: End
    targets: tuple[End, ...]


@dataclass(frozen=True)
class InTile:
    """A tile that arrives: on the device `target` of this worker. `targets` are all that receive
    this tile, in the sender's order, for transports that must know them."""

    shape: tuple[int, ...]
    dtype: Any
    source: End
    target: End
    targets: tuple[End, ...]


@dataclass(frozen=True)
class Link:
    """A sender and the receivers that get the same tile: what communicators are made for."""

    source: End
    targets: tuple[End, ...]


class Transport(Protocol):
    """How a worker sends and receives. Every method is called from one thread. Neither `send` nor
    `recv` waits for the other side: the arrays that `recv` gives may still be on their way, and
    programs that read them wait by themselves. (Where a transport cannot do that, looking at an
    element of what `recv` gives waits.) What is sent leaves later. A transport keeps it alive until
    then, but whoever sends must not donate or delete it meanwhile; where that may happen, a copy is
    sent.

    Both sides list the tiles of a transfer in the same order, restricted to what concerns them.
    `tag` names the transfer: unique in the session, the same on both sides, below 2**40. Transfers
    from one worker to another are received in the order in which they are sent.
    """

    name: str

    def address(self) -> dict[str, Any]:
        """What other workers must know to reach this one, as JSON data."""
        ...

    def connect(self, addresses: Mapping[int, dict[str, Any]]) -> None:
        """Learn the addresses of workers; called again when there are more."""
        ...

    def prepare(self, links: Sequence[Link]) -> None:
        """Make ready for these links, which all concern this worker. Every worker gets its links in
        one global order, so that what both sides must do together cannot wait in a circle."""
        ...

    def send(self, tag: int, tiles: Sequence[OutTile]) -> None: ...

    def recv(self, tag: int, tiles: Sequence[InTile]) -> Sequence[jax.Array]: ...

    def close(self) -> None: ...
