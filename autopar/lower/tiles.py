"""Cross-mesh resharding: from two layouts on two meshes to a `TilePlan`.

Both layouts cut the array into a grid, and the intersections of the two grids' cells are sent. The
target's cells are first cut among the devices that hold the same one, so that each element is sent
once. If several source devices hold a tile, the least busy one sends it, largest tiles first; if
that leaves a device busier than necessary, the source's cells are cut among their holders as well.
Of all cuts, the one whose busiest device moves the fewest bytes wins, then the one with the fewest
tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod

import jax
from jax.sharding import NamedSharding

from autopar.ir.pipeline import Pipeline
from autopar.ir.spec import WHOLE, Layout, fits, from_partition_spec
from autopar.ir.tiles import (
    Box,
    Gather,
    Tile,
    TilePlan,
    grid_index,
    grid_parts,
    num_elements,
    shard_box,
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Grid:
    """An array in cells: their number along each dimension, and the devices that hold each."""

    parts: tuple[int, ...]
    holders: dict[Shape, list[int]]


@lru_cache(maxsize=4096)
def plan_tiles(
    shape: Shape,
    itemsize: int,
    source_layout: Layout,
    source_mesh: Shape,
    target_layout: Layout,
    target_mesh: Shape,
) -> TilePlan:
    """The tiles that take one layout to another; both must divide the shape evenly."""
    assert fits(source_layout, shape, source_mesh), (shape, source_layout, source_mesh)
    assert fits(target_layout, shape, target_mesh), (shape, target_layout, target_mesh)
    uncut = (WHOLE,) * len(source_mesh)
    landings = list(_cuts(shape, target_layout, target_mesh))
    targets = {cut: _grid(shape, target_layout, target_mesh, cut) for cut in landings}

    def best(source_cuts: list[Layout]) -> tuple[int, int, Layout, list[Tile]]:
        candidates = []
        for source_cut in source_cuts:
            source = _grid(shape, source_layout, source_mesh, source_cut)
            for landing, target in targets.items():
                tiles = _tiles(shape, source, target)
                candidates.append((_busiest(tiles), len(tiles), landing, tiles))
        return min(candidates, key=lambda candidate: candidate[:2])

    busiest, _, landing, tiles = best([uncut])
    min_load = prod(shape) / min(prod(source_mesh), max(len(t.holders) for t in targets.values()))
    if busiest > min_load:
        with_cuts = best(list(_cuts(shape, source_layout, source_mesh)))
        if with_cuts[0] < busiest:
            _, _, landing, tiles = with_cuts
    return TilePlan(
        shape=shape,
        itemsize=itemsize,
        source_mesh=source_mesh,
        source_layout=source_layout,
        target_mesh=target_mesh,
        target_layout=target_layout,
        landing=landing,
        tiles=tuple(tiles),
        gathers=tuple(_gathers(shape, target_layout, target_mesh, landing, targets[landing])),
    )


def plan_transfers(
    pipeline: Pipeline, buffers: Mapping[tuple[int, int], jax.ShapeDtypeStruct]
) -> dict[int, TilePlan]:
    """{number of a transfer between meshes: its plan}. `buffers`: (stage, value) -> type and
    `NamedSharding`."""
    plans = {}
    for number, transfer in enumerate(pipeline.transfers):
        source, target = (
            buffers[stage, transfer.ref.value] for stage in (transfer.source, transfer.target)
        )
        if pipeline.stage_mesh[transfer.source] != pipeline.stage_mesh[transfer.target]:
            itemsize = source.dtype.itemsize
            plans[number] = plan_tiles(source.shape, itemsize, *_place(source), *_place(target))
    return plans


def _place(buffer: jax.ShapeDtypeStruct) -> tuple[Layout, Shape]:
    """(layout, shape of the mesh)"""
    sharding = buffer.sharding
    assert isinstance(sharding, NamedSharding)
    names, sizes = tuple(sharding.mesh.axis_names), tuple(sharding.mesh.axis_sizes)
    return from_partition_spec(sharding.spec, buffer.shape, names, sizes, "a buffer"), sizes


def _cuts(shape: Shape, layout: Layout, mesh_shape: Shape) -> Iterator[Layout]:
    """Dimensions to cut shards along, one per axis that the layout does not use, or `WHOLE`: all
    choices that divide shards evenly and use the maximum number of devices."""
    shared = [entry == WHOLE and size > 1 for entry, size in zip(layout, mesh_shape, strict=True)]
    choices = [(*range(len(shape)), WHOLE) if free else (WHOLE,) for free in shared]
    cuts: list[tuple[int, Layout]] = []
    for cut in product(*choices):
        parts = _parts(layout, mesh_shape, cut, len(shape))
        if all(size % n == 0 for size, n in zip(shape, parts, strict=True)):
            cuts.append((prod(parts), cut))
    max_parts = max(num_parts for num_parts, _ in cuts)
    return (cut for num_parts, cut in cuts if num_parts == max_parts)


def _parts(layout: Layout, mesh_shape: Shape, cut: Layout, ndim: int) -> list[int]:
    """The number of cells along each dimension, by the layout and the cut together."""
    major, minor = (grid_parts(x, mesh_shape, ndim) for x in (layout, cut))
    return [a * b for a, b in zip(major, minor, strict=True)]


def _grid(shape: Shape, layout: Layout, mesh_shape: Shape, cut: Layout) -> _Grid:
    ndim = len(shape)
    minor_parts = grid_parts(cut, mesh_shape, ndim)
    holders: dict[Shape, list[int]] = {}
    for device in range(prod(mesh_shape)):
        major = grid_index(layout, mesh_shape, ndim, device)
        minor = grid_index(cut, mesh_shape, ndim, device)
        cell = tuple(a * n + b for a, n, b in zip(major, minor_parts, minor, strict=True))
        holders.setdefault(cell, []).append(device)
    return _Grid(tuple(_parts(layout, mesh_shape, cut, ndim)), holders)


def _tiles(shape: Shape, source: _Grid, target: _Grid) -> list[Tile]:
    """The intersections of two grids, each with a sender and the first of its receivers."""
    overlaps = []
    for overlap in product(*map(_overlaps, shape, source.parts, target.parts)):
        box = tuple((start, stop) for start, stop, _, _ in overlap)
        senders = source.holders[tuple(index for _, _, index, _ in overlap)]
        receivers = target.holders[tuple(index for _, _, _, index in overlap)]
        overlaps.append((box, senders, receivers[0]))
    loads: dict[int, int] = {}
    tiles = []
    for box, senders, receiver in sorted(overlaps, key=lambda overlap: -num_elements(overlap[0])):
        sender = min(senders, key=lambda device: (loads.get(device, 0), device))
        loads[sender] = loads.get(sender, 0) + num_elements(box)
        tiles.append(Tile(sender, receiver, box))
    return sorted(tiles, key=lambda tile: (tile.target, tile.box))


def _overlaps(size: int, parts: int, other_parts: int) -> list[tuple[int, int, int, int]]:
    """(start, stop, part, other part) of each interval between cuts along one dimension."""
    length, other_length = size // parts, size // other_parts
    if size == 0:
        return []
    edges = sorted({*range(0, size, length), *range(0, size, other_length), size})
    return [
        (start, stop, start // length, start // other_length) for start, stop in pairwise(edges)
    ]


def _busiest(tiles: list[Tile]) -> int:
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for tile in tiles:
        sent[tile.source] = sent.get(tile.source, 0) + num_elements(tile.box)
        received[tile.target] = received.get(tile.target, 0) + num_elements(tile.box)
    return max((*sent.values(), *received.values()), default=0)


def _gathers(
    shape: Shape, layout: Layout, mesh_shape: Shape, landing: Layout, grid: _Grid
) -> Iterator[Gather]:
    """A gather for every shard that several devices hold."""
    parts: dict[Box, list[tuple[int, Box]]] = {}
    devices: dict[Box, list[int]] = {}
    for cell, holders in grid.holders.items():
        box = tuple(
            (i * size // n, (i + 1) * size // n)
            for i, size, n in zip(cell, shape, grid.parts, strict=True)
        )
        shard = shard_box(shape, layout, mesh_shape, holders[0])
        parts.setdefault(shard, []).append((holders[0], box))
        devices.setdefault(shard, []).extend(holders)
    for shard, group in devices.items():
        if len(group) > 1:
            yield Gather(tuple(sorted(group)), tuple(sorted(parts[shard])), shard)
