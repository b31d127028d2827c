"""Which tile of a transfer is which, on both sides.

Sender and receiver list tiles in the same order, but each only those that concern it, and a tile
with several targets stands once in the sender's list and once per device in a receiver's. So a tile
is named by its link and by its place among the tiles of that link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from autopar.runtime.transports.base import End, InTile, OutTile

# Sender's device, targets as (worker, device), place among the tiles of this link. The sender's
# worker is left out: tiles are named among those that one worker sends to another.
TileKey = tuple[int, tuple[tuple[int, int], ...], int]


def outgoing_keys(tiles: Sequence[OutTile]) -> list[TileKey]:
    places = _places([(tile.source, tile.targets) for tile in tiles])
    return [_key(t.source, t.targets, place) for t, place in zip(tiles, places, strict=True)]


def incoming_keys(tiles: Sequence[InTile]) -> list[TileKey]:
    """Equal keys of tiles from one worker are one tile, which several devices receive."""
    places = _places([(tile.source, tile.targets, tile.target) for tile in tiles])
    return [_key(t.source, t.targets, place) for t, place in zip(tiles, places, strict=True)]


def _places(names: Sequence[Hashable]) -> list[int]:
    seen: Counter[Hashable] = Counter()
    places = []
    for name in names:
        places.append(seen[name])
        seen[name] += 1
    return places


def _key(source: End, targets: tuple[End, ...], place: int) -> TileKey:
    return source.device, tuple((end.worker, end.device) for end in targets), place
