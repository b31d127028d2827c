"""What plans share on several ranks: moving state, one mesh of all, threads over the same links.

As `test_many_gpus`, which has the pipelines: real NCCL, on shares of one GPU if need be.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import autopar
from autopar.runtime.ranks.shared_gpu import Ranks
from autopar.runtime.transports.choose import NAMES
from tests.gpu.eight_ranks import RTOL, UNEQUAL, carried_by, eight, in_full_precision
from tests.remote.cases import (
    check_created,
    check_plan_to_plan,
    check_step,
    check_two_threads,
    pipeline,
    running_on,
)
from tests.remote.process_cluster import ProcessCluster

__all__ = ["eight", "in_full_precision"]  # fixtures

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("eight", NAMES, indirect=True)
def test_state_goes_from_plan_to_plan(eight: str) -> None:
    """From a pipeline to another with other meshes, to one mesh, and back. Two plans at a time:
    the processes of three are more than MPS has connections for."""
    unequal = pipeline(UNEQUAL, "1f1b_eager")
    check_plan_to_plan("mlp-tiny", pipeline(2), unequal, rtol=RTOL)
    check_plan_to_plan("mlp-tiny", unequal, autopar.ShardParallel((8,)), rtol=RTOL)


@pytest.mark.parametrize("eight", ["nccl"], indirect=True)
def test_one_mesh_of_eight(eight: str) -> None:
    executable = check_step("gpt-tiny", autopar.ShardParallel((8,)), RTOL)
    assert [len(mesh.devices) for mesh in executable.meshes] == [8]
    check_step("gpt-tiny", autopar.ShardParallel((2, 4), num_micro_batches=2), RTOL)


@pytest.mark.parametrize("eight", ["nccl"], indirect=True)
def test_state_is_created_on_the_stages(eight: str) -> None:
    check_created("mlp-tiny", pipeline(2), RTOL)


@pytest.mark.parametrize("eight", NAMES, indirect=True)
def test_two_threads_with_plans_over_the_same_links(eight: str) -> None:
    check_two_threads("mlp-tiny", [pipeline(2), pipeline(2, "gpipe", 2)], RTOL)


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b_eager"])
def test_two_ranks(ranks: Callable[[int], Ranks], schedule: str) -> None:
    of_two = ranks(2)
    with running_on(ProcessCluster(2, 1, of_two), carried_by("nccl", of_two)):
        executable = check_step("gpt-tiny", pipeline(2, schedule), RTOL)
        assert [len(mesh.places) for mesh in executable.meshes] == [1, 1]
        if schedule == "1f1b":
            check_plan_to_plan("mlp-tiny", pipeline(2), autopar.ShardParallel((2,)), rtol=RTOL)


def test_four_ranks(ranks: Callable[[int], Ranks]) -> None:
    of_four = ranks(4)
    with running_on(ProcessCluster(4, 1, of_four), carried_by("nccl", of_four)):
        executable = check_step("gpt-tiny", pipeline(2), RTOL)
        assert [len(mesh.places) for mesh in executable.meshes] == [2, 2]
        check_step("mlp-tiny", pipeline([(1, 1), (1, 1), (2, 1)], "zero_bubble"), RTOL)
        check_step("moe-tiny", autopar.ShardParallel((4,)), RTOL)
