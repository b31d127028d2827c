from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import ArgumentError, MeshError
from autopar.ir.devices import DEVICES, DeviceSpec, device_spec
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster


def test_a_mesh_has_names_and_prices_without_being_told() -> None:
    mesh = LogicalMesh((2, 4))
    assert mesh.axis_names == ("x", "y")
    assert mesh.alpha == mesh.beta == (1.0, 1.0)
    assert mesh.num_devices == 8
    assert LogicalMesh((8,)).axis_names == ("x",)
    assert LogicalMesh(8).shape == (8,)  # type: ignore[arg-type]


def test_equal_meshes_are_one_key() -> None:
    """Lists become tuples: cost tables are cached by mesh."""
    lists = LogicalMesh([2, 2], ["a", "b"], [1, 2], [3, 4])  # type: ignore[arg-type]
    tuples = LogicalMesh((2, 2), ("a", "b"), (1.0, 2.0), (3.0, 4.0))
    assert lists == tuples
    assert hash(lists) == hash(tuples)


@pytest.mark.parametrize("shape", [(), (2, 2, 2), (0,), (2, -1), (2.0,), ("2",), 0], ids=str)
def test_shapes_that_no_mesh_has(shape) -> None:
    with pytest.raises(MeshError, match=r"needs one or two whole numbers ≥ 1"):
        LogicalMesh(shape)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis_names": ("x",)}, "needs 2 different names"),
        ({"axis_names": ("x", "x")}, "needs 2 different names"),
        ({"axis_names": ("a", "b", "c")}, "needs 2 different names"),
        ({"alpha": (1.0,)}, r"LogicalMesh\(alpha=\(1.0,\)\): needs 2 numbers"),
        ({"beta": (1.0, -1.0)}, r"LogicalMesh\(beta=.*needs 2 numbers ≥ 0"),
        ({"beta": (1.0, float("nan"))}, r"LogicalMesh\(beta=.*needs 2 numbers ≥ 0"),
        ({"alpha": (1.0, float("inf"))}, r"LogicalMesh\(alpha=.*needs 2 numbers ≥ 0"),
    ],
)
def test_fields_that_do_not_match_the_shape(arguments, message) -> None:
    with pytest.raises(MeshError, match=message):
        LogicalMesh((2, 4), **arguments)


def test_link_over_two_axes() -> None:
    mesh = LogicalMesh((2, 4), alpha=(1.0, 2.0), beta=(4.0, 3.0))
    assert mesh.link((0,)) == (1.0, 4.0)
    assert mesh.link((1,)) == (2.0, 3.0)
    assert mesh.link((0, 1)) == (2.0, 4.0)
    joint = LogicalMesh((2, 4), joint_link=(9.0, 8.0))
    assert joint.link((0, 1)) == (9.0, 8.0)
    assert joint.link((1,)) == (1.0, 1.0)


@pytest.mark.parametrize("name", DEVICES)
def test_presets_are_plausible(name: str) -> None:
    device = device_spec(name)
    assert device.name == name
    assert 0 < device.efficiency <= 1
    assert device.flops_32bit <= device.flops_16bit
    assert device.host_bandwidth > 0
    assert device.intra_host_bandwidth <= device.memory_bandwidth
    assert device.intra_host_alpha_s < device.inter_host_alpha_s


def test_a_device_of_ones_own() -> None:
    own = DeviceSpec("own", 2e12, 1e12, 1e9, 1e11, 1e10, 1e9)
    assert device_spec(own) is own
    assert ClusterSpec(1, 2, own).spec == own
    with pytest.raises(ArgumentError, match="device='h900' is not a preset; choose one of"):
        ClusterSpec(1, 8, "h900")
    with pytest.raises(ArgumentError, match=r"not a preset \(did you mean 'v100-32gb' or 'v100'"):
        ClusterSpec(1, 8, "V100-32G")


@pytest.mark.parametrize(
    ("figure", "needs"),
    [
        ({"name": ""}, r"name=''\): needs a name"),
        ({"flops_16bit": -1.0}, r"flops_16bit=-1.0\): needs a number > 0"),
        ({"memory_bytes": "80 GB"}, r"memory_bytes='80 GB'\): needs a number > 0"),
        ({"memory_bandwidth": float("nan")}, r"memory_bandwidth=nan\): needs a number > 0"),
        ({"host_bandwidth": float("inf")}, r"host_bandwidth=inf\): needs a number > 0"),
        ({"inter_host_alpha_s": -1e-6}, r"inter_host_alpha_s=-1e-06\): needs a number ≥ 0"),
        ({"efficiency": None}, r"efficiency=None\): needs a number > 0"),
        ({"efficiency": 70}, r"efficiency=70\): needs the share of the peak rate"),
        ({"patch_element_s": 0}, r"patch_element_s=0\): needs a number > 0"),
        ({"blocking_collectives": "no"}, r"blocking_collectives='no'\): needs True, False or None"),
    ],
)
def test_devices_that_cannot_be(figure, needs) -> None:
    with pytest.raises(ArgumentError, match=r"DeviceSpec\(" + needs):
        replace(DeviceSpec("own", 2e12, 1e12, 1e9, 1e11, 1e10, 1e9), **figure)
    free = DeviceSpec("free", 1, 1, 1, 1, 1, 1, intra_host_alpha_s=0.0, inter_host_alpha_s=0)
    assert free.intra_host_alpha_s == 0


def test_a_clusters_own_figures_replace_the_presets() -> None:
    cluster = ClusterSpec(2, 4, "a100-sxm", memory_bytes=1e9, host_bandwidth=5e9)
    assert cluster.num_devices == 8
    assert cluster.spec.memory_bytes == 1e9
    assert cluster.spec.host_bandwidth == 5e9
    assert cluster.spec.intra_host_bandwidth == DEVICES["a100-sxm"].intra_host_bandwidth


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_hosts": 0}, r"ClusterSpec\(num_hosts=0\): needs a whole number ≥ 1"),
        ({"devices_per_host": 2.0}, r"ClusterSpec\(devices_per_host=2.0\)"),
        ({"memory_bytes": 0}, r"ClusterSpec\(memory_bytes=0\): needs a number > 0"),
        ({"host_bandwidth": -1.0}, r"ClusterSpec\(host_bandwidth=-1.0\)"),
        ({"intra_host_bandwidth": float("nan")}, r"ClusterSpec\(intra_host_bandwidth=nan\)"),
    ],
)
def test_clusters_that_cannot_be(arguments, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        ClusterSpec(**{"num_hosts": 1, "devices_per_host": 8, **arguments})


def test_mesh_of_cluster_prices_the_axis_that_leaves_the_host() -> None:
    cluster = ClusterSpec(2, 4, "h100-sxm", memory_bytes=7e9, host_bandwidth=100e9)
    device = cluster.spec
    mesh = mesh_of_cluster(cluster, (2, 4))
    assert mesh.shape == (2, 4)
    assert mesh.device == device
    assert mesh.memory_bytes == 7e9
    assert mesh.alpha == (device.inter_host_alpha_s, device.intra_host_alpha_s)
    assert mesh.beta == (4 / 100e9, 1 / device.intra_host_bandwidth)
    assert mesh.joint_link == (device.inter_host_alpha_s, 1 / 100e9)


def test_groups_cut_by_the_end_of_a_host_pay_the_slow_link() -> None:
    """12 devices, 6 to a host, in rows of 4: the second row lies on both hosts."""
    cluster = ClusterSpec(2, 6, "h100-sxm")
    slow, fast = cluster.spec.inter_host_alpha_s, cluster.spec.intra_host_alpha_s
    assert mesh_of_cluster(cluster, (3, 4)).alpha == (slow, slow)
    assert mesh_of_cluster(cluster, (4, 3)).alpha == (slow, fast)
    assert mesh_of_cluster(cluster, (4,)).alpha == (fast,)  # the first row alone


def test_a_mesh_larger_than_the_cluster() -> None:
    message = r"mesh_shape=\(4, 4\) needs 16 devices; the cluster has 8 \(2 × 4\)"
    with pytest.raises(MeshError, match=message):
        mesh_of_cluster(ClusterSpec(2, 4), (4, 4))
