"""A worker's part of a transfer between meshes: tiles that leave, arrays made of tiles that arrive.

If several devices of the target mesh need the same shard and it cannot be cut among them, it is
sent once per worker, and the worker copies it to its other devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from autopar import _jax
from autopar.ir.remote import Endpoint, RemoteTransfer
from autopar.ir.tiles import Box, TilePlan, shard_box, within
from autopar.runtime.remote.exporting import sharding_of
from autopar.runtime.transfers import (
    alone_on,
    copied_from,
    copier,
    cutter,
    gatherer,
    joiner,
    landed_sharding,
    runs_alone,
    source_box,
)
from autopar.runtime.transports.base import InTile, Link, OutTile


def _on_grid(grid: Sequence[int], endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    """The endpoint at each place of an arrangement."""
    return [endpoints[device] for device in grid]


def _origins(plan: TilePlan) -> list[int]:
    """Per place of the target, the place whose tiles it gets: its own, or the one it is copied
    from."""
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
    """Per place that tiles are planned for: that place, and one place of each other worker that
    holds the same shard. `workers`: of the target's places."""
    landing: dict[int, dict[int, int]] = {}
    origins = _origins(plan)
    for place in _target_places(plan):
        if origins[place] == place:
            landing[place] = {workers[place]: place}
    for place in _target_places(plan):
        landing[origins[place]].setdefault(workers[place], place)
    return {place: tuple(by_worker.values()) for place, by_worker in landing.items()}


def target_places(transfer: RemoteTransfer, endpoints: Sequence[Endpoint]) -> list[tuple[int, ...]]:
    """Per tile, the places of the target that receive it."""
    plan = transfer.tiles
    assert plan is not None
    workers = tuple(end.worker for end in _on_grid(transfer.target.grid, endpoints))
    landing = _landing_places(plan, workers)
    return [landing[tile.target] for tile in plan.tiles]


@dataclass(frozen=True)
class _Cut:
    """How a device's shard is cut. `tiles`: number, source and targets of each."""

    device: int
    shape: tuple[int, ...]
    dtype: Any
    cut: Callable[[jax.Array], Sequence[jax.Array]]
    tiles: list[tuple[int, Endpoint, tuple[Endpoint, ...]]]


def _new_zeros(
    warmed: set[Any], program: Callable[..., Any], place: Any, shapes: tuple[Any, ...], dtype: Any
) -> list[jax.Array]:
    """Zeros on the device to run the program on; none if it is in `warmed`, to which this adds
    it."""
    key = (program, place, shapes, str(dtype))
    if key in warmed:
        return []
    warmed.add(key)
    return [jnp.zeros(shape, dtype, device=place) for shape in shapes]


class OutgoingTiles:
    """What a worker sends of the buffers of one `Send`. `kept`: per buffer, whether no later stage
    program uses it up; the others are copied first, since they may be used up while being sent.
    `local`: the worker's devices; default: all of this process."""

    def __init__(
        self,
        transfers: Sequence[RemoteTransfer],
        kept: Sequence[bool],
        source_endpoints: Sequence[Endpoint],
        target_endpoints: Sequence[Endpoint],
        worker: int,
        local: Sequence[Any] | None = None,
    ) -> None:
        self._local = jax.local_devices() if local is None else local
        self._cuts_by_transfer = [
            self._cuts(transfer, is_kept, source_endpoints, target_endpoints, worker)
            for transfer, is_kept in zip(transfers, kept, strict=True)
        ]
        self._ends = [_ends_in_order(cuts) for cuts in self._cuts_by_transfer]

    @staticmethod
    def _cuts(
        transfer: RemoteTransfer,
        kept: bool,
        source_endpoints: Sequence[Endpoint],
        target_endpoints: Sequence[Endpoint],
        worker: int,
    ) -> list[_Cut]:
        plan = transfer.tiles
        assert plan is not None
        sources = _on_grid(transfer.source.grid, source_endpoints)
        targets = _on_grid(transfer.target.grid, target_endpoints)
        by_source: dict[int, list[int]] = {}
        for number, tile in enumerate(plan.tiles):
            if sources[tile.source].worker == worker:
                by_source.setdefault(tile.source, []).append(number)
        places = target_places(transfer, target_endpoints)
        cuts = []
        for source, numbers in by_source.items():
            shard = source_box(plan, source)
            boxes = [within(plan.tiles[n].box, shard) for n in numbers]
            end = sources[source]
            tiles = [(n, end, tuple(targets[p] for p in places[n])) for n in numbers]
            whole = boxes == [within(shard, shard)]
            as_it_is = _uncut if kept else _copied
            cut = as_it_is if whole else cutter(tuple(boxes))
            shape = tuple(stop - start for start, stop in shard)
            cuts.append(_Cut(end.device, shape, transfer.source.dtype, cut, tiles))
        return cuts

    def warm_up(self, warmed: set[Any]) -> None:
        """Run the cuts once, on zeros, but those in `warmed`."""
        for one in itertools.chain(*self._cuts_by_transfer):
            if zeros := _new_zeros(
                warmed, one.cut, self._local[one.device], (one.shape,), one.dtype
            ):
                jax.block_until_ready(one.cut(*zeros))

    def links(self) -> list[Link]:
        return [
            Link(source, targets)
            for one in itertools.chain(*self._cuts_by_transfer)
            for _, source, targets in one.tiles
        ]

    def tiles(self, arrays: Sequence[jax.Array]) -> list[OutTile]:
        out_tiles: list[OutTile] = []
        for array, cuts, ends in zip(arrays, self._cuts_by_transfer, self._ends, strict=True):
            if cuts:
                shards = shards_by_device(array, self._local)
                parts = [part for one in cuts for part in one.cut(shards[one.device])]
                out_tiles += [OutTile(parts[n], source, targets) for n, source, targets in ends]
        return out_tiles


def _ends_in_order(cuts: Sequence[_Cut]) -> list[tuple[int, Endpoint, tuple[Endpoint, ...]]]:
    """Per tile of a transfer, in order: its place among all that the cuts give, and its ends."""
    tiles = [tile for one in cuts for tile in one.tiles]
    in_order = sorted(range(len(tiles)), key=lambda n: tiles[n][0])
    return [(n, *tiles[n][1:]) for n in in_order]


def _uncut(data: jax.Array) -> list[jax.Array]:
    return [data]


@jax.jit
def _copied(data: jax.Array) -> list[jax.Array]:
    return [jnp.copy(data)]


def shards_by_device(array: jax.Array, local: Sequence[Any]) -> dict[int, jax.Array]:
    """An array's shards, by the place of their device among `local`, the worker's devices."""
    places = {device: place for place, device in enumerate(local)}
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    in_order = zip(_jax.devices_of(sharding), _jax.shards_of(array), strict=True)
    return {places[device]: shard for device, shard in in_order}


@dataclass(frozen=True)
class _Join:
    """How a device's shard is made from tiles, and which other devices get a copy of it."""

    device: int
    numbers: tuple[int, ...]  # among the tiles of the transfer that this worker receives
    join: Callable[[Sequence[jax.Array]], jax.Array] | None
    shape: tuple[int, ...]
    copies: tuple[int, ...]


class IncomingTiles:
    """What a worker receives of the buffers of one `Recv`. `devices`: all of its mesh; `local`: the
    worker's devices among them; default: all of this process."""

    def __init__(
        self,
        transfers: Sequence[RemoteTransfer],
        source_endpoints: Sequence[Endpoint],
        target_endpoints: Sequence[Endpoint],
        worker: int,
        devices: list[Any],
        local: Sequence[Any] | None = None,
    ) -> None:
        self._local = jax.local_devices() if local is None else local
        tiles: list[InTile] = []
        self._transfers: list[tuple[int, int, list[_Join], _Finish]] = []
        for transfer in transfers:
            first = len(tiles)
            joins = self._joins(transfer, source_endpoints, target_endpoints, worker, tiles)
            finish = _Finish(transfer, devices, self._local)
            self._transfers.append((first, len(tiles), joins, finish))
        self.tiles = tuple(tiles)

    def _joins(
        self,
        transfer: RemoteTransfer,
        source_endpoints: Sequence[Endpoint],
        target_endpoints: Sequence[Endpoint],
        worker: int,
        all_tiles: list[InTile],
    ) -> list[_Join]:
        """Adds the transfer's tiles to `all_tiles`."""
        plan = transfer.tiles
        assert plan is not None
        sources = _on_grid(transfer.source.grid, source_endpoints)
        targets = _on_grid(transfer.target.grid, target_endpoints)
        first = len(all_tiles)
        received: dict[int, list[tuple[int, Box]]] = {}
        for tile, places in zip(plan.tiles, target_places(transfer, target_endpoints), strict=True):
            ends = tuple(targets[place] for place in places)
            for place, end in zip(places, ends, strict=True):
                if end.worker == worker:
                    received.setdefault(place, []).append((len(all_tiles) - first, tile.box))
                    shape = tuple(stop - start for start, stop in tile.box)
                    all_tiles.append(
                        InTile(shape, transfer.target.dtype, sources[tile.source], end, ends)
                    )
        local = [place for place, end in enumerate(targets) if end.worker == worker]
        origins = _origins(plan)
        landing = _landing_places(plan, tuple(end.worker for end in targets))
        by_landing: dict[int, list[int]] = {}
        for place in local:
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

    def warm_up(self, warmed: set[Any]) -> None:
        """Run the joins once, on zeros, but those in `warmed`."""
        for first, _, joins, finish in self._transfers:
            for one in joins:
                shapes = tuple(self.tiles[first + n].shape for n in one.numbers)
                if one.join and (
                    zeros := _new_zeros(
                        warmed, one.join, self._local[one.device], shapes, finish.dtype
                    )
                ):
                    jax.block_until_ready(one.join(zeros))

    def assemble(self, received: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays, from all tiles in order."""
        arrays = []
        local = self._local
        for first, last, joins, finish in self._transfers:
            tiles = received[first:last]
            shards: dict[int, jax.Array] = {}
            for one in joins:
                if one.join is None:
                    shard = jax.device_put(jnp.zeros(one.shape, finish.dtype), local[one.device])
                else:
                    shard = one.join([tiles[n] for n in one.numbers])
                shards[one.device] = shard
                for device in one.copies:
                    shards[device] = jax.device_put(shard, SingleDeviceSharding(local[device]))
            arrays.append(finish(shards))
        return arrays


def _landed_shape(plan: TilePlan, place: int) -> tuple[int, ...]:
    box = shard_box(plan.shape, plan.target_layout, plan.target_mesh, place)
    shape = [stop - start for start, stop in box]
    for entry, size in zip(plan.landing, plan.target_mesh, strict=True):
        if entry >= 0:
            shape[entry] //= size
    return tuple(shape)


class _Finish:
    """From the shards of this worker's devices to the array in the target's sharding."""

    def __init__(self, transfer: RemoteTransfer, devices: list[Any], local: Sequence[Any]) -> None:
        assert transfer.tiles is not None
        target = sharding_of(transfer.target, devices)
        self.dtype = transfer.target.dtype
        landed = landed_sharding(transfer.tiles, target)
        self.make = _jax.ArrayMaker(transfer.target.shape, self.dtype, landed)
        places = {device: place for place, device in enumerate(local)}
        self.places = [places[device] for device in _jax.devices_of(landed)]
        self.gather = None
        if landed != target:
            gather = gatherer(target)
            self.gather = alone_on(target.mesh, gather) if runs_alone(target) else gather

    def __call__(self, shards: dict[int, jax.Array]) -> jax.Array:
        landed = self.make([shards[place] for place in self.places])
        return self.gather(landed) if self.gather else landed


def same_mesh_copier(
    transfer: RemoteTransfer, devices: list[Any]
) -> Callable[[jax.Array], jax.Array]:
    """For stages that share a mesh: copies an array into the other stage's sharding, always into a
    new buffer."""
    return copier(sharding_of(transfer.target, devices))
