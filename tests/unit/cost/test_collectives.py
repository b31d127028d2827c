"""Collectives between hosts: rings share the network, other sends have a device's part of it."""

import pytest

from autopar.cost.collectives import all_gather_s, all_to_all_s, shift_s
from autopar.ir.devices import DeviceSpec
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster

LINK, HOST = 400.0, 200.0  # of a device's link; of a host's whole network
DEVICE = DeviceSpec("made up", 1.0, 1.0, 1.0, 1.0, LINK, HOST, 0.25, 2.0)
BYTES = 6400.0


@pytest.fixture
def two_hosts():
    return mesh_of_cluster(ClusterSpec(2, 4, DEVICE), (2, 4))


def test_on_one_host_every_collective_has_the_link(two_hosts):
    assert all_to_all_s(two_hosts, (1,), BYTES) == pytest.approx(0.25 + 3 / 16 * BYTES / LINK)
    assert shift_s(two_hosts, (1,), BYTES) == pytest.approx(0.25 + BYTES / LINK)


def test_a_ring_through_whole_hosts_has_their_whole_network(two_hosts):
    assert all_gather_s(two_hosts, (0, 1), BYTES) == pytest.approx(2 + 7 / 8 * BYTES / HOST)


def test_an_all_to_all_between_hosts_has_a_part_of_the_network(two_hosts):
    # Each of 8 ranks holds an eighth and sends half of it, to 4 ranks, at 50 bytes per second.
    away_s = 4 / 64 * BYTES / (HOST / 4)
    assert all_to_all_s(two_hosts, (0, 1), BYTES) == pytest.approx(2 + away_s)
    line = mesh_of_cluster(ClusterSpec(2, 4, DEVICE), (8,))
    assert all_to_all_s(line, (0,), BYTES) == pytest.approx(2 + away_s)


def test_an_axis_across_hosts_is_priced_as_its_ring(two_hosts):
    expected = 2 + 1 / 4 * BYTES / (HOST / 4)
    assert all_to_all_s(two_hosts, (0,), BYTES) == pytest.approx(expected)


def test_a_shift_between_hosts_has_a_part_of_the_network(two_hosts):
    assert shift_s(two_hosts, (0, 1), BYTES) == pytest.approx(2 + BYTES / (HOST / 4))
