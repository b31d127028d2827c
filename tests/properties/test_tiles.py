"""Tile plans between any two layouts on any two meshes, executed on numpy arrays."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.pipeline_links import transfer_s
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import Layout, all_layouts
from autopar.ir.tiles import TilePlan, check_tile_plan, slices
from autopar.lower.tiles import plan_tiles

few = settings(deadline=None, max_examples=150)
mesh_shapes = st.sampled_from(
    [s for s in product(range(1, 7), repeat=2) if prod(s) <= 12] + [(n,) for n in range(1, 9)]
)
array_shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), max_size=3).map(tuple)


@st.composite
def plans(draw) -> TilePlan:
    shape = draw(array_shapes)
    meshes = draw(mesh_shapes), draw(mesh_shapes)
    source, target = (draw(st.sampled_from(list(all_layouts(shape, mesh)))) for mesh in meshes)
    return plan_tiles(shape, draw(st.sampled_from([1, 2, 4])), source, meshes[0], target, meshes[1])


def shards_of(whole: np.ndarray, layout: Layout, mesh_shape: tuple[int, ...]) -> list[np.ndarray]:
    """By the definition of a layout: the earlier axis is the major one."""
    shards = []
    for device in product(*map(range, mesh_shape)):
        shard = whole
        for axis, entry in enumerate(layout):
            if entry >= 0:
                shard = np.split(shard, mesh_shape[axis], axis=entry)[device[axis]]
        shards.append(shard)
    return shards


@few
@given(plans())
def test_every_element_is_written_once_with_its_value(plan: TilePlan) -> None:
    whole = np.arange(prod(plan.shape)).reshape(plan.shape)
    sources = [
        np.isin(whole, shard) for shard in shards_of(whole, plan.source_layout, plan.source_mesh)
    ]
    wanted = shards_of(whole, plan.target_layout, plan.target_mesh)
    written = [np.zeros(plan.shape, int) for _ in wanted]
    for tile in plan.tiles:
        assert sources[tile.source][slices(tile.box)].all(), "the sender holds what it sends"
        written[tile.target][slices(tile.box)] += 1
    crossed = sum(written)
    assert np.array_equal(crossed, np.ones(plan.shape)), "every element crosses once"
    for gather in plan.gathers:
        received = {device: written[device].copy() for device, _ in gather.parts}
        for device in gather.devices:
            for other, box in gather.parts:
                assert received[other][slices(box)].all(), "parts have arrived"
                if other != device:
                    written[device][slices(box)] += 1
    for shard, counts in zip(wanted, written, strict=True):
        assert np.array_equal(counts, np.isin(whole, shard))


@few
@given(plans())
def test_bytes(plan: TilePlan) -> None:
    check_tile_plan(plan)
    total = plan.itemsize * prod(plan.shape)
    assert plan.link_bytes == plan.lower_bound_bytes == total
    assert total / prod(plan.source_mesh) <= plan.max_sender_bytes
    assert total / prod(plan.target_mesh) <= plan.max_receiver_bytes
    # Nobody sends more than it holds, or receives more than it wants.
    assert plan.max_sender_bytes <= plan.itemsize * max(
        s.size for s in shards_of(np.zeros(plan.shape), plan.source_layout, plan.source_mesh)
    )
    wanted = shards_of(np.zeros(plan.shape), plan.target_layout, plan.target_mesh)
    assert plan.max_receiver_bytes <= plan.itemsize * max(s.size for s in wanted)
    gathered = sum(s.size for s in wanted) * plan.itemsize - total
    assert plan.gathered_bytes == gathered


@few
@given(plans(), st.floats(0, 1), st.floats(1e-9, 1))
def test_a_transfer_costs_at_least_its_busiest_device(plan, alpha, beta) -> None:
    n = len(plan.target_mesh)
    free = LogicalMesh(plan.target_mesh, alpha=(0.0,) * n, beta=(0.0,) * n)
    seconds = transfer_s(plan, alpha, beta, free)
    assert seconds == alpha + beta * max(plan.max_sender_bytes, plan.max_receiver_bytes)
    slow = LogicalMesh(plan.target_mesh, alpha=(1.0,) * n, beta=(1.0,) * n)
    gathers = transfer_s(plan, alpha, beta, slow) - seconds
    assert (gathers > 0) == bool(plan.gathers)


@pytest.mark.ci
@few
@given(
    st.sampled_from([(1, 2), (2, 2), (1, 4), (2, 4), (4, 2)]),
    st.sampled_from([(1, 2), (2, 2), (1, 4), (2, 4), (4, 2)]),
    st.data(),
)
def test_what_divides_is_balanced(source_mesh, target_mesh, data) -> None:
    """The busiest device sends or receives no more than the smaller mesh's devices must."""
    shape = (16, 32, 16)
    source = data.draw(st.sampled_from(list(all_layouts(shape, source_mesh))))
    target = data.draw(st.sampled_from(list(all_layouts(shape, target_mesh))))
    plan = plan_tiles(shape, 4, source, source_mesh, target, target_mesh)
    share = plan.link_bytes // min(prod(source_mesh), prod(target_mesh))
    assert max(plan.max_sender_bytes, plan.max_receiver_bytes) == share
