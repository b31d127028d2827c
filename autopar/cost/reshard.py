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

NCCL scatters what is contiguous. A gradient that is scattered along a dimension but the first comes
with that dimension in front, and the update of the state, which keeps its own order, reads it
transposed. XLA makes two kernels of such an update, and the second reads two arrays of the state
again (on an H200, Adam takes 1.2 to 1.45 times as long). `value_table` has that in its prices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from autopar.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from autopar.ir.graph import Value
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import PARTIAL, WHOLE, Layout, all_layouts, num_shards

# XLA merges collectives of one kind that are off the critical path until they carry so many bytes,
# and tens of small ones become one. On CPUs it merges only all-reduces.
_MERGED_BYTES = 30 * 2**20
_LEAST_SHARE = 1 / 64
_SHARE_ON_CPUS = 0.25
_READ_AGAIN = 8.0  # bytes of state per element whose gradient is read transposed


def deferred_alpha_share(mesh: LogicalMesh, num_bytes: float) -> float:
    """The share of α that a collective of such a tensor pays where XLA merges it with others."""
    if mesh.device is None:
        return 1.0
    if not mesh.device.hides_collectives:
        return _SHARE_ON_CPUS
    return min(1.0, max(_LEAST_SHARE, num_bytes / _MERGED_BYTES))


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
    layouts = _layouts(shape, mesh.shape, with_partial)
    steps = _all_steps(mesh.shape, mesh.forbidden, layouts, len(shape))
    count = len(layouts)
    cost = np.full((count, count), np.inf)
    np.fill_diagonal(cost, 0.0)
    first = np.tile(np.arange(count), (count, 1))
    each_s = [
        seconds_of(mesh, axes, num_bytes / num_shards, alpha_share)
        for seconds_of, axes, num_shards in steps.collectives
    ]
    seconds = np.array([0.0, *each_s])[steps.made_of].sum(axis=1)
    is_last = steps.leave_partial
    np.minimum.at(cost, (steps.sources[~is_last], steps.targets[~is_last]), seconds[~is_last])
    # Rounding must not count as an improvement, nor may a real one be missed: either way `path`
    # could loop. So the tolerance is far below the cheapest step.
    positive = cost[np.isfinite(cost) & (cost > 0)]
    tolerance = 1e-9 * float(positive.min()) if positive.size else 0.0
    for k in range(count):
        through = cost[:, k, None] + cost[None, k, :]
        better = through < cost - tolerance
        if better.any():
            cost = np.where(better, through, cost)
            first = np.where(better, first[:, k, None], first)
    np.minimum.at(cost, (steps.sources[is_last], steps.targets[is_last]), seconds[is_last])
    return ReshardTable(layouts, steps.index, cost, first)


def value_table(
    mesh: LogicalMesh, value: Value, with_partial: bool, deferred: bool | None = None
) -> ReshardTable:
    """The table of a value of a step. `deferred`: where that is not as the value says."""
    size = mesh, value.shape, float(value.num_bytes), with_partial
    if not (value.deferred if deferred is None else deferred):
        return reshard_table(*size)
    share = deferred_alpha_share(mesh, value.num_bytes)
    if not with_partial or mesh.device is None or not mesh.device.hides_collectives:
        return reshard_table(*size, share)
    return _gradient_table(*size[:3], share, value.order or tuple(range(len(value.shape))))


@lru_cache(maxsize=4096)
def _gradient_table(
    mesh: LogicalMesh,
    shape: tuple[int, ...],
    num_bytes: float,
    alpha_share: float,
    order: tuple[int, ...],
) -> ReshardTable:
    """`order`: the positions that the dimensions of the state have in its gradient."""
    assert mesh.device is not None
    table = reshard_table(mesh, shape, num_bytes, True, alpha_share)
    axes = [axis for axis, ways in enumerate(mesh.shape) if ways > 1]
    unfinished = np.array([[layout[a] == PARTIAL for a in axes] for layout in table.layouts])
    behind = np.array(
        [
            [_is_behind(shape, order, mesh.shape, layout, a) for a in axes]
            for layout in table.layouts
        ]
    )
    transposed = unfinished.astype(int) @ behind.astype(int).T > 0
    shards = np.array([num_shards(layout, mesh.shape) for layout in table.layouts])
    read_again_s = _READ_AGAIN * prod(shape) / shards / mesh.device.memory_bandwidth
    return replace(table, cost_s=table.cost_s + transposed * read_again_s)


def _is_behind(
    shape: tuple[int, ...],
    order: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    layout: Layout,
    axis: int,
) -> bool:
    """Whether the axis splits a dimension of the state that has others before it on a device."""
    if layout[axis] < 0:
        return False
    return any(
        shape[dim] > prod(n for n, entry in zip(mesh_shape, layout, strict=True) if entry == dim)
        for dim in order[: order.index(layout[axis])]
    )


@dataclass(frozen=True, eq=False)
class _Steps:
    """All single steps between the layouts of a tensor, whatever its bytes: what tables of tensors
    that can be split alike have in common.

    sources, targets: layouts before and after each step.
    made_of:          its two collectives, by number from 1 on; 0 for none.
    leave_partial:    whether a sum is still partial after its collectives.
    """

    index: dict[Layout, int]
    sources: np.ndarray
    targets: np.ndarray
    made_of: np.ndarray
    leave_partial: np.ndarray
    collectives: tuple[_Collective, ...]


@lru_cache(maxsize=4096)
def _layouts(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], with_partial: bool
) -> tuple[Layout, ...]:
    return tuple(all_layouts(shape, mesh_shape, with_partial=with_partial))


@lru_cache(maxsize=1024)
def _all_steps(
    mesh_shape: tuple[int, ...], forbidden: frozenset[str], layouts: tuple[Layout, ...], ndim: int
) -> _Steps:
    index = {layout: i for i, layout in enumerate(layouts)}
    numbers: dict[_Collective, int] = {}
    rows: list[tuple[int, int, int, int, bool]] = []
    for i, layout in enumerate(layouts):
        for step in _steps(mesh_shape, forbidden, layout, ndim):
            j = index.get(step.target)
            if j is not None:
                one, other = (
                    0 if made_of is None else numbers.setdefault(made_of, len(numbers) + 1)
                    for made_of in step.collectives
                )
                rows.append((i, j, one, other, step.leaves_partial))
    table = np.array(rows, dtype=np.intp).reshape(-1, 5)
    sources, targets, made_of, last = table[:, 0], table[:, 1], table[:, 2:4], table[:, 4]
    return _Steps(index, sources, targets, made_of, last.astype(bool), tuple(numbers))


def _collectives_of(before: Layout, after: Layout) -> list[Layout]:
    """Layouts after each collective of a step: of partial sums that become split along some axes
    and whole along others, the scattered axes come first."""
    changed = [axis for axis, (b, a) in enumerate(zip(before, after, strict=True)) if b != a]
    scattered = [axis for axis in changed if before[axis] == PARTIAL and after[axis] != WHOLE]
    if not scattered or scattered == changed:
        return [after]
    return [tuple(after[a] if a in scattered else e for a, e in enumerate(before)), after]


def _partial_axes(mesh_shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    return tuple(a for a, e in enumerate(layout) if e == PARTIAL and mesh_shape[a] > 1)


def _moved(layout: Layout, axes: Sequence[int], entry: int) -> Layout:
    return tuple(entry if a in axes else e for a, e in enumerate(layout))


def _is_minor(layout: Layout, axis: int, dim: int) -> bool:
    return dim not in layout[axis + 1 :]


class _Collective(NamedTuple):
    """`num_shards`: into how many parts the tensor is divided that it works on."""

    seconds_of: Callable[[LogicalMesh, tuple[int, ...], float, float], float]
    axes: tuple[int, ...]
    num_shards: int


class _ReshardStep(NamedTuple):
    target: Layout
    collectives: tuple[_Collective | None, _Collective | None]
    leaves_partial: bool = False  # a collective after which a sum is still partial


def _steps(
    mesh_shape: tuple[int, ...], forbidden: frozenset[str], layout: Layout, ndim: int
) -> list[_ReshardStep]:
    partial = _partial_axes(mesh_shape, layout)
    steps: list[_ReshardStep] = []
    for axis, entry in enumerate(layout):
        if mesh_shape[axis] == 1 or entry == PARTIAL:
            continue
        free_dims = [d for d in range(ndim) if d != entry and _is_minor(layout, axis, d)]
        if entry == WHOLE:
            steps += [_ReshardStep(_moved(layout, (axis,), d), (None, None)) for d in free_dims]
        elif _is_minor(layout, axis, entry):
            steps += _gathers(mesh_shape, forbidden, layout, (axis,), free_dims)
    for entry in set(layout) - {WHOLE, PARTIAL}:
        axes = tuple(a for a, e in enumerate(layout) if e == entry and mesh_shape[a] > 1)
        if len(axes) > 1:
            dims = [d for d in range(ndim) if d != entry]
            steps += _gathers(mesh_shape, forbidden, layout, axes, dims)
    if partial:
        steps += _sums(mesh_shape, forbidden, layout, partial, ndim)
    if len(partial) > 1:
        for axis in partial:
            steps += _sums(mesh_shape, forbidden, layout, (axis,), ndim)
    return steps


def _gathers(
    mesh_shape: tuple[int, ...],
    forbidden: frozenset[str],
    layout: Layout,
    axes: tuple[int, ...],
    dims: Sequence[int],
) -> list[_ReshardStep]:
    """The axes no longer split their dimension: to whole, or to another of `dims`."""
    is_partial = bool(_partial_axes(mesh_shape, layout))
    whole = _moved(layout, axes, WHOLE)
    left = num_shards(whole, mesh_shape)
    steps = [_ReshardStep(whole, (_Collective(all_gather_s, axes, left), None), is_partial)]
    if "all-to-all" not in forbidden:
        exchange = _Collective(all_to_all_s, axes, left)
        steps += [_ReshardStep(_moved(layout, axes, d), (exchange, None), is_partial) for d in dims]
    return steps


def _sums(
    mesh_shape: tuple[int, ...],
    forbidden: frozenset[str],
    layout: Layout,
    axes: tuple[int, ...],
    ndim: int,
) -> list[_ReshardStep]:
    """The sum over these axes is finished: to whole, or to split along all or one of them."""
    leaves_partial = axes != _partial_axes(mesh_shape, layout)
    local = num_shards(layout, mesh_shape)
    all_whole = _moved(layout, axes, WHOLE)
    steps = [
        _ReshardStep(all_whole, (_Collective(all_reduce_s, axes, local), None), leaves_partial)
    ]
    if "reduce-scatter" in forbidden:
        return steps
    for scattered in {axes, *((axis,) for axis in axes)}:
        others = tuple(axis for axis in axes if axis not in scattered)
        rest = None
        if others:
            rest = _Collective(
                all_reduce_s, others, num_shards(_moved(layout, scattered, 0), mesh_shape)
            )
        collectives = (_Collective(reduce_scatter_s, scattered, local), rest)
        steps += [
            _ReshardStep(_moved(all_whole, scattered, d), collectives, leaves_partial)
            for d in range(ndim)
            if all(_is_minor(layout, axis, d) for axis in scattered)
        ]
    return steps
