"""From the tiles of a transfer to keys that are equal on both sides.

Sender and receiver list tiles in the same order, but each only its own, and a tile with several
targets appears once in the sender's list and once per device in a receiver's. So the key of a tile
is its link and its place among the tiles of that link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from autopar.runtime.transports.base import Endpoint, InTile, OutTile

# Sender's device, targets as (worker, device), place among the tiles of this link. Keys are unique
# among the tiles that one worker sends to another, so the sender's worker is left out.
TileKey = tuple[int, tuple[tuple[int, int], ...], int]


def outgoing_keys(tiles: Sequence[OutTile]) -> list[TileKey]:
    places = _places([(tile.source, tile.targets) for tile in tiles])
    return [_key(t.source, t.targets, place) for t, place in zip(tiles, places, strict=True)]


def incoming_keys(tiles: Sequence[InTile]) -> list[TileKey]:
    """Tiles from one worker with equal keys are one tile that several devices receive."""
    places = _places([(tile.source, tile.targets, tile.target) for tile in tiles])
    return [_key(t.source, t.targets, place) for t, place in zip(tiles, places, strict=True)]


def _places(names: Sequence[Hashable]) -> list[int]:
    seen: Counter[Hashable] = Counter()
    places = []
    for name in names:
        places.append(seen[name])
        seen[name] += 1
    return places


def _key(source: Endpoint, targets: tuple[Endpoint, ...], place: int) -> TileKey:
    return source.device, tuple((end.worker, end.device) for end in targets), place
