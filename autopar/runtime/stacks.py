"""Stacks over layers that are split over stages: from a stage's rows to one array and back.

Each stage holds its own rows of a stacked parameter. Where the stages are alike (as many rows on
each, in the same layout, on meshes of the same shape), the rows are shards of one `jax.Array` on a
mesh with one more axis, over stages, made of the same buffers: nothing is copied, and users see an
array that they can print, save and compute with. Where they are not, or share devices, the rows are
parts of a `StackedArray`, which is a `DistributedArray` of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import _jax
from autopar.runtime.remote.arrays import DistributedArray, MeshPlace, deleted_error

STAGES = "stages"  # the axis over stages
Rows = tuple[int, int]  # of the first dimension, half-open


@dataclass(frozen=True)
class RowShardings:
    """Where the parts of a `StackedArray` are: the rows of each, in order, and its sharding."""

    rows: tuple[Rows, ...]
    parts: tuple[NamedSharding, ...]

    @property
    def is_fully_addressable(self) -> bool:
        return all(part.is_fully_addressable for part in self.parts)

    @property
    def device_set(self) -> set[Any]:
        return {device for part in self.parts for device in part.device_set}


class StackedArray(DistributedArray):
    """A stack over layers in parts on meshes of this process: a `jax.Array` of rows on each."""

    __slots__ = ("parts", "sharding")

    def __init__(self, parts: Sequence[jax.Array], sharding: RowShardings) -> None:
        first, shape = parts[0], (sharding.rows[-1][1], *parts[0].shape[1:])
        super().__init__(None, shape, first.dtype, first.weak_type, ())
        self.parts = tuple(parts)
        self.sharding = sharding

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def spec(self) -> PartitionSpec:
        return self.sharding.parts[0].spec

    @property
    def meshes(self) -> tuple[MeshPlace, ...]:
        grids = [(part.mesh.axis_names, _grid(part)) for part in self.sharding.parts]
        return tuple(
            MeshPlace(tuple(d.id for d in grid.flat), grid.shape, names) for names, grid in grids
        )

    def is_deleted(self) -> bool:
        return any(part.is_deleted() for part in self.parts)

    def copy(self) -> StackedArray:
        """The same values in other buffers."""
        return StackedArray([jax.numpy.copy(part) for part in self.parts], self.sharding)

    def block_until_ready(self) -> StackedArray:
        jax.block_until_ready(self.parts)
        return self

    def delete(self) -> None:
        for part in self.parts:
            part.delete()

    def _raw(self) -> np.ndarray:
        if self.is_deleted():
            raise deleted_error(self)
        return np.concatenate([np.asarray(part) for part in self.parts])


def stack_sharding(
    rows: Sequence[Rows], parts: Sequence[NamedSharding]
) -> NamedSharding | RowShardings:
    """The sharding of a whole stack, from the rows of its parts, in order, and their shardings."""
    first = parts[0]
    kinds = {(one.mesh.axis_names, _grid(one).shape, one.spec) for one in parts}
    devices = [device for one in parts for device in _grid(one).flat]
    are_even = len({end - start for start, end in rows}) == 1
    if len(kinds) > 1 or len(set(devices)) < len(devices) or not are_even:
        return RowShardings(tuple(rows), tuple(parts))
    mesh = _jax.fresh_mesh(
        np.stack([_grid(one) for one in parts]), (STAGES, *first.mesh.axis_names)
    )
    dim, *rest = (*first.spec, *[None] * (not first.spec))
    inner = () if dim is None else dim if isinstance(dim, tuple) else (dim,)
    return NamedSharding(mesh, PartitionSpec((STAGES, *inner) if inner else STAGES, *rest))


def _grid(sharding: NamedSharding) -> np.ndarray:
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return np.asarray(mesh.devices)


def take_apart(
    stack: jax.Array | StackedArray, parts: Sequence[NamedSharding]
) -> Sequence[jax.Array]:
    """The rows of each stage, of a stack that has the sharding of these parts."""
    if isinstance(stack, StackedArray):
        return stack.parts
    shape = (stack.shape[0] // len(parts), *stack.shape[1:])
    data = {shard.device: shard.data for shard in stack.addressable_shards}
    return [
        jax.make_array_from_single_device_arrays(
            shape, part, [data[device] for device in _grid(part).flat]
        )
        for part in parts
    ]


def put_together(
    parts: Sequence[jax.Array], sharding: NamedSharding | RowShardings
) -> jax.Array | StackedArray:
    """The whole stack, of the rows of each stage, in order."""
    if isinstance(sharding, RowShardings):
        return StackedArray(parts, sharding)
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def put_stack(stack: Any, sharding: Any) -> Any:
    """An array, or a stack in parts, at another place."""
    if isinstance(stack, StackedArray):
        stack = stack.fetch()
    if not isinstance(sharding, RowShardings):
        return jax.device_put(stack, sharding)
    rows = [stack[start:end] for start, end in sharding.rows]
    return StackedArray(jax.device_put(rows, list(sharding.parts)), sharding)
