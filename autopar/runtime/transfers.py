"""Transfers between meshes of this process: from shardings and tile plans to functions on arrays.

`jax.device_put` copies shard by shard if the source holds every shard that the target wants.
Otherwise it takes the array through the host and waits for it. A `TilePlan` is better then:
`send_tiles` follows it by slices and copies between devices, and waits for nothing. On virtual CPU
devices everything is in the host's memory, so `device_put` is better there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autopar import _jax
from autopar.ir.spec import WHOLE
from autopar.ir.tiles import Box, Tile, TilePlan, shard_box, slices, within
from autopar.runtime.threads import must_run_alone, run_alone

Sender = Callable[[list[Any]], Sequence[Any]]


def transfer_function(
    sources: Sequence[jax.ShapeDtypeStruct],
    targets: Sequence[jax.ShapeDtypeStruct],
    tile_plans: Sequence[TilePlan | None],
) -> Sender:
    """A function that takes arrays from their source to their target shardings, in new buffers.
    Arrays that can be copied by one call are copied together."""
    copied, put = [], []
    senders: list[tuple[list[int], Sender]] = []
    for i, (aval, wanted, plan) in enumerate(zip(sources, targets, tile_plans, strict=True)):
        assert (aval.shape, aval.dtype) == (wanted.shape, wanted.dtype), (aval, wanted)
        source, target = aval.sharding, wanted.sharding
        assert isinstance(source, NamedSharding) and isinstance(target, NamedSharding)
        if source.device_set == target.device_set:
            senders.append(([i], _each(copier(target))))
        elif _jax.is_extended_dtype(aval.dtype):
            put.append(i)
        elif _indices(aval.shape, source) == _indices(aval.shape, target):
            copied.append(i)
        elif plan is None or set(_indices(aval.shape, target)) <= set(_indices(aval.shape, source)):
            put.append(i)
        else:
            senders.append(([i], _each(send_tiles(plan, target))))
    if copied:
        senders.append((copied, _jax.shard_copier([targets[i].sharding for i in copied])))
    if put:
        places = [targets[i].sharding for i in put]
        senders.append((put, lambda arrays: jax.device_put(arrays, places)))
    if len(senders) == 1:
        return senders[0][1]

    def send(arrays: list[Any]) -> list[Any]:
        sent: list[Any] = [None] * len(arrays)
        for numbers, sender in senders:
            for i, array in zip(numbers, sender([arrays[i] for i in numbers]), strict=True):
                sent[i] = array
        return sent

    return send


def _each(function: Callable[[Any], Any]) -> Sender:
    return lambda arrays: [function(array) for array in arrays]


def _indices(shape: tuple[int, ...], sharding: NamedSharding) -> list[Box]:
    """Per device of a sharding, the shard that it holds."""
    return [
        tuple(dim_slice.indices(size)[:2] for dim_slice, size in zip(index, shape, strict=True))
        for index in map(tuple, sharding.devices_indices_map(shape).values())
    ]


def send_tiles(plan: TilePlan, target: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """A function that takes an array to the target's mesh as planned."""
    sender = _TileSender(plan, target)
    return alone_on(target.mesh, sender.send) if runs_alone(target) else sender.send


def alone_on(
    mesh: Mesh | AbstractMesh, function: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array], jax.Array]:
    assert isinstance(mesh, Mesh)
    devices = list(mesh.devices.flat)
    return lambda array: run_alone(lambda one: [function(one)], [array], devices)[0]


class _TileSender:
    """All that is known before the array exists: cuts, devices, and how tiles are joined."""

    def __init__(self, plan: TilePlan, target: NamedSharding) -> None:
        self.plan = plan
        self.target = target
        self.devices = _devices(target)
        self.landed = landed_sharding(plan, target)
        # One program cuts all the tiles that a device sends.
        self.senders: dict[int, list[tuple[int, Tile]]] = {}
        by_receiver: dict[int, list[int]] = {}
        for number, tile in enumerate(plan.tiles):
            self.senders.setdefault(tile.source, []).append((number, tile))
            by_receiver.setdefault(tile.target, []).append(number)
        self.cutters = {
            source: cutter(tuple(within(tile.box, source_box(plan, source)) for _, tile in tiles))
            for source, tiles in self.senders.items()
        }
        self.joiners = {
            receiver: (numbers, joiner(tuple(plan.tiles[n].box for n in numbers)))
            for receiver, numbers in by_receiver.items()
        }
        self.copies = copied_from(plan)
        self.to_devices = [self.devices[tile.target] for tile in plan.tiles]

    def send(self, array: jax.Array) -> jax.Array:
        shards_in = _shards_in_order(array)
        cut: list[Any] = [None] * len(self.plan.tiles)
        for source, tiles in self.senders.items():
            for (number, _), data in zip(
                tiles, self.cutters[source](shards_in[source]), strict=True
            ):
                cut[number] = data
        received = jax.device_put(cut, self.to_devices)
        shards_out: list[Any] = [None] * len(self.devices)
        for receiver, (numbers, join) in self.joiners.items():
            shards_out[receiver] = join([received[n] for n in numbers])
        if self.copies:
            sources = [shards_out[source] for _, source in self.copies]
            places = [self.devices[device] for device, _ in self.copies]
            for (device, _), copy in zip(self.copies, jax.device_put(sources, places), strict=True):
                shards_out[device] = copy
        landed = jax.make_array_from_single_device_arrays(
            array.shape, self.landed, shards_out, dtype=array.dtype
        )
        return gatherer(self.target)(landed) if self.landed != self.target else landed


def source_box(plan: TilePlan, source: int) -> Box:
    return shard_box(plan.shape, plan.source_layout, plan.source_mesh, source)


def _devices(sharding: NamedSharding) -> list[Any]:
    return list(np.asarray(sharding.mesh.devices).flat)


def _shards_in_order(array: jax.Array) -> list[jax.Array]:
    """An array's shards in the order of its mesh."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [by_device[device] for device in _devices(sharding)]


def landed_sharding(plan: TilePlan, target: NamedSharding) -> NamedSharding:
    """The sharding before shards are gathered. Its cuts are minor to those of the layout, so the
    names in an entry may be out of mesh order."""
    names = target.mesh.axis_names
    entries = []
    for dim in range(len(plan.shape)):
        kept = [n for n, entry in zip(names, plan.target_layout, strict=True) if entry == dim]
        cut = [n for n, entry in zip(names, plan.landing, strict=True) if entry == dim]
        entries.append((*kept, *cut) or None)
    if all(entry == WHOLE for entry in plan.landing):
        return target
    return NamedSharding(target.mesh, PartitionSpec(*entries))


def copied_from(plan: TilePlan) -> list[tuple[int, int]]:
    """Pairs of (device that receives no tile, device whose shard it gets a copy of)."""
    grid = np.arange(np.prod(plan.target_mesh)).reshape(plan.target_mesh)
    for axis, (cut, target) in enumerate(zip(plan.landing, plan.target_layout, strict=True)):
        if cut == target == WHOLE:
            grid = np.repeat(grid.take([0], axis), plan.target_mesh[axis], axis)
    return [(device, int(source)) for device, source in enumerate(grid.flat) if device != source]


@lru_cache(maxsize=4096)
def cutter(boxes: tuple[Box, ...]) -> Callable[[jax.Array], Sequence[jax.Array]]:
    def cut(shard: jax.Array) -> list[jax.Array]:
        return [shard[slices(box)] for box in boxes]

    return jax.jit(cut)


@lru_cache(maxsize=4096)
def joiner(boxes: tuple[Box, ...]) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Joins tiles that form a grid."""
    if len(boxes) == 1:
        return lambda tiles: tiles[0]
    return jax.jit(partial(_join, boxes))


def _join(boxes: tuple[Box, ...], tiles: Sequence[jax.Array]) -> jax.Array:
    blocks = dict(zip(boxes, tiles, strict=True))
    for dim in reversed(range(tiles[0].ndim)):
        rows: dict[Box, list[tuple[int, Box]]] = {}
        for box in blocks:
            rows.setdefault((*box[:dim], *box[dim + 1 :]), []).append((box[dim][0], box))
        joined = {}
        for row in rows.values():
            ordered = [box for _, box in sorted(row)]
            whole = list(ordered[0])
            whole[dim] = (ordered[0][dim][0], ordered[-1][dim][1])
            joined[tuple(whole)] = (
                jnp.concatenate([blocks[box] for box in ordered], axis=dim)
                if len(ordered) > 1
                else blocks[ordered[0]]
            )
        blocks = joined
    (whole,) = blocks.values()
    return whole


@lru_cache(maxsize=4096)
def copier(target: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """For stages that share a mesh: copies an array into the other stage's sharding, always into a
    new buffer."""
    copy = jax.jit(jnp.copy, out_shardings=target)
    return alone_on(target.mesh, copy) if runs_alone(target) else copy


def runs_alone(target: NamedSharding) -> bool:
    return isinstance(target.mesh, Mesh) and must_run_alone(target.mesh)


@lru_cache(maxsize=4096)
def gatherer(target: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda array: array, out_shardings=target)
