"""How an array moves from one mesh to another, as data: `TilePlan`.

Devices are numbered by their position in their own mesh, row by row. *Tiles* go from a device of
the source mesh to one of the target mesh. Where several target devices need the same shard, each
receives a part of it, and a *gather* among them completes it, so that it crosses the link once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.spec import WHOLE, Layout

Box = tuple[tuple[int, int], ...]  # a half-open range of indices per dimension


@dataclass(frozen=True)
class Tile:
    """What one source device sends to one target device; `box` is a box of the whole array."""

    source: int
    target: int
    box: Box


@dataclass(frozen=True)
class Gather:
    """Devices of the target mesh that all need the shard `box`, and which part each received."""

    devices: tuple[int, ...]
    parts: tuple[tuple[int, Box], ...]
    box: Box


@dataclass(frozen=True)
class TilePlan:
    """The transfer of an array from a layout on one mesh to a layout on another.

    landing: per axis of the target mesh, the dimension along which devices that share a shard
             divide it. These cuts are minor to those of the target layout. `WHOLE` for axes that
             split the array themselves, and for axes along which nothing can be cut: there the
             first device receives the shard and the others copy it.
    """

    shape: tuple[int, ...]
    itemsize: int
    source_mesh: tuple[int, ...]
    source_layout: Layout
    target_mesh: tuple[int, ...]
    target_layout: Layout
    landing: Layout
    tiles: tuple[Tile, ...]
    gathers: tuple[Gather, ...]

    @property
    def link_bytes(self) -> int:
        """Bytes sent from mesh to mesh."""
        return self.itemsize * sum(num_elements(tile.box) for tile in self.tiles)

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that must be sent: the target mesh needs every element at least once."""
        return self.itemsize * prod(self.shape)

    @property
    def max_sender_bytes(self) -> int:
        return self.itemsize * _busiest([(t.source, t.box) for t in self.tiles])

    @property
    def max_receiver_bytes(self) -> int:
        return self.itemsize * _busiest([(t.target, t.box) for t in self.tiles])

    @property
    def gathered_bytes(self) -> int:
        """Bytes that target devices get from each other."""
        total = 0
        for gather in self.gathers:
            received = dict(gather.parts)
            for device in gather.devices:
                num_received = num_elements(received[device]) if device in received else 0
                total += num_elements(gather.box) - num_received
        return self.itemsize * total


def num_elements(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def grid_index(layout: Layout, mesh_shape: Sequence[int], ndim: int, device: int) -> list[int]:
    """The index of a device's part along each dimension of a layout."""
    index = [0] * ndim
    for entry, size, position in zip(
        layout, mesh_shape, _position(mesh_shape, device), strict=True
    ):
        if entry != WHOLE:
            index[entry] = index[entry] * size + position
    return index


def grid_parts(layout: Layout, mesh_shape: Sequence[int], ndim: int) -> list[int]:
    """Into how many parts a layout cuts each dimension."""
    parts = [1] * ndim
    for entry, size in zip(layout, mesh_shape, strict=True):
        if entry != WHOLE:
            parts[entry] *= size
    return parts


def shard_box(shape: Sequence[int], layout: Layout, mesh_shape: Sequence[int], device: int) -> Box:
    """The box of an array that a device holds."""
    parts = grid_parts(layout, mesh_shape, len(shape))
    index = grid_index(layout, mesh_shape, len(shape), device)
    return tuple(
        (i * size // n, (i + 1) * size // n) for size, n, i in zip(shape, parts, index, strict=True)
    )


def within(box: Box, outer: Box) -> Box:
    """A box relative to the start of an outer box."""
    return tuple((a - o, b - o) for (a, b), (o, _) in zip(box, outer, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def check_tile_plan(plan: TilePlan) -> None:
    """AssertionError if a device sends a tile that it does not hold, or if an element of a target
    device's shard is never written, or written twice."""
    received: dict[int, list[Box]] = {}
    for tile in plan.tiles:
        held = shard_box(plan.shape, plan.source_layout, plan.source_mesh, tile.source)
        _require(_contains(held, tile.box), f"{tile} is not held by its source, which has {held}")
        received.setdefault(tile.target, []).append(tile.box)
    for target, boxes in received.items():
        _require(_disjoint(boxes), f"device {target} receives elements twice: {boxes}")
    gathered: dict[int, Gather] = {}
    for gather in plan.gathers:
        _require(_fills([box for _, box in gather.parts], gather.box), f"{gather} has gaps")
        for device, box in gather.parts:
            _require(_fills(received.get(device, []), box), f"{device} has not received {box}")
        for device in gather.devices:
            _require(device not in gathered, f"device {device} is in two gathers")
            gathered[device] = gather
    for device in range(prod(plan.target_mesh)):
        wanted = shard_box(plan.shape, plan.target_layout, plan.target_mesh, device)
        if device in gathered:
            _require(gathered[device].box == wanted, f"device {device} gathers another shard")
        else:
            _require(_fills(received.get(device, []), wanted), f"{device} lacks part of {wanted}")


def _position(mesh_shape: Sequence[int], device: int) -> list[int]:
    position = []
    for size in reversed(mesh_shape):
        device, coordinate = divmod(device, size)
        position.append(coordinate)
    return position[::-1]


def _busiest(work: list[tuple[int, Box]]) -> int:
    loads: dict[int, int] = {}
    for device, box in work:
        loads[device] = loads.get(device, 0) + num_elements(box)
    return max(loads.values(), default=0)


def _contains(outer: Box, inner: Box) -> bool:
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def _disjoint(boxes: Sequence[Box]) -> bool:
    def meet(one: Box, other: Box) -> bool:
        return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))

    return not any(meet(one, other) for i, one in enumerate(boxes) for other in boxes[:i])


def _fills(boxes: Sequence[Box], whole: Box) -> bool:
    return (
        all(_contains(whole, box) for box in boxes)
        and sum(map(num_elements, boxes)) == num_elements(whole)
        and _disjoint(boxes)
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"tile plan: {message}")


def shifted(box: Box, first_row: Sequence[int]) -> Box:
    """The box in an array of which its own begins there, per leading dimension."""
    moved = zip(box, first_row, strict=False)
    return (*((start + by, end + by) for (start, end), by in moved), *box[len(first_row) :])
