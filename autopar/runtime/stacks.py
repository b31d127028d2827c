"""Stacks over layers that are split over stages: from a stage's rows to one `jax.Array` and back.

Each stage holds its own rows of a stacked parameter, in the same layout on a mesh of the same
shape. Put together they are an array on a mesh with one more axis, over stages, made of the same
buffers: nothing is copied, and users see one array that they can print, save and compute with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autopar import _jax

STAGES = "stages"  # the axis over stages


def stacked_sharding(parts: Sequence[NamedSharding]) -> NamedSharding:
    """The sharding of a whole stack, from those of its parts in the order of their rows."""
    first = parts[0]
    same = {(one.mesh.axis_names, _grid(one).shape, one.spec) for one in parts}
    assert len(same) == 1, f"parts of a stack with different layouts: {same}"
    devices = np.stack([_grid(one) for one in parts])
    mesh = _jax.fresh_mesh(devices, (STAGES, *first.mesh.axis_names))
    rows, *rest = (*first.spec, *[None] * (not first.spec))
    inner = () if rows is None else rows if isinstance(rows, tuple) else (rows,)
    return NamedSharding(mesh, PartitionSpec((STAGES, *inner) if inner else STAGES, *rest))


def _grid(sharding: NamedSharding) -> np.ndarray:
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    return np.asarray(mesh.devices)


def take_apart(stack: jax.Array, parts: Sequence[NamedSharding]) -> list[jax.Array]:
    """The rows of each stage, of an array that has the sharding of a whole stack."""
    shape = (stack.shape[0] // len(parts), *stack.shape[1:])
    data = {shard.device: shard.data for shard in stack.addressable_shards}
    return [
        jax.make_array_from_single_device_arrays(
            shape, part, [data[device] for device in _grid(part).flat]
        )
        for part in parts
    ]


def put_together(
    parts: Sequence[jax.Array], shape: tuple[int, ...], sharding: NamedSharding
) -> Any:
    """The whole stack, of the rows of each stage."""
    shards = [shard.data for part in parts for shard in part.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)
