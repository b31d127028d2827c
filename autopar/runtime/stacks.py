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
from autopar.ir.rows import Rows, join_rows, rows_grid, take_rows
from autopar.runtime.remote.arrays import DistributedArray, MeshPlace, deleted_error

STAGES = "stages"  # the axis over stages; of a scan of scans `stages_1` is the second


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
        first, shape = parts[0], _whole_shape(parts[0].shape, sharding.rows)
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
        arrays = [np.asarray(part) for part in self.parts]
        return join_rows(arrays, self.sharding.rows, np.concatenate)


def stack_sharding(
    rows: Sequence[Rows], parts: Sequence[NamedSharding]
) -> NamedSharding | RowShardings:
    """The sharding of a whole stack, from the rows of its parts, in order, and their shardings."""
    first = parts[0]
    kinds = {(one.mesh.axis_names, _grid(one).shape, one.spec) for one in parts}
    devices = [device for one in parts for device in _grid(one).flat]
    counts = rows_grid(rows)
    if len(kinds) > 1 or len(set(devices)) < len(devices) or counts is None:
        return RowShardings(tuple(rows), tuple(parts))
    names = (STAGES, *(f"{STAGES}_{dim}" for dim in range(1, len(counts))))
    grid = np.stack([_grid(one) for one in parts])
    grid = grid.reshape(*counts, *grid.shape[1:])
    mesh = _jax.fresh_mesh(grid, (*names, *first.mesh.axis_names))
    spec = (*first.spec, *[None] * (len(counts) - len(first.spec)))
    split = [_with_axis(name, dim) for name, dim in zip(names, spec, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*split, *spec[len(counts) :]))


def _with_axis(name: str, dim: str | tuple[str, ...] | None) -> str | tuple[str, ...]:
    """A dimension that is split over another axis first."""
    inner = () if dim is None else dim if isinstance(dim, tuple) else (dim,)
    return (name, *inner) if inner else name


def _whole_shape(part: Sequence[int], rows: Sequence[Rows]) -> tuple[int, ...]:
    """The shape of a stack, of the shape of one of its parts and the rows of all."""
    last = rows[-1]
    return (*(end for _, end in last), *part[len(last) :])


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
    counts = _parts_by_dim(stack.sharding)
    split = zip(stack.shape, counts, strict=False)
    shape = (*(size // count for size, count in split), *stack.shape[len(counts) :])
    data = {shard.device: shard.data for shard in stack.addressable_shards}
    return [
        jax.make_array_from_single_device_arrays(
            shape, part, [data[device] for device in _grid(part).flat]
        )
        for part in parts
    ]


def _parts_by_dim(sharding: Any) -> tuple[int, ...]:
    """How many stages there are along each leading dimension."""
    mesh = sharding.mesh
    return tuple(mesh.shape[name] for name in mesh.axis_names if name.startswith(STAGES))


def put_together(
    parts: Sequence[jax.Array], sharding: NamedSharding | RowShardings
) -> jax.Array | StackedArray:
    """The whole stack, of the rows of each stage, in order."""
    if isinstance(sharding, RowShardings):
        return StackedArray(parts, sharding)
    counts, own = _parts_by_dim(sharding), parts[0].shape
    split = zip(own, counts, strict=False)
    shape = (*(size * count for size, count in split), *own[len(counts) :])
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def put_stack(stack: Any, sharding: Any) -> Any:
    """An array, or a stack in parts, at another place."""
    if isinstance(stack, StackedArray):
        stack = stack.fetch()
    if not isinstance(sharding, RowShardings):
        return jax.device_put(stack, sharding)
    rows = [take_rows(stack, one) for one in sharding.rows]
    return StackedArray(jax.device_put(rows, list(sharding.parts)), sharding)
