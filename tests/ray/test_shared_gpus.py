"""Workers on shares of a GPU as Ray counts them, on a machine that need not have any: workers are
told to use the CPU, and everything else is as on a GPU that eight of them share."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import ClusterError
from autopar.runtime.ray.cluster import RayCluster
from tests.ray.conftest import TOY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:autopar has no preset"),  # there need not be a GPU
]

NCCL = "int ncclGetVersion(int* version) { *version = 23007; return 0; }\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with the name and the version of NCCL 2.30.7."""
    compiler = shutil.which("cc")
    assert compiler is not None, "needs a C compiler"
    folder = tmp_path_factory.mktemp("nccl")
    (folder / "nccl.c").write_text(NCCL)
    made = folder / "libnccl.so.2"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", made, folder / "nccl.c"], check=True, timeout=60
    )
    return str(made)


@pytest.fixture(scope="module")
def ray_of_two_gpus() -> Iterator[Any]:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=8,
            num_gpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    yield ray
    ray.shutdown()


def variables(library: str, shares: int) -> dict[str, str]:
    """Those of `SharedGpu.environment()`, but on the CPU."""
    return {
        "JAX_PLATFORMS": "cpu",
        "LD_PRELOAD": library,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "JAX_LOCAL_DEVICE_IDS": "0",
        "AUTOPAR_RANKS_PER_GPU": str(shares),
    }


def cluster(num_hosts: int | None, devices: int | None, env: dict[str, str]) -> RayCluster:
    return RayCluster(None, num_hosts, devices, env=env, start_limit_s=60, executor=TOY)


def asked(group: Any, command: str, *args: Any) -> list[Any]:
    replies = group.submit(command, [args] * len(group.workers))
    return [reply.result(60) for reply in replies]


def test_workers_on_shares(ray_of_two_gpus: Any, library: str) -> None:
    with cluster(3, 1, variables(library, 2)) as made:
        assert made.platform == "gpu"
        assert (made.spec.num_hosts, made.spec.devices_per_host) == (3, 1)
        assert ray_of_two_gpus.available_resources().get("GPU", 0) == 0, "whole GPUs are reserved"
        whole, others = made.groups([(0, 1, 2), (1, 2)])  # overlapping ones need no room
        assert asked(whole, "environment", "CUDA_VISIBLE_DEVICES") == ["0", "0", "1"]
        assert asked(others, "environment", "CUDA_VISIBLE_DEVICES") == ["0", "1"]
        fractions = asked(whole, "environment", "XLA_PYTHON_CLIENT_MEM_FRACTION")
        assert fractions == ["0.45"] * 3
        assert asked(whole, "sum_over_mesh") == [3.0] * 3
        # The dynamic linker has read LD_PRELOAD: it is more than a variable.
        for maps in asked(whole, "mapped_files"):
            assert library in maps
        assert {worker.hello.versions.nccl for worker in whole.workers} == {"2.30.7"}


def test_all_shares_are_the_default(ray_of_two_gpus: Any, library: str) -> None:
    with cluster(None, None, variables(library, 4)) as made:
        assert (made.spec.num_hosts, made.spec.devices_per_host) == (8, 1)
        assert made.spec.memory_bytes is not None


def test_one_worker_cannot_have_two_shares(ray_of_two_gpus: Any, library: str) -> None:
    with pytest.raises(ClusterError, match="devices_per_host=1 and num_hosts=4"):
        cluster(2, 2, variables(library, 2))


def test_a_library_that_is_not_there(ray_of_two_gpus: Any, tmp_path: Path) -> None:
    env = variables(str(tmp_path / "libnccl.so.2"), 2)
    with cluster(1, 1, env) as made, pytest.raises(ClusterError, match="started without it"):
        made.groups([(0,)])
