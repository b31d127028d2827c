"""Train steps of 8, 4, 2 and 1 ranks that a launcher started, each with one device, and checkpoints
that go from more ranks to fewer. One set of processes runs all checks of a count.

Run with `AUTOPAR_TEST_GPU=1 python -m pytest -m gpu tests/gpu`, or with AUTOPAR_TEST_RANKS=cpu on
any host.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.runtime.ranks.launch import run_ranks
from autopar.runtime.ranks.shared_gpu import Ranks, SharedGpu
from tests.gpu.conftest import ON_CPU

LIMIT_S = 1200.0 if ON_CPU else 300.0
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(LIMIT_S + 60)]

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("controller_program.py")
RTOL = 2e-4 if ON_CPU else 2e-3

TRAIN = {
    8: [
        "train mlp default",
        "train mlp 8",
        "train mlp 2x4",
        "train mlp zero3",
        "beside_training gpt-tiny 2x4",
        "data_loader mlp",
        "own_plans mlp 4x2",
    ],
    4: ["train mlp zero2", "train mlp 2x2", "train moe-tiny 4"],
    2: [
        "train mlp micro",
        "train wresnet-tiny data",
        "beside_training gpt-tiny split",
        "own_plans mlp split",
    ],
    1: ["train mlp default"],
}
# The type and text of the error in rank 0, then in the last rank.
ERRORS = {
    "another_shape": (
        "PlanError",
        "process 7: batch is 'float32[8, 8]', not 'float32[16, 8]'",
        "PlanError",
        "process 7: batch is 'float32[8, 8]', not 'float32[16, 8]'",
    ),
    "another_plan": (
        "PlanError",
        "process 7: plan is '(2, 4) ",
        "PlanError",
        "Let process 0 plan for all",
    ),
    "cannot_trace": (
        "PlanError",
        "process 7: OSError: no such tokenizer",
        "OSError",
        "no such tokenizer",
    ),
    "too_small_a_mesh": ("MeshError", "have 8 in total", "PlanError", "have 8 in total"),
}
# 8 ranks save after step 2, in the background, and after step 4; 4 ranks go on from both.
CHECKPOINTS = {
    8: ["checkpoints 2x4 0 4 2"],
    4: ["checkpoints zero3 2 4", "checkpoints zero3 4 6"],
    2: ["checkpoints split 6 8"],
    1: ["checkpoints default 8 10"],
}
OTHERS = {8: [*ERRORS, "after_errors", "full_disk"]}

Outcomes = list[dict[str, dict[str, Any]]]  # of each rank, by check


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("controllers")


def outcomes_of(ranks: Callable[[int], Ranks], folder: Path, count: int) -> Outcomes:
    checks = [*TRAIN[count], *CHECKPOINTS[count], *OTHERS.get(count, [])]
    command = [sys.executable, str(PROGRAM), str(folder), *checks]
    env = {"PYTHONPATH": str(ROOT)}
    results = run_ranks(command, ranks(count), limit_s=LIMIT_S, env=env)
    for result in results:
        assert not result.failed, f"rank {result.rank}:\n{result.output[-4000:]}"
    lines = [(folder / f"rank_{rank}.jsonl").read_text().splitlines() for rank in range(count)]
    return [{one["check"]: one for one in map(json.loads, own)} for own in lines]


@pytest.fixture(scope="module")
def eight(ranks, folder) -> Outcomes:
    return outcomes_of(ranks, folder, 8)


@pytest.fixture(scope="module")
def four(ranks, folder, eight) -> Outcomes:
    return outcomes_of(ranks, folder, 4)


@pytest.fixture(scope="module")
def two(ranks, folder, four) -> Outcomes:
    return outcomes_of(ranks, folder, 2)


@pytest.fixture(scope="module")
def one(ranks, folder, two) -> Outcomes:
    return outcomes_of(ranks, folder, 1)


@pytest.fixture
def outcomes(request) -> Callable[[int], Outcomes]:
    """Of so many ranks, which run if no test has asked for them before."""
    fixtures = {8: "eight", 4: "four", 2: "two", 1: "one"}
    return lambda count: request.getfixturevalue(fixtures[count])


def each_rank(outcomes: Callable[[int], Outcomes], count: int, check: str) -> list[dict[str, Any]]:
    found = [own[check] for own in outcomes(count)]
    assert len(found) == count and all("losses" in own for own in found), found
    return found


def cases(by_count: dict[int, list[str]]) -> list[Any]:
    return [
        pytest.param(count, check, id=f"{count}: {check}")
        for count, checks in by_count.items()
        for check in checks
    ]


@pytest.mark.parametrize(("count", "check"), cases(TRAIN))
def test_losses_are_those_of_one_device_and_the_plan_is_one(outcomes, count, check):
    found = each_rank(outcomes, count, check)
    np.testing.assert_allclose(found[0]["losses"], found[0]["wanted"], rtol=RTOL)
    assert found[0]["losses"][-1] != found[0]["losses"][-2]
    for own in found:
        assert own["losses"] == found[0]["losses"]  # bit for bit, in every rank
        assert own["plan"] == found[0]["plan"]
        assert np.prod(own["mesh"]) == count
        assert own["collectives"] or check.endswith("default")  # copies everywhere may be best


@pytest.mark.parametrize("count", TRAIN)
def test_ranks_of_one_host_are_one_host_with_the_memory_they_have(ranks, outcomes, count):
    for check in TRAIN[count]:
        if check.startswith("own_plans"):  # for a cluster that the test describes
            continue
        for own in each_rank(outcomes, count, check):
            assert own["cluster"] == [1, count]
            if not ON_CPU:
                assert own["memory_bytes"] <= own["limit"]
            if not ON_CPU and isinstance(ranks(count), SharedGpu):
                assert own["memory_bytes"] == own["limit"]


@pytest.mark.parametrize(
    ("count", "check"),
    [(8, "train mlp zero3"), (8, "beside_training gpt-tiny 2x4"), (4, "train mlp 2x2")],
)
def test_ranks_hold_parts_of_the_state(outcomes, count, check):
    assert all(own["held_share"] < 0.6 for own in each_rank(outcomes, count, check))


def test_every_rank_loads_its_own_rows(outcomes):
    for own in each_rank(outcomes, 8, "data_loader mlp"):
        assert len(own["rows"]) >= 3 and all(rows == [2, 16] for rows in own["rows"])


@pytest.mark.parametrize(("count", "check"), [(8, "own_plans mlp 4x2"), (2, "own_plans mlp split")])
def test_plans_made_in_each_rank_are_one_plan_in_different_files(outcomes, count, check):
    found = each_rank(outcomes, count, check)
    assert len({own["own_plan"] for own in found}) == 1
    assert len({own["own_file"] for own in found}) == count


@pytest.mark.parametrize("check", ERRORS)
def test_an_error_of_one_rank_is_raised_in_all(outcomes, check):
    found = [own[check] for own in outcomes(8)]
    assert all("error" in own for own in found), found
    first_type, first_text, last_type, last_text = ERRORS[check]
    assert (found[0]["error"], found[-1]["error"]) == (first_type, last_type)
    assert first_text in found[0]["message"] and last_text in found[-1]["message"]
    assert {own["error"] for own in found[1:-1]} == {"PlanError"}


def test_steps_work_after_errors(outcomes):
    losses = {own["after_errors"].get("loss") for own in outcomes(8)}
    assert len(losses) == 1 and None not in losses


# -- checkpoints


@pytest.mark.parametrize(("count", "check"), cases(CHECKPOINTS))
def test_training_goes_on_with_fewer_ranks(outcomes, count, check):
    """Checkpoints of 8 ranks are read by 4, theirs by 2, and theirs by 1."""
    found = each_rank(outcomes, count, check)
    first = int(check.split()[2])
    np.testing.assert_allclose(found[0]["losses"], found[0]["wanted"][first:], rtol=RTOL)
    assert all(own["losses"] == found[0]["losses"] for own in found)
    assert int(check.split()[3]) in found[0]["steps"]


def test_restored_states_are_in_shards(outcomes):
    for own in each_rank(outcomes, 4, "checkpoints zero3 4 6"):
        assert own["held_share"] < 0.6


def test_a_full_disk_in_one_rank_is_raised_in_all(outcomes):
    found = [own["full_disk"] for own in outcomes(8)]
    assert all("No space left" in own["raised"] and own["steps"] == [] for own in found), found
