"""Partial sums as data: arrays with one addend per rank, in leading dimensions called *lanes*.

XLA cannot carry a partial sum through a loop: it would reduce it in every trip. So if a plan keeps
partial sums through a loop, the reductions that make them run lane by lane: the dimension that they
sum over is cut into as many shards as the mesh axis has ranks, the shards become a leading
dimension that the axis splits, and each rank reduces its own shard. The sum over that dimension,
after the loop, is the only reduction left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autopar import _jax
from autopar.ir.program import Equation
from autopar.ir.program_sharding import UnreducedAxes
from autopar.ir.spec import PARTIAL, WHOLE, Layout
from autopar.tracer.halo import Window, windows

AnyMesh = Mesh | AbstractMesh


def partial_axes(layout: Layout | None) -> tuple[int, ...]:
    """The mesh axes along which a layout is partial; its array has a leading lane for each."""
    if layout is None:
        return ()
    return tuple(axis for axis, entry in enumerate(layout) if entry == PARTIAL)


def unreduced_layout(layout: Layout) -> Layout:
    """The layout of the array with its lanes as leading dimensions."""
    axes = partial_axes(layout)
    return tuple(
        axes.index(axis) if entry == PARTIAL else entry + len(axes) if entry >= 0 else entry
        for axis, entry in enumerate(layout)
    )


def unreduced_zeros(array: Any, layout: Layout | None, mesh: AnyMesh) -> Any:
    """Zeros with lanes for a loop's initial carry, which is zero; the carry itself if its layout
    has no lanes."""
    axes = partial_axes(layout)
    if not axes:
        return array
    sizes = [mesh.axis_sizes[axis] for axis in axes]
    return jnp.zeros((*sizes, *jnp.shape(array)), jnp.result_type(array))


def bind_unreduced(
    equation: Equation, lanes: UnreducedAxes, operands: Sequence[Any], mesh: AnyMesh
) -> list[Any]:
    """Bind an equation lane by lane; its results have lanes."""
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
    """Cut the dimensions that lane axes split into lanes, each a leading dimension. Existing lanes
    stay."""
    cut_axes = [axis for axis in axes if layout[axis] >= 0]
    if not cut_axes:
        return array
    assert not partial_axes(layout), "an operand has lanes along one axis and is cut along another"
    shape: list[int] = []
    lane_at: dict[int, int] = {}
    merged: list[int] = []  # the dimensions after those of lanes
    for dim, size in enumerate(array.shape):
        splitting = [axis for axis, entry in enumerate(layout) if entry == dim]
        sizes = [mesh.axis_sizes[axis] for axis in splitting]
        for axis, ranks in zip(splitting, sizes, strict=True):
            if axis in cut_axes:
                lane_at[axis] = len(shape)
            shape.append(ranks)
        shape.append(size // prod(sizes))
        uncut = [n for axis, n in zip(splitting, sizes, strict=True) if axis not in cut_axes]
        merged.append(prod(uncut) * shape[-1])
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
    equation: Equation, lanes: UnreducedAxes, operands: Sequence[Any], mesh: AnyMesh
) -> list[Any]:
    """Bind a convolution on each rank of the lane axes by `shard_map`, leaving other axes to the
    partitioner: a convolution over lanes would be a grouped one, which XLA gathers. Where windows
    are split, as in the gradient of a kernel, a rank has the rows of its neighbours that they
    reach."""
    names = [mesh.axis_names[axis] for axis in lanes.axes]
    specs = []
    for array, layout in zip(operands, lanes.operands, strict=True):
        entries: list[Any] = [None] * jnp.ndim(array)
        for axis in lanes.axes:
            if layout is not None and layout[axis] >= 0:
                entries[layout[axis]] = (*(entries[layout[axis]] or ()), mesh.axis_names[axis])
        specs.append(PartitionSpec(*entries))

    found = windows(equation, operands, jax.eval_shape(partial(_bound, equation), *operands)[0])
    split = [(n, window) for n, window in enumerate(found) if specs[0][window.dim] is not None]

    def bind(*arrays: Any) -> list[Any]:
        first, *others = arrays
        padding = list(equation.params["padding"])
        for number, window in split:
            axes = specs[0][window.dim]
            ranks = prod(mesh.shape[axis] for axis in axes)
            first = _with_neighbours(first, window, axes, ranks)
            padding[number] = window.padding_of_shard
        results = _bound(equation, first, *others, padding=tuple(padding))
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


def _bound(equation: Equation, *operands: Any, **params: Any) -> list[Any]:
    return _jax.bind(equation.primitive, {**equation.params, **params}, operands)


def _with_neighbours(shard: Any, window: Window, axes: tuple[str, ...], ranks: int) -> Any:
    """The shard between the rows that the window reads of others; zeros beyond the array,
    where no rank sends any."""
    length = shard.shape[window.dim]
    parts = [shard]
    for is_after, rows in enumerate(window.rows_of_sum):
        for away in range(1, -(-rows // length) + 1):
            near = min(length, rows - (away - 1) * length)
            start = 0 if is_after else length - near
            part = jax.lax.slice_in_dim(shard, start, start + near, axis=window.dim)
            ends = [(i, i - away) if is_after else (i - away, i) for i in range(away, ranks)]
            part = jax.lax.ppermute(part, axes, ends)
            parts = [*parts, part] if is_after else [part, *parts]
    return jnp.concatenate(parts, window.dim)
