"""Resharding, tested on the devices' data: every step of a path is executed on numpy tiles, and
every cost is that of the cheapest sequence of such steps, found here by another algorithm."""

from __future__ import annotations

import heapq
from functools import cache
from itertools import pairwise, product
from math import inf, isfinite, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.report import describe_step
from autopar.cost.reshard import ReshardTable, reshard_table
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import PARTIAL, WHOLE, Layout, all_layouts, is_partial

few = settings(deadline=None, max_examples=60)

Held = dict[tuple[int, ...], np.ndarray]  # device -> the array it holds


# -- the devices' data, and the effect of collectives on it


@cache
def addends(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> np.ndarray:
    """One addend per device; all entries of all their sums differ."""
    base = np.arange(prod(shape)).reshape(shape) + 1
    weights = 1 + np.arange(prod(mesh_shape)).reshape(mesh_shape) ** 2
    return np.multiply.outer(weights, base)


@cache
def held(layout: Layout, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> Held:
    """By the definition of a layout: the earlier axis is the major one."""
    summed = tuple(a for a, entry in enumerate(layout) if entry != PARTIAL)
    total = addends(shape, mesh_shape).sum(axis=summed, keepdims=True)
    devices = {}
    for device in product(*map(range, mesh_shape)):
        tile = total[tuple(c if e == PARTIAL else 0 for c, e in zip(device, layout, strict=True))]
        for axis, entry in enumerate(layout):
            if entry >= 0:
                tile = np.split(tile, mesh_shape[axis], axis=entry)[device[axis]]
        devices[device] = tile
    return devices


def run(
    kind: str,
    axes: tuple[int, ...],
    source: int,
    target: int,
    before: Held,
    mesh_shape: tuple[int, ...],
) -> Held | None:
    """The textbook collective within each group of `axes`, ranks in mesh order: from tiles split
    by dimension `source` to tiles split by `target`. None if a tile is not divisible."""
    ranks = [mesh_shape[a] for a in axes]
    after = {}
    for device in before:
        group = [
            before[tuple(dict(zip(axes, p, strict=True)).get(a, c) for a, c in enumerate(device))]
            for p in product(*map(range, ranks))
        ]
        own_rank = int(np.ravel_multi_index(tuple(device[a] for a in axes), ranks))
        if target >= 0 and group[0].shape[target] % len(group):
            return None
        if kind == "all-gather":
            after[device] = np.concatenate(group, axis=source)
        elif kind == "all-to-all":
            received = [np.split(tile, len(group), axis=target)[own_rank] for tile in group]
            after[device] = np.concatenate(received, axis=source)
        elif kind == "all-reduce":
            after[device] = sum(group)
        elif kind == "reduce-scatter":
            after[device] = np.split(sum(group), len(group), axis=target)[own_rank]
        else:
            assert kind == "slice"
            after[device] = np.split(before[device], len(group), axis=target)[own_rank]
    return after


def same(a: Held | None, b: Held) -> bool:
    return a is not None and all(np.array_equal(a[d], b[d]) for d in b)


def price(mesh: LogicalMesh, kind: str, axes: tuple[int, ...], sent_from: float) -> float:
    """`sent_from`: bytes of the tile that one device holds before the collective."""
    if kind == "slice":
        return 0.0
    n = prod(mesh.shape[a] for a in axes)
    alpha = max(mesh.alpha[a] for a in axes)
    beta = max(mesh.beta[a] for a in axes)
    volume = {
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": (n - 1) / n,
        "all-gather": n - 1,
        "all-to-all": (n - 1) / n,
    }
    return alpha + beta * volume[kind] * sent_from


def tile_bytes(layout: Layout, mesh: LogicalMesh, num_bytes: float) -> float:
    return num_bytes / prod(n for e, n in zip(layout, mesh.shape, strict=True) if e >= 0)


@cache
def transitions(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> dict[Layout, list[tuple[str, tuple[int, ...], Layout]]]:
    """Every single collective between two layouts, found by running them all."""
    layouts = list(all_layouts(shape, mesh_shape, with_partial=True))
    tiles = {layout: held(layout, shape, mesh_shape) for layout in layouts}
    wide = [a for a, n in enumerate(mesh_shape) if n > 1]
    found: dict[Layout, list[tuple[str, tuple[int, ...], Layout]]] = {s: [] for s in layouts}
    for before in layouts:
        for axes in [*((a,) for a in wide), tuple(wide)]:
            entries = {before[a] for a in axes}
            if len(entries) != 1:
                continue
            (source,) = entries
            for target in {WHOLE, *range(len(shape))} - {source}:
                kind = {
                    (WHOLE, True): "slice",
                    (PARTIAL, False): "all-reduce",
                    (PARTIAL, True): "reduce-scatter",
                }.get((source, target >= 0), "all-to-all" if target >= 0 else "all-gather")
                after = tuple(target if a in axes else e for a, e in enumerate(before))
                made = run(kind, axes, source, target, tiles[before], mesh_shape)
                if after in tiles and same(made, tiles[after]):
                    found[before].append((kind, axes, after))
    return found


def num_partial(layout: Layout, mesh: LogicalMesh) -> int:
    return sum(e == PARTIAL and n > 1 for e, n in zip(layout, mesh.shape, strict=True))


def cheapest(mesh: LogicalMesh, shape: tuple[int, ...], num_bytes: float, start: Layout) -> dict:
    """Dijkstra from one layout over every legal collective. Sums that are partial along two axes
    are finished at once: by one collective, or by a reduce-scatter and an all-reduce. After a
    collective that leaves a sum partial, nothing follows."""
    best, queue = {start: 0.0}, [(0.0, start)]
    left_partial: dict[Layout, float] = {}

    def moves(here: Layout, before: float) -> list[tuple[float, str, Layout]]:
        size = tile_bytes(here, mesh, num_bytes)
        return [
            (before + price(mesh, kind, axes, size), kind, after)
            for kind, axes, after in transitions(shape, mesh.shape)[here]
        ]

    while queue:
        cost, here = heapq.heappop(queue)
        if cost > best[here]:
            continue
        for total, kind, after in moves(here, cost):
            reached = [(total, after)]
            if num_partial(after, mesh) and kind != "slice":
                reached = []
                if here == start:
                    left_partial[after] = min(total, left_partial.get(after, inf))
                if num_partial(here, mesh) == 2 and kind == "reduce-scatter":
                    finishing = moves(after, total)
                    reached = [(t, layout) for t, k, layout in finishing if k == "all-reduce"]
            for total, layout in reached:
                if total < best.get(layout, inf):
                    best[layout] = total
                    heapq.heappush(queue, (total, layout))
    return left_partial | best


# -- problems

prices = st.tuples(st.just(0.0) | st.floats(0.1, 1e3), st.just(0.0) | st.floats(0.01, 10))


@st.composite
def tensors(draw) -> tuple[LogicalMesh, tuple[int, ...], float]:
    """A mesh, a shape and the bytes of a tensor of it."""
    mesh_shape = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 4), (4, 2), (3, 2), (1, 4)]))
    links = [draw(prices) for _ in mesh_shape]
    unit = draw(st.sampled_from([1.0, 1e-9, 1e-18]))  # the law holds in any unit of time
    mesh = LogicalMesh(
        mesh_shape, alpha=tuple(unit * a for a, _ in links), beta=tuple(unit * b for _, b in links)
    )
    shape = tuple(draw(st.lists(st.sampled_from([8, 4, 12, 24, 3, 1]), max_size=3)))
    return mesh, shape, float(draw(st.sampled_from([1, 2, 4])) * prod(shape))


def table_of(tensor) -> ReshardTable:
    mesh, shape, num_bytes = tensor
    return reshard_table(mesh, shape, num_bytes, with_partial=True)


def path_of(table: ReshardTable, source: Layout, target: Layout) -> list[Layout]:
    """`table.path`, but a path in a circle is an error."""
    here, goal = table.index[source], table.index[target]
    for _ in table.layouts:
        here = int(table.first_step[here, goal])
    assert here == goal, (source, target)
    return table.path(source, target)


@few
@given(tensors())
def test_cost_is_that_of_the_cheapest_sequence(tensor) -> None:
    table = table_of(tensor)
    for source in table.layouts:
        expected = cheapest(*tensor, source)
        for target in table.layouts:
            cost = table.cost(source, target)
            assert cost == pytest.approx(expected.get(target, inf), rel=1e-8, abs=0)


@pytest.mark.ci
@few
@given(tensors())
def test_every_step_of_a_path_is_one_collective(tensor) -> None:
    """The collective that `describe_step` names, run within its groups, makes the next layout, and
    the prices of the steps add up to the cost of the path."""
    mesh, shape, num_bytes = tensor
    table = table_of(tensor)
    for source, target in product(table.layouts, repeat=2):
        if not isfinite(table.cost(source, target)):
            continue
        here, total = source, 0.0
        for after in path_of(table, source, target):
            step = describe_step(mesh, here, after, num_bytes)
            before = held(here, shape, mesh.shape)
            made = run(
                step.kind, step.axes, here[step.axes[0]], after[step.axes[0]], before, mesh.shape
            )
            assert same(made, held(after, shape, mesh.shape)), (here, step, after)
            total += price(mesh, step.kind, step.axes, tile_bytes(here, mesh, num_bytes))
            here = after
        assert here == target
        assert total == pytest.approx(table.cost(source, target), rel=1e-8, abs=0)


@few
@given(tensors())
def test_triangle_inequality(tensor) -> None:
    """Except through sums that a collective has left partial: an operator is between."""
    table = table_of(tensor)
    for middle, layout in enumerate(table.layouts):
        if not num_partial(layout, tensor[0]):
            through = table.cost_s[:, middle, None] + table.cost_s[None, middle, :]
            assert (table.cost_s <= through * (1 + 1e-8)).all()


def test_two_axes_that_split_two_dimensions() -> None:
    """They are scattered onto one dimension, and one axis moves from there."""
    mesh = LogicalMesh((2, 4), alpha=(0.0, 0.0), beta=(1.0, 1.0))
    table = reshard_table(mesh, (8, 8), 64.0, with_partial=True)
    assert table.path((PARTIAL, PARTIAL), (0, 1)) == [(0, 0), (0, 1)]
    assert table.cost((PARTIAL, PARTIAL), (0, 1)) == 64 * 7 / 8 + 8 * 3 / 4
    assert table.path((PARTIAL, PARTIAL), (0, WHOLE)) == [(0, PARTIAL), (0, WHOLE)]
    mesh = LogicalMesh(
        (2, 4), alpha=(0.0, 0.0), beta=(1.0, 1.0), forbidden=frozenset({"all-to-all"})
    )
    table = reshard_table(mesh, (8, 8), 64.0, with_partial=True)
    assert table.path((PARTIAL, PARTIAL), (0, 1)) == [(PARTIAL, 1), (WHOLE, 1), (0, 1)]
    assert table.cost((PARTIAL, PARTIAL), (0, 1)) == 64 * 3 / 4 + 2 * 16 / 2


@few
@given(tensors())
def test_staying_and_slicing_are_free(tensor) -> None:
    mesh, shape, _ = tensor
    table = table_of(tensor)
    for layout in table.layouts:
        assert table.cost(layout, layout) == 0
        assert table.path(layout, layout) == []
        for kind, _, after in transitions(shape, mesh.shape)[layout]:
            if kind == "slice":
                assert table.cost(layout, after) == 0
    # From whole to anything: an earlier axis is put on first.
    whole = (WHOLE,) * len(mesh.shape)
    assert all(table.cost(whole, t) == 0 for t in table.layouts if not is_partial(t))


@few
@given(tensors())
def test_everything_but_partial_sums_can_be_reached(tensor) -> None:
    table = table_of(tensor)
    for source, target in product(table.layouts, repeat=2):
        cost = table.cost(source, target)
        gains_partial = any(
            t == PARTIAL and s != PARTIAL for s, t in zip(source, target, strict=True)
        )
        assert cost >= 0
        assert isfinite(cost) != gains_partial


@few
@given(tensors())
def test_table_without_partial_layouts_agrees(tensor) -> None:
    mesh, shape, num_bytes = tensor
    small, large = reshard_table(mesh, shape, num_bytes), table_of(tensor)
    assert set(small.layouts) == {s for s in large.layouts if not is_partial(s)}
    for source, target in product(small.layouts, repeat=2):
        expected = large.cost(source, target)
        assert small.cost(source, target) == pytest.approx(expected, rel=1e-8, abs=0)


@few
@given(tensors(), st.floats(0, 1))
def test_alpha_share_lowers_alpha_alone(tensor, share) -> None:
    mesh, shape, num_bytes = tensor
    shared = reshard_table(mesh, shape, num_bytes, True, share)
    cheaper = LogicalMesh(mesh.shape, alpha=tuple(share * a for a in mesh.alpha), beta=mesh.beta)
    expected = reshard_table(cheaper, shape, num_bytes, True)
    assert shared.cost_s == pytest.approx(expected.cost_s, rel=1e-8, abs=0)


def test_joint_link_is_used_where_axes_run_together() -> None:
    mesh = LogicalMesh((2, 2), alpha=(1.0, 1.0), beta=(1.0, 1.0), joint_link=(0.0, 0.0))
    table = reshard_table(mesh, (8, 8), 64.0, True)
    assert table.cost((PARTIAL, PARTIAL), (WHOLE, WHOLE)) == 0
    assert table.cost((0, 0), (1, 1)) == 0
    assert table.cost((0, 1), (WHOLE, 1)) > 0


@pytest.mark.parametrize(
    ("source", "target", "path"),
    [
        # The major axis of a dimension cannot leave it alone.
        ((0, 0), (WHOLE, 0), ["all-gather", "slice"]),
        # Two gathers on half the ranks each cost another α; one on all ranks does not.
        ((0, 0), (WHOLE, WHOLE), ["all-gather"]),
        ((PARTIAL, PARTIAL), (WHOLE, WHOLE), ["all-reduce"]),
        ((PARTIAL, PARTIAL), (0, 0), ["reduce-scatter"]),
        ((0, WHOLE), (1, WHOLE), ["all-to-all"]),
        ((WHOLE, WHOLE), (0, 1), ["slice", "slice"]),
    ],
)
def test_known_paths(source, target, path) -> None:
    mesh = LogicalMesh((2, 2), alpha=(1e3, 1e3), beta=(1.0, 1.0))
    table = reshard_table(mesh, (8, 8), 256.0, True)
    steps = [source, *table.path(source, target)]
    kinds = [describe_step(mesh, a, b, 256.0).kind for a, b in pairwise(steps)]
    assert kinds == path
