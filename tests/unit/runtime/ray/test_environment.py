"""What a worker's environment holds, and versions that differ."""

from dataclasses import replace

import pytest

from autopar.errors import ArgumentError, ClusterError
from autopar.runtime.ray.environment import (
    Versions,
    check_environment,
    check_versions,
    versions_here,
    worker_environment,
)

DRIVER = {
    "HOME": "/home/user",
    "NCCL_DEBUG": "INFO",
    "JAX_COMPILATION_CACHE_DIR": "/cache",
    "JAX_PLATFORMS": "tpu",
    "JAX_PROCESS_ID": "3",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
    "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8",
}


def test_virtual_devices():
    env = worker_environment(DRIVER, {}, "cpu", 2)
    assert env == {
        "NCCL_DEBUG": "INFO",
        "JAX_COMPILATION_CACHE_DIR": "/cache",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=2",
    }


def test_gpus():
    env = worker_environment(DRIVER, {}, "gpu", 2, ["4", "7"])
    assert env["CUDA_VISIBLE_DEVICES"] == "4,7"
    assert env["JAX_PLATFORMS"] == "cuda,cpu"
    assert env["XLA_FLAGS"] == "--xla_a=1"


def test_what_the_user_wants_counts_first():
    wanted = {"XLA_FLAGS": "--xla_b=2", "NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0", "A": "b"}
    env = worker_environment(DRIVER, wanted, "gpu", 1, ["1"])
    assert env["XLA_FLAGS"] == "--xla_b=2"
    assert env["NCCL_DEBUG"] == "WARN"
    assert env["CUDA_VISIBLE_DEVICES"] == "0"
    assert env["A"] == "b"


@pytest.mark.parametrize("env", [{"A": 1}, {1: "a"}, ["A=b"], "A=b"])
def test_variables_are_texts(env):
    with pytest.raises(ArgumentError, match="init\\(env="):
        check_environment(env)


VERSIONS = Versions("3.11", "0.1.0", "0.10.2", "0.10.2", "2.60.0", "", "")


def test_equal_versions():
    check_versions(VERSIONS, [("a", VERSIONS), ("b", VERSIONS)])
    # The driver needs neither Ray's version nor a GPU like the workers'.
    workers = replace(VERSIONS, cuda="nvidia-cuda-runtime-cu12 12.9", nccl="2.28")
    check_versions(VERSIONS, [("a", workers), ("b", workers)])


@pytest.mark.parametrize("name", ["python", "autopar", "jax", "jaxlib"])
def test_the_driver_differs(name):
    other = replace(VERSIONS, **{name: "9.9"})
    with pytest.raises(ClusterError, match=f"{name} differ: .* on the driver, 9.9 on node b"):
        check_versions(VERSIONS, [("node a", VERSIONS), ("node b", other)])


@pytest.mark.parametrize("name", ["ray", "cuda", "nccl"])
def test_workers_differ(name):
    other = replace(VERSIONS, **{name: "9.9"})
    with pytest.raises(ClusterError, match=f"{name} differ: .* on node a, 9.9 on node b"):
        check_versions(VERSIONS, [("node a", VERSIONS), ("node b", other)])


def test_versions_here():
    import jax

    import autopar

    here = versions_here()
    assert here.jax == jax.__version__
    assert here.autopar == autopar.__version__
    assert here.jaxlib and here.ray
