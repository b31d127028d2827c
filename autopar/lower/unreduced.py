"""Partial sums as data: an array with one addend per rank, in leading dimensions called lanes.

A loop's carry cannot be a partial sum to XLA, which would reduce it in every trip. So where a plan
keeps partial sums through a loop, the reductions that make them run lane by lane: the dimension
they sum over is cut into as many parts as the mesh axis has ranks, the parts become a leading
dimension that the axis splits, and each rank reduces its own part. Summing over that dimension,
after the loop, is the one reduction that is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autopar import _jax
from autopar.ir.program_sharding import UnreducedAxes
from autopar.ir.spec import PARTIAL, WHOLE, Layout

AnyMesh = Mesh | AbstractMesh


def lane_axes(layout: Layout | None) -> tuple[int, ...]:
    """The mesh axes that an array of this layout has lanes for, which are its first dimensions."""
    if layout is None:
        return ()
    return tuple(axis for axis, entry in enumerate(layout) if entry == PARTIAL)


def with_lanes(layout: Layout) -> Layout:
    """The layout of the array with its lanes as dimensions."""
    axes = lane_axes(layout)
    return tuple(
        axes.index(axis) if entry == PARTIAL else entry + len(axes) if entry >= 0 else entry
        for axis, entry in enumerate(layout)
    )


def empty_lanes(array: Any, layout: Layout | None, mesh: AnyMesh) -> Any:
    """Zeros with lanes in the place of a loop's first carry, which is zero; without lanes it is
    left as it is."""
    axes = lane_axes(layout)
    if not axes:
        return array
    sizes = [mesh.axis_sizes[axis] for axis in axes]
    return jnp.zeros((*sizes, *jnp.shape(array)), jnp.result_type(array))


def bind_in_lanes(
    equation: Any, lanes: UnreducedAxes, operands: Sequence[Any], mesh: AnyMesh
) -> list[Any]:
    """Bind an equation once per lane; its results have lanes."""
    if equation.name == "conv_general_dilated":
        return _bind_on_each_rank(equation, lanes, operands, mesh)
    arrays = [
        array if layout is None else _cut(array, layout, lanes.axes, mesh)
        for array, layout in zip(operands, lanes.operands, strict=True)
    ]

    def bind(*arrays: Any) -> list[Any]:
        return _jax.bind(equation.primitive, equation.params, arrays)

    for axis in reversed(lanes.axes):
        has_lanes = [
            0 if layout is not None and layout[axis] != WHOLE else None for layout in lanes.operands
        ]
        bind = jax.vmap(bind, in_axes=has_lanes)
    return bind(*arrays)


def _cut(array: Any, layout: Layout, axes: tuple[int, ...], mesh: AnyMesh) -> Any:
    """Cut the dimensions that lane axes split into lanes, each a leading dimension. Lanes that are
    there already stay."""
    there = len(lane_axes(layout))
    cut_axes = [axis for axis in axes if layout[axis] >= 0]
    if not cut_axes:
        return array
    assert not there, "an operand has lanes along one axis and is cut along another"
    shape: list[int] = []
    lane_at: dict[int, int] = {}
    merged: list[int] = []  # the dimensions that are left, after those of lanes
    for dim, size in enumerate(array.shape):
        splitting = [axis for axis, entry in enumerate(layout) if entry == dim]
        sizes = [mesh.axis_sizes[axis] for axis in splitting]
        for axis, ranks in zip(splitting, sizes, strict=True):
            if axis in cut_axes:
                lane_at[axis] = len(shape)
            shape.append(ranks)
        shape.append(size // prod(sizes))
        kept = [n for axis, n in zip(splitting, sizes, strict=True) if axis not in cut_axes]
        merged.append(prod(kept) * shape[-1])
    first = [lane_at[axis] for axis in cut_axes]
    order = [*first, *(i for i in range(len(shape)) if i not in first)]
    lanes = jnp.transpose(array.reshape(shape), order)
    lanes = lanes.reshape(*(shape[i] for i in first), *merged)
    spec: list[Any] = [mesh.axis_names[axis] for axis in cut_axes]
    for dim in range(len(merged)):
        names = tuple(
            mesh.axis_names[axis]
            for axis, entry in enumerate(layout)
            if entry == dim and axis not in cut_axes
        )
        spec.append(names or None)
    return jax.lax.with_sharding_constraint(
        lanes, jax.sharding.NamedSharding(mesh, PartitionSpec(*spec))
    )


def _bind_on_each_rank(
    equation: Any, lanes: UnreducedAxes, operands: Sequence[Any], mesh: AnyMesh
) -> list[Any]:
    """A convolution over lanes would be a grouped one, which XLA gathers. So each rank of the lane
    axes is given its part by `shard_map`; other axes are left to the partitioner."""
    names = [mesh.axis_names[axis] for axis in lanes.axes]
    specs = []
    for array, layout in zip(operands, lanes.operands, strict=True):
        entries: list[Any] = [None] * jnp.ndim(array)
        for axis in lanes.axes:
            if layout is not None and layout[axis] >= 0:
                entries[layout[axis]] = (*(entries[layout[axis]] or ()), mesh.axis_names[axis])
        specs.append(PartitionSpec(*entries))

    def bind(*arrays: Any) -> list[Any]:
        results = _jax.bind(equation.primitive, equation.params, arrays)
        return [r.reshape((1,) * len(names) + r.shape) for r in results]

    on_ranks = jax.shard_map(
        bind,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=[PartitionSpec(*names)] * len(equation.results),
        axis_names=set(names),
        check_vma=False,
    )
    return on_ranks(*operands)
