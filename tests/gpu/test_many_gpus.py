"""Steps on 2, 4 and 8 ranks: on GPUs of their own where the host has enough, else on shares of one.

Nothing is skipped: a rank is a process with one device either way (`ranks` of `conftest.py`), and
NCCL between them is the real one. CPU twins of single cases are in `tests/remote`; all bodies run
on CPU processes with AUTOPAR_TEST_RANKS=cpu, where each transport is JAX's.

Every transport has one cluster of eight ranks, on two hosts of four, whose workers serve all its
cases. The full product of transports, schedules, stages and models would take hours, so `CASES` is
a covering set: every transport with every schedule, every schedule with at least two divisions of
the ranks into meshes (4+4, 2+2+2+2, and the unequal 2+2+4), and every tiny model at least once.
Plans on one mesh, where transports carry nothing, run once. Losses of three steps must equal those
of `jax.jit`: products are computed in full precision on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

import autopar
from autopar.ir.schedule import SCHEDULES
from autopar.runtime.ranks.shared_gpu import Ranks
from autopar.runtime.transports.choose import NAMES
from examples.models import MODELS
from tests.remote.cases import (
    check_created,
    check_inference,
    check_plan_to_plan,
    check_step,
    check_two_threads,
    pipeline,
    running_on,
)
from tests.remote.process_cluster import ProcessCluster

RTOL = 2e-3
UNEQUAL = ((1, 2), (1, 2), (1, 4))
SIX = UNEQUAL * 2  # two stages on each of three meshes

pytestmark = pytest.mark.gpu

# (transport, schedule, stages, model)
CASES: list[tuple[str, str, Any, str]] = [
    ("nccl", "gpipe", 2, "bert-tiny"),
    ("nccl", "1f1b", 4, "gpt-tiny"),
    ("nccl", "1f1b_eager", UNEQUAL, "llama-tiny"),
    ("nccl", "interleaved_1f1b", SIX, "mlp-tiny"),
    ("nccl", "zero_bubble", 2, "moe-tiny"),
    ("nccl", "inference", 2, "mlp-tiny"),
    ("cuda_ipc", "gpipe", 4, "mlp-tiny"),
    ("cuda_ipc", "1f1b", UNEQUAL, "gpt-tiny-scan"),
    ("cuda_ipc", "1f1b_eager", 2, "bert-layers-tiny"),
    ("cuda_ipc", "interleaved_1f1b", 4, "mlp-tiny"),
    ("cuda_ipc", "zero_bubble", UNEQUAL, "mlp-tiny"),
    ("cuda_ipc", "inference", UNEQUAL, "mlp-tiny"),
    ("jax_transfer", "gpipe", UNEQUAL, "wresnet-tiny"),
    ("jax_transfer", "1f1b", 2, "llama-tiny-scan"),
    ("jax_transfer", "1f1b_eager", 2, "vit-tiny"),
    ("jax_transfer", "interleaved_1f1b", 4, "mlp-tiny"),
    ("jax_transfer", "zero_bubble", 2, "dlrm-tiny"),
    ("jax_transfer", "inference", 4, "mlp-tiny"),
]


@pytest.fixture(autouse=True, scope="module")
def _in_full_precision() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield


def carried_by(transport: str, ranks: Ranks) -> str:
    return transport if ranks.platform == "gpu" else "jax_transfer"


@pytest.fixture(scope="module")
def eight(request: pytest.FixtureRequest, ranks: Callable[[int], Ranks]) -> Iterator[str]:
    """Eight ranks, connected by a transport."""
    of_eight = ranks(8)
    with running_on(ProcessCluster(2, 4, of_eight), carried_by(request.param, of_eight)):
        yield request.param


def method_of(schedule: str, stages: Any, name: str) -> autopar.PipeshardParallel:
    # BatchNorm's statistics are those of a micro-batch.
    return pipeline(stages, schedule, 1 if name.startswith("wresnet") else 4)


def test_the_cases_cover_what_they_must() -> None:
    pairs = {(transport, schedule) for transport, schedule, _, _ in CASES}
    assert pairs == {(transport, schedule) for transport in NAMES for schedule in SCHEDULES}
    for schedule in SCHEDULES:
        assert len({case[2] for case in CASES if case[1] == schedule}) >= 2
    assert {name for *_, name in CASES} == {name for name in MODELS if "-tiny" in name}


@pytest.mark.parametrize(
    ("eight", "schedule", "stages", "name"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-{case[2]}-{case[3]}".replace(" ", ""))
        for case in CASES
    ],
    indirect=["eight"],
)
def test_a_pipeline_equals_jit(eight: str, schedule: str, stages: Any, name: str) -> None:
    method = method_of(schedule, stages, name)
    if schedule == "inference":
        check_inference(method, RTOL)
        return
    executable = check_step(name, method, RTOL)
    sizes = [len(mesh.devices) for mesh in executable.meshes]
    assert sum(sizes) == 8
    if stages == UNEQUAL:
        assert sizes == [2, 2, 4]


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
