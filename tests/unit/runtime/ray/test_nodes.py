"""Which nodes become which hosts; addresses that lead nowhere."""

import socket
import sys

import pytest

from autopar.errors import ArgumentError, ClusterError
from autopar.runtime.ray.nodes import Layout, RayNode, connect, import_ray, lay_out


def gpu_nodes(*gpus, kind="H100", cpus=64):
    return [RayNode(f"id{i}", f"10.0.0.{i}", cpus, n, kind) for i, n in enumerate(gpus)]


def cpu_nodes(*cpus):
    return [RayNode(f"id{i}", f"10.0.0.{i}", n, 0) for i, n in enumerate(cpus)]


@pytest.mark.parametrize(
    ("nodes", "num_hosts", "devices_per_host", "expected"),
    [
        (gpu_nodes(8, 8), None, None, (8, (1, 1))),
        (gpu_nodes(8, 8), None, 4, (4, (2, 2))),
        (gpu_nodes(8, 8), 3, 4, (4, (2, 1))),
        (gpu_nodes(8, 8), 1, None, (8, (1,))),
        (gpu_nodes(8, 4), None, None, (4, (2, 1))),
        (gpu_nodes(2, 8), 1, 8, (8, (1,))),  # the first node is too small
        (gpu_nodes(8, 0, 8), None, None, (8, (1, 1))),  # a head without GPUs
    ],
)
def test_hosts_of_gpus(nodes, num_hosts, devices_per_host, expected):
    layout = lay_out(nodes, num_hosts, devices_per_host)
    assert (layout.devices_per_host, layout.hosts_per_node) == expected
    assert layout.platform == "gpu"


@pytest.mark.parametrize(
    ("cpus", "num_hosts", "devices_per_host", "expected"),
    [
        ((4, 4), None, None, (4, (1, 1))),
        ((4, 2), None, None, (2, (1, 1))),
        ((4, 4), 1, None, (4, (1,))),
        ((2,), 2, 4, (4, (2,))),  # virtual devices: more than there are CPUs
        ((8,), 2, None, (4, (2,))),
        ((2, 2), 3, 2, (2, (2, 1))),
        ((1,), 4, None, (1, (4,))),
        ((0, 4), None, None, (4, (1,))),  # a head that is kept free
    ],
)
def test_hosts_of_virtual_devices(cpus, num_hosts, devices_per_host, expected):
    layout = lay_out(cpu_nodes(*cpus), num_hosts, devices_per_host)
    assert (layout.devices_per_host, layout.hosts_per_node) == expected
    assert layout.platform == "cpu"


def test_no_more_is_reserved_than_nodes_have():
    assert lay_out(cpu_nodes(2, 8), 2, 4).bundles() == [{"CPU": 2}, {"CPU": 4}]
    assert lay_out(gpu_nodes(8), 2, 4).bundles() == [{"CPU": 2, "GPU": 8}]
    assert lay_out(gpu_nodes(8, cpus=0), 2, 4).bundles() == [{"GPU": 8}]
    assert Layout("gpu", 2, (1,), (0,)).bundles() == [{"GPU": 2}]


@pytest.mark.parametrize(
    ("num_hosts", "devices_per_host"), [(3, None), (1, 16), (None, 16), (5, 4)]
)
def test_fewer_devices_than_asked(num_hosts, devices_per_host):
    with pytest.raises(ClusterError, match="room for") as caught:
        lay_out(gpu_nodes(8, 8), num_hosts, devices_per_host)
    assert "10.0.0.1: 64 CPUs, 8 GPUs (H100)" in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "num_hosts", "shares", "hosts", "gpus"),
    [
        (gpu_nodes(1), None, 8, (8,), (1,)),
        (gpu_nodes(1), 3, 8, (3,), (1,)),
        (gpu_nodes(2), 5, 4, (5,), (2,)),  # the last host has a GPU to itself
        (gpu_nodes(2, 2), 9, 4, (8, 1), (2, 1)),
        (gpu_nodes(8), 8, 1, (1,), (8,)),  # whole GPUs: all on one host, as ever
    ],
)
def test_hosts_of_shares_of_gpus(nodes, num_hosts, shares, hosts, gpus):
    num_hosts = 1 if shares == 1 else num_hosts
    layout = lay_out(nodes, num_hosts, None, shares)
    assert (layout.hosts_per_node, layout.gpus_per_node()) == (hosts, gpus)
    assert [bundle["GPU"] for bundle in layout.bundles()] == list(gpus)
    assert layout.devices_per_host == (1 if shares > 1 else 8)


def test_neighbours_share_a_gpu():
    layout = lay_out(gpu_nodes(2), 5, 1, 4)
    ids = [layout.devices_of(["3", "7"], host) for host in range(5)]
    assert ids == [("3",)] * 4 + [("7",)]
    whole = lay_out(gpu_nodes(4), 2, 2)
    assert [whole.devices_of("0123", host) for host in range(2)] == [("0", "1"), ("2", "3")]


def test_a_process_sees_a_shared_gpu_once():
    with pytest.raises(ClusterError, match=r"=1 and num_hosts=8: a host for each share"):
        lay_out(gpu_nodes(1), 2, 4, 8)
    with pytest.raises(ClusterError, match="AUTOPAR_RANKS_PER_GPU=8"):
        lay_out(gpu_nodes(1), None, 4, 8)


def test_more_shares_than_gpus_have():
    with pytest.raises(ClusterError, match="room for 4 such hosts, 4 per GPU") as caught:
        lay_out(gpu_nodes(1), 5, None, 4)
    assert "raise that variable" in str(caught.value)


def test_virtual_devices_are_not_shared():
    assert lay_out(cpu_nodes(4), 2, 2, 8) == lay_out(cpu_nodes(4), 2, 2)


def test_mixed_kinds():
    nodes = [*gpu_nodes(8), RayNode("other", "10.0.1.0", 64, 8, "A100")]
    with pytest.raises(ClusterError, match=r"one kind, but the nodes have \['A100', 'H100'\]"):
        lay_out(nodes, None, None)
    assert lay_out(nodes, 1, None).hosts_per_node == (1,)


@pytest.mark.parametrize("given", [0, -1, 1.5, "2", True])
@pytest.mark.parametrize("name", ["num_hosts", "devices_per_host"])
def test_counts_are_positive_whole_numbers(name, given):
    options = {"num_hosts": None, "devices_per_host": None, name: given}
    with pytest.raises(ArgumentError, match=f"init\\({name}="):
        lay_out(cpu_nodes(4), **options)


def test_no_nodes():
    with pytest.raises(ClusterError, match="no live node"):
        lay_out([], None, None)


def test_ray_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"not installed\. .* pip install 'autopar\[ray\]'"):
        import_ray()


def test_ray_is_broken(monkeypatch, tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('no libray')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(ClusterError, match=r"cannot be imported \(no libray\)"):
        import_ray()


def test_nobody_listens_at_the_address():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ClusterError, match="no Ray cluster there"):
            connect(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "host:port", "ray://10.0.0.1:10001"])
def test_addresses_that_are_none(address):
    with pytest.raises(ClusterError, match="init\\(address="):
        connect(address)


@pytest.mark.parametrize("address", ["", 6379])
def test_addresses_of_another_type(address):
    with pytest.raises(ArgumentError, match="init\\(address="):
        connect(address)
