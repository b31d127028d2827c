"""Steps on GPUs in several processes. On one GPU, two processes share it; what needs 2, 4 or 8 GPUs
is skipped where there are fewer. Each case has a CPU twin in `tests/remote/test_processes.py`.

Cases with more than one GPU have never been run by us: one GPU was all we had.
"""

from __future__ import annotations

import jax
import pytest

import autopar
from tests.remote.cases import check_plan_to_plan, check_step, pipeline, running_on
from tests.remote.process_cluster import ProcessCluster

NUM_GPUS = len(jax.devices("gpu")) if jax.default_backend() == "gpu" else 0
RTOL = 2e-3

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS == 0, reason="needs a GPU")]


def needs(num_gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        num_gpus > NUM_GPUS, reason=f"needs {num_gpus} GPUs, there are {NUM_GPUS}"
    )


@pytest.mark.parametrize("transport", ["cuda_ipc", "jax_transfer"])
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b_eager"])
def test_two_processes_on_one_gpu_are_two_stages(transport: str, schedule: str) -> None:
    with running_on(ProcessCluster(2, 1, num_gpus=1), transport):
        executable = check_step("gpt-tiny", pipeline(2, schedule), RTOL)
        assert [len(mesh.places) for mesh in executable.meshes] == [1, 1]


@needs(2)
@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc", "jax_transfer"])
@pytest.mark.parametrize("schedule", ["1f1b", "1f1b_eager"])
def test_two_processes_are_two_stages(transport: str, schedule: str) -> None:
    with running_on(ProcessCluster(2, 1, num_gpus=2), transport):
        check_step("gpt-tiny", pipeline(2, schedule), RTOL)


@needs(2)
def test_two_processes_are_one_mesh() -> None:
    with running_on(ProcessCluster(2, 1, num_gpus=2), "nccl"):
        check_step("gpt-tiny", autopar.ShardParallel((2,)), RTOL)


@needs(2)
def test_state_goes_from_plan_to_plan() -> None:
    with running_on(ProcessCluster(2, 1, num_gpus=2), "nccl"):
        check_plan_to_plan("mlp-tiny", pipeline(2), autopar.ShardParallel((2,)), RTOL)


@needs(4)
@pytest.mark.parametrize("transport", ["nccl", "jax_transfer"])
def test_four_processes_are_two_meshes(transport: str) -> None:
    with running_on(ProcessCluster(4, 1, num_gpus=4), transport):
        check_step("gpt-tiny", pipeline(2), RTOL)


@needs(8)
def test_four_processes_of_two_devices() -> None:
    with running_on(ProcessCluster(4, 2, num_gpus=8), "nccl"):
        check_step("gpt-tiny", pipeline(4), RTOL)
        check_step("gpt-tiny", autopar.ShardParallel((2, 4)), RTOL)
