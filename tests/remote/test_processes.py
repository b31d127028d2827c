"""Steps on worker processes: the CPU twins of `tests/gpu/test_many_gpus.py`."""

from __future__ import annotations

import pytest

import autopar
from tests.remote.cases import (
    check_plan_to_plan,
    check_room_is_made,
    check_step,
    pipeline,
    running_on,
)
from tests.remote.process_cluster import ProcessCluster


@pytest.mark.ci
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("1f1b_eager", marks=pytest.mark.slow)])
def test_two_processes_are_two_stages(schedule: str) -> None:
    with running_on(ProcessCluster(2, 1), "jax_transfer"):
        executable = check_step("mlp-tiny", pipeline(2, schedule))
        assert [len(mesh.places) for mesh in executable.meshes] == [1, 1]


@pytest.mark.slow
def test_four_processes_are_two_meshes() -> None:
    with running_on(ProcessCluster(4, 1), "jax_transfer"):
        executable = check_step("gpt-tiny", pipeline(2))
        assert [len(mesh.places) for mesh in executable.meshes] == [2, 2]


@pytest.mark.slow
def test_four_processes_of_two_devices() -> None:
    with running_on(ProcessCluster(4, 2), "jax_transfer"):
        check_step("gpt-tiny", pipeline(4))
        check_step("gpt-tiny", autopar.ShardParallel((2, 4)))


@pytest.mark.slow
def test_a_host_of_two_devices_as_two_processes() -> None:
    """As where ranks share a GPU."""
    with running_on(ProcessCluster(2, 2, devices_per_process=1), "jax_transfer"):
        executable = check_step("mlp-tiny", pipeline(2))
        assert [len(mesh.places) for mesh in executable.meshes] == [2, 2]
        assert {place.host for place in executable.meshes[1].places} == {1}


@pytest.mark.slow
def test_two_processes_are_one_mesh() -> None:
    with running_on(ProcessCluster(2, 1), "jax_transfer"):
        executable = check_step("gpt-tiny", autopar.ShardParallel((2,)))
        assert [len(mesh.places) for mesh in executable.meshes] == [2]


@pytest.mark.slow
def test_state_goes_from_plan_to_plan() -> None:
    with running_on(ProcessCluster(2, 1), "jax_transfer"):
        check_plan_to_plan("mlp-tiny", pipeline(2), autopar.ShardParallel((2,)))


@pytest.mark.ci
def test_a_mesh_that_nobody_uses_makes_room() -> None:
    cluster = ProcessCluster(2, 1)
    cluster.ends_idle_groups = True  # as on GPUs
    with running_on(cluster, "jax_transfer") as remote:
        check_room_is_made(remote)
