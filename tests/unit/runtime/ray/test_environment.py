"""What a worker's environment holds, and versions that differ."""

from dataclasses import replace

import pytest

from autopar.errors import ArgumentError, ClusterError
from autopar.runtime.ranks.shared_gpu import CpuRanks
from autopar.runtime.ray.environment import (
    Versions,
    check_environment,
    check_preloaded,
    check_versions,
    preloaded_nccl,
    shares_per_gpu,
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
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert env["JAX_PLATFORMS"] == "cuda,cpu"
    assert env["XLA_FLAGS"] == "--xla_a=1"


def test_what_the_user_wants_counts_first():
    wanted = {"XLA_FLAGS": "--xla_b=2", "NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0", "A": "b"}
    env = worker_environment(DRIVER, wanted, "gpu", 1, ["1"])
    assert env["XLA_FLAGS"] == "--xla_b=2"
    assert env["NCCL_DEBUG"] == "WARN"
    assert env["CUDA_VISIBLE_DEVICES"] == "0"
    assert env["A"] == "b"


# As `SharedGpu.environment()` has them, for rank 0.
SHARE = {
    "LD_PRELOAD": "/nccl/libnccl.so.2",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps",
    "CUDA_VISIBLE_DEVICES": "0",
    "JAX_LOCAL_DEVICE_IDS": "0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "AUTOPAR_RANKS_PER_GPU": "8",
}
OF_EVERY_RANK = {name: SHARE[name] for name in SHARE if not name.endswith(("DEVICES", "IDS"))}


@pytest.mark.parametrize("how", ["wanted", "inherited"])
def test_shares_of_gpus(how):
    driver, wanted = ({}, SHARE) if how == "wanted" else (SHARE, {})
    env = worker_environment(driver, wanted, "gpu", 1, ["3"], 8)
    assert env == OF_EVERY_RANK | {
        "CUDA_VISIBLE_DEVICES": "3",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1125",
        "JAX_PLATFORMS": "cuda,cpu",
        "XLA_FLAGS": "",
    }


def test_a_given_share_of_memory_counts():
    wanted = SHARE | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}
    env = worker_environment(DRIVER, wanted, "gpu", 1, ["0"], 8)
    assert env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.05"


def test_a_driver_that_shares_nothing_keeps_its_libraries():
    env = worker_environment(DRIVER | {"LD_PRELOAD": "/lib/libmine.so"}, {}, "gpu", 1, ["0"])
    assert "LD_PRELOAD" not in env


def test_ranks_on_the_cpu_have_the_devices_that_the_cluster_gives():
    env = worker_environment({}, CpuRanks(2, 1).environment(), "cpu", 4)
    assert "JAX_NUM_CPU_DEVICES" not in env
    assert env["XLA_FLAGS"].endswith("--xla_force_host_platform_device_count=4")


def test_how_many_share_a_gpu():
    assert shares_per_gpu({}, {}) == 1
    assert shares_per_gpu({"AUTOPAR_RANKS_PER_GPU": "4"}, {}) == 4
    assert shares_per_gpu({"AUTOPAR_RANKS_PER_GPU": "4"}, {"AUTOPAR_RANKS_PER_GPU": "2"}) == 2
    for wrong in ("0", "-1", "half", ""):
        with pytest.raises(ArgumentError, match="AUTOPAR_RANKS_PER_GPU="):
            shares_per_gpu({}, {"AUTOPAR_RANKS_PER_GPU": wrong})


def test_an_nccl_that_was_not_preloaded():
    assert preloaded_nccl("/lib/libmine.so") == ""
    check_preloaded("/lib/libmine.so")
    with pytest.raises(ClusterError, match=r"/none/libnccl\.so\.2, but .* started without it"):
        check_preloaded("/lib/libmine.so:/none/libnccl.so.2")


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
