"""Shapes that stages may have, and the devices that they get."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ArgumentError, MeshError
from autopar.ir.mesh import ClusterSpec
from autopar.stages.submeshes import can_tile, candidate_submeshes, place_submeshes, uniform_submesh


@pytest.mark.parametrize(
    ("hosts", "devices", "expected"),
    [
        (1, 1, [(1, 1)]),
        (1, 8, [(1, 1), (1, 2), (1, 4), (1, 8)]),
        (8, 1, [(1, 1), (2, 1), (4, 1), (8, 1)]),
        (4, 4, [(1, 1), (1, 2), (1, 4), (2, 4), (4, 4)]),
        (6, 6, [(1, 1), (1, 2), (1, 6), (2, 6), (3, 6), (4, 6), (6, 6)]),
        (50, 1, [(k, 1) for k in (1, 2, 4, 5, 8, 10, 16, 25, 32, 50)]),
        (3, 5, [(1, 1), (1, 5), (2, 5), (3, 5)]),
    ],
)
def test_tiling_shapes(hosts, devices, expected):
    assert list(candidate_submeshes(ClusterSpec(hosts, devices))) == expected


def test_all_shapes():
    assert set(candidate_submeshes(ClusterSpec(2, 6), "all")) == {
        (1, 1), (1, 2), (1, 3), (1, 6), (2, 1), (2, 2), (2, 3), (2, 6),
    }  # fmt: skip


def test_shapes_that_are_unknown():
    with pytest.raises(ArgumentError, match="needs 'tiling' or 'all'"):
        candidate_submeshes(ClusterSpec(1, 8), "some")


def test_in_pipeline_order_where_it_fits():
    assert place_submeshes([(1, 2), (1, 4), (1, 2)], ClusterSpec(1, 8)) == (
        (0, 1),
        (2, 3, 4, 5),
        (6, 7),
    )
    assert place_submeshes([(1, 4), (1, 4), (1, 8)], ClusterSpec(2, 8))[2] == tuple(range(8, 16))


def test_large_ones_first_where_it_does_not():
    devices = place_submeshes([(1, 1), (1, 1), (1, 3), (1, 3)], ClusterSpec(2, 4))
    assert devices == ((3,), (7,), (0, 1, 2), (4, 5, 6))


def test_some_devices_of_each_of_several_hosts():
    assert place_submeshes([(2, 1), (2, 3)], ClusterSpec(2, 4)) == ((0, 4), (1, 2, 3, 5, 6, 7))


@pytest.mark.parametrize(
    ("submeshes", "parts"),
    [
        ([(1, 8), (1, 8), (1, 4)], ["1×8, 1×8, 1×4", "need 20 devices", "2 × 8", "4 are missing"]),
        ([(1, 8), (1, 4)], ["are only 12 devices", "4 are left over", "add up to the cluster"]),
        ([(2, 5), (1, 6)], ["no 1 × 6 is left for stage 1", "[3, 3]", "divide each other and 8"]),
        ([(4, 4)], ["no 4 × 4 is left for stage 0", "[8, 8]"]),
    ],
)
def test_submeshes_that_do_not_tile(submeshes, parts):
    cluster = ClusterSpec(2, 8)
    with pytest.raises(MeshError, match="do not tile") as caught:
        place_submeshes(submeshes, cluster)
    for part in parts:
        assert part in str(caught.value)
    assert not can_tile(submeshes, cluster)


def test_devices_may_be_left_over_if_allowed():
    assert place_submeshes([(1, 2)], ClusterSpec(1, 8), whole=False) == ((0, 1),)
    assert can_tile([(1, 2)], ClusterSpec(1, 8), whole=False)


@pytest.mark.parametrize(
    ("num_stages", "hosts", "devices", "expected"),
    [
        (1, 2, 8, (2, 8)),
        (2, 2, 8, (1, 8)),
        (4, 2, 8, (1, 4)),
        (16, 2, 8, (1, 1)),
        (3, 6, 4, (2, 4)),
        (3, 1, 6, (1, 2)),
    ],
)
def test_equal_submeshes(num_stages, hosts, devices, expected):
    assert uniform_submesh(num_stages, ClusterSpec(hosts, devices)) == expected


@pytest.mark.parametrize("num_stages", [3, 5, 32])
def test_equal_submeshes_that_there_are_not(num_stages):
    with pytest.raises(MeshError) as caught:
        uniform_submesh(num_stages, ClusterSpec(2, 8))
    assert f"UniformStages(num_stages={num_stages})" in str(caught.value)
    assert "[1, 2, 4, 8, 16]" in str(caught.value)


def test_equal_parts_that_would_straddle_hosts():
    with pytest.raises(MeshError, match=r"\[1, 2, 4, 6, 12\]"):
        uniform_submesh(3, ClusterSpec(2, 6))  # 4 devices each: two hosts of 6 have no third such


@st.composite
def tilings(draw):
    """A cluster, and candidate submeshes in any order that add up to it."""
    cluster = ClusterSpec(draw(st.integers(1, 9)), draw(st.integers(1, 12)))
    shapes = candidate_submeshes(cluster)
    chosen, left = [], cluster.num_devices
    while left:
        chosen.append(draw(st.sampled_from([s for s in shapes if prod(s) <= left])))
        left -= prod(chosen[-1])
    return cluster, draw(st.permutations(chosen))


@given(tilings())
@settings(max_examples=200, deadline=None)
def test_what_adds_up_tiles(case):
    cluster, submeshes = case
    devices = place_submeshes(submeshes, cluster)
    assert sorted(d for stage in devices for d in stage) == list(range(cluster.num_devices))
    for (num_hosts, width), stage in zip(submeshes, devices, strict=True):
        hosts = [d // cluster.devices_per_host for d in stage]
        assert [hosts.count(h) for h in sorted(set(hosts))] == [width] * num_hosts
