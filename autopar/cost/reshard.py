"""Cost of resharding: from a mesh and a tensor to a `ReshardTable` of cheapest step sequences.

Steps, each on one mesh axis (or together on all axes of one dimension, or all partial axes):

    slice            whole → split            free
    all-gather       split → whole
    all-to-all       split by one dimension → split by another
    all-reduce       partial → whole
    reduce-scatter   partial → split

A mesh may forbid reduce-scatters or all-to-alls; the other steps still lead everywhere.

If two axes split one dimension, the later axis is the minor one, and only that one can be added or
removed by itself. Sums that are partial along several axes are finished at once, as XLA does it:
one reduce-scatter if a single dimension takes all these axes, a reduce-scatter along one axis and
an all-reduce along the others if those stay whole, else an all-reduce. (So two axes that should
split two dimensions scatter onto one and move one axis by an all-to-all: half of an all-reduce.)

Nor does XLA gather or exchange tiles of a sum before it is finished: it would reshard the operands.

Closing the table under composition (Floyd–Warshall) gives the cheapest sequence for every pair.
Collectives that leave a sum partial are added last: only a later operator finishes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import PARTIAL, WHOLE, Layout, all_layouts, num_shards

# The share of α that a collective pays when XLA merges it with others of its kind.
DEFERRED_ALPHA_SHARE = 0.25


@dataclass(frozen=True, eq=False)
class ReshardTable:
    """All layouts of one tensor on one mesh and the cost between any two."""

    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    cost_s: np.ndarray
    first_step: np.ndarray  # layout after the first step of the cheapest sequence

    def cost(self, source: Layout, target: Layout) -> float:
        return float(self.cost_s[self.index[source], self.index[target]])

    def path(self, source: Layout, target: Layout) -> list[Layout]:
        """Layouts after each step of the cheapest sequence, the target last."""
        here, goal = self.index[source], self.index[target]
        steps = []
        while here != goal:
            after = int(self.first_step[here, goal])
            steps += _collectives_of(self.layouts[here], self.layouts[after])
            here = after
        return steps


@lru_cache(maxsize=4096)
def reshard_table(
    mesh: LogicalMesh,
    shape: tuple[int, ...],
    num_bytes: float,
    with_partial: bool = False,
    alpha_share: float = 1.0,
) -> ReshardTable:
    layouts = tuple(all_layouts(shape, mesh.shape, with_partial=with_partial))
    index = {layout: i for i, layout in enumerate(layouts)}
    count = len(layouts)
    cost = np.full((count, count), np.inf)
    np.fill_diagonal(cost, 0.0)
    first = np.tile(np.arange(count), (count, 1))
    last: list[tuple[int, int, float]] = []
    for i, layout in enumerate(layouts):
        for step in _steps(mesh, layout, num_bytes, alpha_share, len(shape)):
            j = index.get(step.target)
            if j is None:
                continue
            if step.leaves_partial:
                last.append((i, j, step.seconds))
            else:
                cost[i, j] = min(cost[i, j], step.seconds)
    # Rounding must not count as an improvement, nor may a real one be missed: either way `path`
    # could loop. So the tolerance is far below the cheapest step.
    positive = cost[np.isfinite(cost) & (cost > 0)]
    tolerance = 1e-9 * float(positive.min()) if positive.size else 0.0
    for k in range(count):
        through = cost[:, k, None] + cost[None, k, :]
        better = through < cost - tolerance
        cost = np.where(better, through, cost)
        first = np.where(better, first[:, k, None], first)
    for i, j, seconds in last:
        cost[i, j] = min(cost[i, j], seconds)
    return ReshardTable(layouts, index, cost, first)


def _collectives_of(before: Layout, after: Layout) -> list[Layout]:
    """Layouts after each collective of a step: of partial sums that become split along some axes
    and whole along others, the scattered axes come first."""
    changed = [axis for axis, (b, a) in enumerate(zip(before, after, strict=True)) if b != a]
    scattered = [axis for axis in changed if before[axis] == PARTIAL and after[axis] != WHOLE]
    if not scattered or scattered == changed:
        return [after]
    return [tuple(after[a] if a in scattered else e for a, e in enumerate(before)), after]


def _partial_axes(mesh: LogicalMesh, layout: Layout) -> tuple[int, ...]:
    return tuple(a for a, e in enumerate(layout) if e == PARTIAL and mesh.shape[a] > 1)


def _moved(layout: Layout, axes: Sequence[int], entry: int) -> Layout:
    return tuple(entry if a in axes else e for a, e in enumerate(layout))


def _is_minor(layout: Layout, axis: int, dim: int) -> bool:
    return not any(e == dim for e in layout[axis + 1 :])


class _ReshardStep(NamedTuple):
    target: Layout
    seconds: float
    leaves_partial: bool = False  # a collective after which a sum is still partial


def _steps(
    mesh: LogicalMesh, layout: Layout, num_bytes: float, share: float, ndim: int
) -> list[_ReshardStep]:
    partial = _partial_axes(mesh, layout)
    steps: list[_ReshardStep] = []
    for axis, entry in enumerate(layout):
        if mesh.shape[axis] == 1 or entry == PARTIAL:
            continue
        free_dims = [d for d in range(ndim) if d != entry and _is_minor(layout, axis, d)]
        if entry == WHOLE:
            steps += [_ReshardStep(_moved(layout, (axis,), d), 0.0) for d in free_dims]
        elif _is_minor(layout, axis, entry):
            steps += _gathers(mesh, layout, (axis,), num_bytes, share, free_dims)
    for entry in set(layout) - {WHOLE, PARTIAL}:
        axes = tuple(a for a, e in enumerate(layout) if e == entry and mesh.shape[a] > 1)
        if len(axes) > 1:
            dims = [d for d in range(ndim) if d != entry]
            steps += _gathers(mesh, layout, axes, num_bytes, share, dims)
    if partial:
        steps += _sums(mesh, layout, partial, num_bytes, share, ndim)
    if len(partial) > 1:
        for axis in partial:
            steps += _sums(mesh, layout, (axis,), num_bytes, share, ndim)
    return steps


def _gathers(
    mesh: LogicalMesh,
    layout: Layout,
    axes: tuple[int, ...],
    num_bytes: float,
    share: float,
    dims: Sequence[int],
) -> list[_ReshardStep]:
    """The axes no longer split their dimension: to whole, or to another of `dims`."""
    is_partial = bool(_partial_axes(mesh, layout))
    whole = _moved(layout, axes, WHOLE)
    whole_bytes = num_bytes / num_shards(whole, mesh.shape)
    steps = [_ReshardStep(whole, all_gather_s(mesh, axes, whole_bytes, share), is_partial)]
    if "all-to-all" not in mesh.forbidden:
        seconds = all_to_all_s(mesh, axes, whole_bytes, share)
        steps += [_ReshardStep(_moved(layout, axes, d), seconds, is_partial) for d in dims]
    return steps


def _sums(
    mesh: LogicalMesh,
    layout: Layout,
    axes: tuple[int, ...],
    num_bytes: float,
    share: float,
    ndim: int,
) -> list[_ReshardStep]:
    """The sum over these axes is finished: to whole, or to split along all or one of them."""
    leaves_partial = axes != _partial_axes(mesh, layout)
    local = num_bytes / num_shards(layout, mesh.shape)
    all_whole = _moved(layout, axes, WHOLE)
    steps = [_ReshardStep(all_whole, all_reduce_s(mesh, axes, local, share), leaves_partial)]
    if "reduce-scatter" in mesh.forbidden:
        return steps
    for scattered in {axes, *((axis,) for axis in axes)}:
        others = tuple(axis for axis in axes if axis not in scattered)
        seconds = reduce_scatter_s(mesh, scattered, local, share)
        if others:
            num_left = num_shards(_moved(layout, scattered, 0), mesh.shape)
            seconds += all_reduce_s(mesh, others, num_bytes / num_left, share)
        steps += [
            _ReshardStep(_moved(all_whole, scattered, d), seconds, leaves_partial)
            for d in range(ndim)
            if all(_is_minor(layout, axis, d) for axis in scattered)
        ]
    return steps
