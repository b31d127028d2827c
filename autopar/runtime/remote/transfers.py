"""A worker's part of a transfer between meshes: tiles that leave, arrays made of tiles that arrive.

Where several devices of the target mesh get the same part and it cannot be cut among them, it
crosses once per worker, and the worker copies it to its other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from autopar.ir.remote import End, RemoteTransfer
from autopar.ir.tiles import Box, TilePlan, shard_box, within
from autopar.runtime.remote.exporting import sharding_of
from autopar.runtime.transfers import (
    alone,
    copied_from,
    copier,
    cutter,
    gatherer,
    held_box,
    joiner,
    landed_sharding,
    waits,
)
from autopar.runtime.transports.base import InTile, Link, OutTile


def _ends(grid: Sequence[int], ends: Sequence[End]) -> list[End]:
    """Of each place in an arrangement."""
    return [ends[device] for device in grid]


def _origins(plan: TilePlan) -> list[int]:
    """For each place of the target: the place that is sent what it gets."""
    origins = list(range(len(_target_places(plan))))
    for place, source in copied_from(plan):
        origins[place] = source
    return origins


def _target_places(plan: TilePlan) -> range:
    size = 1
    for length in plan.target_mesh:
        size *= length
    return range(size)


@lru_cache(maxsize=4096)
def _landing_places(plan: TilePlan, workers: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """By place that tiles are sent to: that place, and one more of each other worker that has a
    place with the same part. `workers` are those of the target's places."""
    landing: dict[int, dict[int, int]] = {}
    origins = _origins(plan)
    for place in _target_places(plan):
        if origins[place] == place:
            landing[place] = {workers[place]: place}
    for place in _target_places(plan):
        landing[origins[place]].setdefault(workers[place], place)
    return {place: tuple(found.values()) for place, found in landing.items()}


def target_places(crossing: RemoteTransfer, ends: Sequence[End]) -> list[tuple[int, ...]]:
    """For each tile, the places of the target that receive it."""
    plan = crossing.tiles
    assert plan is not None
    workers = tuple(end.worker for end in _ends(crossing.target.grid, ends))
    landing = _landing_places(plan, workers)
    return [landing[tile.target] for tile in plan.tiles]


class Leaving:
    """What a worker sends of the buffers of one `Send`. `kept` tells of each buffer that no stage
    program will use it up; what may be used up while it is still on its way is copied first."""

    def __init__(
        self,
        crossings: Sequence[RemoteTransfer],
        kept: Sequence[bool],
        source_ends: Sequence[End],
        target_ends: Sequence[End],
        worker: int,
    ) -> None:
        self._own = [
            self._cuts(crossing, own, source_ends, target_ends, worker)
            for crossing, own in zip(crossings, kept, strict=True)
        ]

    @staticmethod
    def _cuts(
        crossing: RemoteTransfer,
        kept: bool,
        source_ends: Sequence[End],
        target_ends: Sequence[End],
        worker: int,
    ) -> list[tuple[int, Any, list[tuple[int, End, tuple[End, ...]]]]]:
        """(device, how its shard is cut, (number, source, targets) of each of its tiles)"""
        plan = crossing.tiles
        assert plan is not None
        sources = _ends(crossing.source.grid, source_ends)
        targets = _ends(crossing.target.grid, target_ends)
        by_source: dict[int, list[int]] = {}
        for number, tile in enumerate(plan.tiles):
            if sources[tile.source].worker == worker:
                by_source.setdefault(tile.source, []).append(number)
        places = target_places(crossing, target_ends)
        cuts = []
        for source, numbers in by_source.items():
            shard = held_box(plan, source)
            boxes = [within(plan.tiles[n].box, shard) for n in numbers]
            end = sources[source]
            tiles = [(n, end, tuple(targets[p] for p in places[n])) for n in numbers]
            whole = boxes == [within(shard, shard)]
            as_it_is = _uncut if kept else _copied
            cuts.append((end.device, as_it_is if whole else cutter(tuple(boxes)), tiles))
        return cuts

    def links(self) -> list[Link]:
        return [
            Link(source, targets)
            for cuts in self._own
            for _, _, tiles in cuts
            for _, source, targets in tiles
        ]

    def tiles(self, arrays: Sequence[jax.Array]) -> list[OutTile]:
        found: list[OutTile] = []
        for array, cuts in zip(arrays, self._own, strict=True):
            if not cuts:
                continue
            shards = shards_by_device(array)
            numbered = []
            for device, cut, tiles in cuts:
                for (number, source, targets), data in zip(tiles, cut(shards[device]), strict=True):
                    numbered.append((number, OutTile(data, source, targets)))
            found += [tile for _, tile in sorted(numbered, key=lambda one: one[0])]
        return found


def _uncut(data: jax.Array) -> list[jax.Array]:
    return [data]


@jax.jit
def _copied(data: jax.Array) -> list[jax.Array]:
    return [jnp.copy(data)]


def shards_by_device(array: jax.Array) -> dict[int, jax.Array]:
    """An array's shards, by the place of their device among this process's."""
    places = {device: place for place, device in enumerate(jax.local_devices())}
    return {places[shard.device]: shard.data for shard in array.addressable_shards}


@dataclass(frozen=True)
class _Join:
    """How a device's part is made from tiles, and which other devices get a copy of it."""

    device: int
    numbers: tuple[int, ...]  # among the tiles of the crossing that this worker receives
    join: Any
    shape: tuple[int, ...]
    copies: tuple[int, ...]


class Coming:
    """What a worker receives of the buffers of one `Recv`."""

    def __init__(
        self,
        crossings: Sequence[RemoteTransfer],
        source_ends: Sequence[End],
        target_ends: Sequence[End],
        worker: int,
        devices: list[Any],
    ) -> None:
        self.tiles: list[InTile] = []
        self._parts: list[tuple[int, int, list[_Join], Any]] = []
        for crossing in crossings:
            first = len(self.tiles)
            joins = self._joins(crossing, source_ends, target_ends, worker)
            finish = _Finish(crossing, devices)
            self._parts.append((first, len(self.tiles), joins, finish))

    def _joins(
        self,
        crossing: RemoteTransfer,
        source_ends: Sequence[End],
        target_ends: Sequence[End],
        worker: int,
    ) -> list[_Join]:
        plan = crossing.tiles
        assert plan is not None
        sources = _ends(crossing.source.grid, source_ends)
        targets = _ends(crossing.target.grid, target_ends)
        first = len(self.tiles)
        received: dict[int, list[tuple[int, Box]]] = {}
        for tile, places in zip(plan.tiles, target_places(crossing, target_ends), strict=True):
            ends = tuple(targets[place] for place in places)
            for place, end in zip(places, ends, strict=True):
                if end.worker == worker:
                    received.setdefault(place, []).append((len(self.tiles) - first, tile.box))
                    shape = tuple(stop - start for start, stop in tile.box)
                    self.tiles.append(
                        InTile(shape, crossing.target.dtype, sources[tile.source], end, ends)
                    )
        own = [place for place, end in enumerate(targets) if end.worker == worker]
        origins = _origins(plan)
        landing = _landing_places(plan, tuple(end.worker for end in targets))
        by_landing: dict[int, list[int]] = {}
        for place in own:
            at = next(p for p in landing[origins[place]] if targets[p].worker == worker)
            by_landing.setdefault(at, []).append(place)
        joins = []
        for at, places in by_landing.items():
            tiles = received.get(at, [])
            boxes = tuple(box for _, box in tiles)
            joins.append(
                _Join(
                    targets[at].device,
                    tuple(n for n, _ in tiles),
                    joiner(boxes) if boxes else None,
                    _landed_shape(plan, origins[at]),
                    tuple(targets[p].device for p in places if p != at),
                )
            )
        return joins

    def assemble(self, received: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays, from all tiles in order."""
        arrays = []
        local = jax.local_devices()
        for first, last, joins, finish in self._parts:
            tiles = received[first:last]
            parts: dict[int, jax.Array] = {}
            for one in joins:
                if one.join is None:
                    part = jax.device_put(jnp.zeros(one.shape, finish.dtype), local[one.device])
                else:
                    part = one.join([tiles[n] for n in one.numbers])
                parts[one.device] = part
                for device in one.copies:
                    parts[device] = jax.device_put(part, SingleDeviceSharding(local[device]))
            arrays.append(finish(parts))
        return arrays


def _landed_shape(plan: TilePlan, place: int) -> tuple[int, ...]:
    box = shard_box(plan.shape, plan.target_layout, plan.target_mesh, place)
    shape = [stop - start for start, stop in box]
    for entry, size in zip(plan.landing, plan.target_mesh, strict=True):
        if entry >= 0:
            shape[entry] //= size
    return tuple(shape)


class _Finish:
    """From the parts of this worker's devices to the array as the mesh wants it."""

    def __init__(self, crossing: RemoteTransfer, devices: list[Any]) -> None:
        assert crossing.tiles is not None
        target = sharding_of(crossing.target, devices)
        self.shape, self.dtype = crossing.target.shape, crossing.target.dtype
        self.landed = landed_sharding(crossing.tiles, target)
        self.gather = None
        if self.landed != target:
            gather = gatherer(target)
            self.gather = alone(gather, target.mesh) if waits(target) else gather

    def __call__(self, parts: dict[int, jax.Array]) -> jax.Array:
        landed = jax.make_array_from_single_device_arrays(
            self.shape, self.landed, [parts[d] for d in sorted(parts)], dtype=self.dtype
        )
        return self.gather(landed) if self.gather else landed


def same_mesh_copier(crossing: RemoteTransfer, devices: list[Any]) -> Any:
    """For stages that share a mesh: the array as the other wants it, never in the same buffer."""
    return copier(sharding_of(crossing.target, devices))
