"""Laws that prices of collectives obey on any mesh, and that links of any cluster obey."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster

COLLECTIVES = [all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s]
REL = 1e-12

prices = st.floats(0, 1e3, allow_subnormal=False)
num_bytes = st.floats(0, 1e12)
ranks = st.integers(2, 512)
laws = settings(deadline=None, max_examples=50)


def axis(num_ranks: int, alpha: float, beta: float) -> LogicalMesh:
    return LogicalMesh((num_ranks,), alpha=(alpha,), beta=(beta,))


@pytest.mark.parametrize("collective", COLLECTIVES)
@laws
@given(ranks, prices, prices, num_bytes, num_bytes)
def test_more_bytes_never_cost_less(collective, n, alpha, beta, some, more) -> None:
    mesh = axis(n, alpha, beta)
    some, more = sorted((some, more))
    assert collective(mesh, (0,), some) <= collective(mesh, (0,), more)


@pytest.mark.parametrize("collective", COLLECTIVES)
@laws
@given(st.integers(1, 64), st.integers(0, 64), prices, prices, num_bytes)
def test_more_ranks_never_cost_less(collective, n, extra, alpha, beta, size) -> None:
    """For an all-to-all of what each rank holds: of a whole tensor, more ranks hold less each."""
    if collective is all_to_all_s:
        few, many = size * n, size * (n + extra)
    else:
        few = many = size
    cheap = collective(axis(n, alpha, beta), (0,), few)
    assert cheap <= collective(axis(n + extra, alpha, beta), (0,), many) * (1 + REL)


@laws
@given(ranks, st.floats(1e-9, 1e3), prices, num_bytes)
def test_reduce_scatter_and_all_gather_make_an_all_reduce(n, alpha, beta, size) -> None:
    mesh = axis(n, alpha, beta)
    halves = reduce_scatter_s(mesh, (0,), size) + all_gather_s(mesh, (0,), size)
    assert halves == pytest.approx(all_reduce_s(mesh, (0,), size) + alpha, rel=REL)


@laws
@given(ranks, prices, st.floats(1e-9, 1e3), st.floats(1, 1e12))
def test_halves_are_cheaper_than_the_whole(n, alpha, beta, size) -> None:
    mesh = axis(n, alpha, beta)
    assert reduce_scatter_s(mesh, (0,), size) < all_reduce_s(mesh, (0,), size)
    assert all_gather_s(mesh, (0,), size) < all_reduce_s(mesh, (0,), size)
    assert all_to_all_s(mesh, (0,), size) < all_gather_s(mesh, (0,), size)


@pytest.mark.parametrize("collective", COLLECTIVES)
@laws
@given(prices, prices, num_bytes)
def test_one_rank_costs_nothing(collective, alpha, beta, size) -> None:
    assert collective(axis(1, alpha, beta), (0,), size) == 0
    both = LogicalMesh((1, 1), alpha=(alpha, alpha), beta=(beta, beta))
    assert collective(both, (0, 1), size) == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
@laws
@given(ranks, prices, prices, num_bytes, st.floats(0, 1))
def test_alpha_share_scales_alpha_alone(collective, n, alpha, beta, size, share) -> None:
    full = collective(axis(n, alpha, beta), (0,), size)
    part = collective(axis(n, alpha, beta), (0,), size, share)
    assert full - part == pytest.approx((1 - share) * alpha, rel=1e-9, abs=1e-12 * full)


@pytest.mark.parametrize("collective", COLLECTIVES)
@laws
@given(st.tuples(ranks, ranks), st.tuples(prices, prices), st.tuples(prices, prices), num_bytes)
def test_two_axes_without_a_joint_link_pay_the_worse_one(
    collective, shape, alpha, beta, size
) -> None:
    together = collective(LogicalMesh(shape, alpha=alpha, beta=beta), (0, 1), size)
    assert together == collective(axis(prod(shape), max(alpha), max(beta)), (0,), size)


# -- links of a cluster

clusters = st.builds(
    ClusterSpec,
    num_hosts=st.integers(1, 4),
    devices_per_host=st.sampled_from([1, 2, 3, 4, 6, 8]),
    device=st.sampled_from(["v100", "a100-pcie", "a100-sxm", "h100-sxm", "cpu"]),
    host_bandwidth=st.none() | st.floats(1e8, 1e13),
    intra_host_bandwidth=st.none() | st.floats(1e8, 1e13),
)


@st.composite
def cluster_meshes(draw) -> tuple[ClusterSpec, LogicalMesh]:
    """A cluster and a mesh of one or two axes on some or all of its devices."""
    cluster = draw(clusters)
    shape = draw(
        st.sampled_from(
            [
                shape
                for num_axes in (1, 2)
                for shape in product(range(1, cluster.num_devices + 1), repeat=num_axes)
                if prod(shape) <= cluster.num_devices
            ]
        )
    )
    return cluster, mesh_of_cluster(cluster, shape)


def groups_of(cluster: ClusterSpec, mesh: LogicalMesh, axes: tuple[int, ...]) -> list[list[int]]:
    """The hosts of the ranks of each group of a collective over `axes`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, position in enumerate(product(*(range(n) for n in mesh.shape))):
        rest = tuple(p for a, p in enumerate(position) if a not in axes)
        groups.setdefault(rest, []).append(device // cluster.devices_per_host)
    return list(groups.values())


@laws
@given(cluster_meshes())
def test_link_of_an_axis_is_that_of_its_worst_group(cluster_mesh) -> None:
    """An axis pays the slow link exactly if one of its groups has ranks on two hosts."""
    cluster, mesh = cluster_mesh
    device = cluster.spec
    for axes in [(0,), (1,), (0, 1)][: 2 * len(mesh.shape) - 1]:
        alpha, beta = mesh.link(axes)
        groups = groups_of(cluster, mesh, axes)
        crossing = [hosts for hosts in groups if len(set(hosts)) > 1]
        if not crossing:
            expected = (device.intra_host_alpha_s, 1 / device.intra_host_bandwidth)
            assert (alpha, beta) == expected
            continue
        assert alpha == device.inter_host_alpha_s
        assert beta >= max(1 / device.intra_host_bandwidth, 1 / device.host_bandwidth)


@laws
@given(clusters)
def test_rings_that_share_a_host_share_its_network(cluster) -> None:
    """With whole hosts and strides that divide them, as many rings as cross at one host."""
    device, per_host = cluster.spec, cluster.devices_per_host
    for inner in (n for n in range(1, per_host + 1) if per_host % n == 0):
        shape = (cluster.num_devices // inner, inner)
        mesh = mesh_of_cluster(cluster, shape)
        crossing = [g for g in groups_of(cluster, mesh, (0,)) if len(set(g)) > 1]
        if not crossing:
            continue
        through_host_0 = sum(0 in hosts for hosts in crossing)
        expected = max(1 / device.intra_host_bandwidth, through_host_0 / device.host_bandwidth)
        assert mesh.beta[0] == pytest.approx(expected, rel=REL)


@pytest.mark.parametrize("collective", COLLECTIVES)
@laws
@given(clusters.filter(lambda c: c.num_hosts > 1 and c.devices_per_host > 1), num_bytes)
def test_crossing_hosts_is_never_cheaper(collective, cluster, size) -> None:
    """The same number of ranks on neighbouring devices and on one device of each host."""
    n = min(cluster.num_hosts, cluster.devices_per_host)
    inside = axis(n, *cluster.link(n, 1, n))
    across = axis(n, *cluster.link(n, cluster.devices_per_host))
    assert collective(inside, (0,), size) <= collective(across, (0,), size)


def test_link_counts_the_ranks_that_share_a_host() -> None:
    cluster = ClusterSpec(2, 8, "h100-sxm", intra_host_bandwidth=400e9, host_bandwidth=100e9)
    inside, across = cluster.spec.intra_host_alpha_s, cluster.spec.inter_host_alpha_s
    assert cluster.link(8, 1) == (inside, 1 / 400e9)
    assert cluster.link(2, 4) == (inside, 1 / 400e9)
    assert cluster.link(16, 1) == (across, 1 / 100e9)  # one ring of all
    assert cluster.link(4, 4) == (across, 4 / 100e9)  # two ranks per host: four rings
    assert cluster.link(2, 8) == (across, 8 / 100e9)  # one rank per host: eight rings
    fast_network = ClusterSpec(2, 8, intra_host_bandwidth=400e9, host_bandwidth=1e13)
    assert fast_network.link(16, 1) == (across, 1 / 400e9)  # no faster than the device's own link
