"""Real processes that were started on their own and share one step: as one device would have it, by
one plan, and with an error in all of them if one does something else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.equivalence.controllers import run_processes

SCRIPT = Path(__file__).with_name("multi_controller.py")

EQUAL = [
    "by_default",
    "with_micro_batches",
    "with_split_weights",
    "with_data_loader",
    "with_own_rows",
    "with_keys_and_numbers",
    "with_created_state",
    "on_fewer_devices",
    "with_own_plans",
    "a_pipeline",
    "within_a_budget",
    "out_of_memory_at_first",
]

# scenario -> type and text of the error in process 0, then in the last process.
ERRORS = {
    "another_shape": (
        "PlanError",
        "process 1: batch['x'] is 'float32[8, 8]', not 'float32[16, 8]'",
        "PlanError",
        "process 1: batch['x'] is 'float32[8, 8]', not 'float32[16, 8]'",
    ),
    "another_program": (
        "PlanError",
        "not every process could take part (binding). process 1: the plan for mlp_step does not",
        "PlanError",
        "shapes agree but the traced programs differ",
    ),
    "another_constant": ("PlanError", "process 1: constants is", "PlanError", "constants is"),
    "another_method": (
        "PlanError",
        'process 1: method is "DataParallel(',
        "PlanError",
        'method is "DataParallel(',
    ),
    "another_plan": (
        "PlanError",
        "process 1: plan is '(2, 2) ",
        "PlanError",
        "not the same one. Processes that plan by themselves may find different plans",
    ),
    "a_plan_and_none": (
        "PlanError",
        "process 1: method is 'ParallelPlan', not 'None'; plan is '(2, 2) ",
        "PlanError",
        "Let process 0 plan for all: parallelize(method=None)",
    ),
    "another_donation": (
        "PlanError",
        'process 1: options is "StepOptions(',
        "PlanError",
        'process 1: options is "StepOptions(',
    ),
    "first_cannot_plan": (
        "OSError",
        "no such tokenizer",
        "PlanError",
        "step_fn: process 0 could not plan it: OSError: no such tokenizer",
    ),
    "last_cannot_trace": (
        "PlanError",
        "process 1: OSError: no such tokenizer",
        "OSError",
        "no such tokenizer",
    ),
    "too_small_a_mesh": (
        "MeshError",
        "mesh (2,) has 2 devices, but the processes have 4 in total",
        "PlanError",
        "mesh (2,) has 2 devices, but the processes have 4 in total",
    ),
    "too_small_a_budget": (
        "MemoryBudgetError",
        "more than the budget of 1000 B",
        "MemoryBudgetError",
        "num_micro_batches=2 or more keeps about 1/2",
    ),
    "unequal_shares": (
        "MeshError",
        "2 of process 0, 1 of process 1",
        "MeshError",
        "different numbers",
    ),
    "nobodys_devices": ("MeshError", "belongs to process 1", "MeshError", "belongs to process 1"),
    "mixed_devices": ("MeshError", "ordered by process: [0, 1, 0, 1]", "MeshError", "ordered"),
    "other_devices": ("PlanError", "process 1: devices is", "PlanError", "process 1: devices is"),
}
LAST = ("after_errors", "one_does_not_come")


def run_two_devices_each(
    folder: Path, count: int, scenarios: Sequence[str]
) -> list[dict[str, Any]]:
    return run_processes(SCRIPT, folder, count, scenarios, devices_per_process=2)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    return run_two_devices_each(folder, 2, [*EQUAL, *ERRORS, *LAST])


def assert_as_on_one_device(outcomes: Sequence[dict[str, Any]], scenario: str) -> None:
    found = [own[scenario] for own in outcomes]
    assert all("losses" in one for one in found), found
    for one in found:
        np.testing.assert_allclose(one["losses"], found[0]["wanted"], rtol=2e-5)
        assert one["losses"] == found[0]["losses"]  # bit for bit, in every process
        assert one["plan"] == found[0]["plan"]
    assert found[0]["losses"][-1] != found[0]["losses"][0]


@pytest.mark.parametrize("scenario", [*EQUAL, "after_errors"])
def test_losses_are_those_of_one_device_and_the_plan_is_one(two, scenario):
    assert_as_on_one_device(two, scenario)


def test_meshes_span_all_processes(two):
    assert np.prod(two[0]["by_default"]["mesh"]) == 4
    assert np.prod(two[0]["on_fewer_devices"]["mesh"]) == 2


def test_processes_of_one_machine_are_one_host(two):
    assert all(own["by_default"]["hosts"] == [1, 4] for own in two)
    assert all(own["on_fewer_devices"]["hosts"] == [1, 2] for own in two)


def test_a_plan_that_one_process_counts_over_its_budget_is_made_again_by_all(two):
    first, last = (own["within_a_budget"] for own in two)
    assert max(first["own_shares"]) < 1 < last["own_shares"][0]
    for own in (first, last):
        assert own["limit"] == 1 and own["share"] < 1 and own["corrected"]
        assert len(own["replanned"]) == 1 and "by XLA, over the limit of" in own["replanned"][0]


def test_a_first_run_for_which_one_process_has_no_room_is_planned_again_by_all(two):
    for own in (outcome["out_of_memory_at_first"] for outcome in two):
        assert own["tries"] == 2 and not own["first_ran"]
        assert len(own["replanned"]) == 1 and "ran out of memory" in own["replanned"][0]


def test_a_pipeline_knows_its_limit(two):
    assert all(own["a_pipeline"]["limit"] == 1e9 for own in two)


def test_plans_made_in_each_process_are_one_plan_in_different_files(two):
    first, last = (own["with_own_plans"] for own in two)
    assert first["own_plan"] == last["own_plan"]
    assert first["own_file"] != last["own_file"]  # they hold the seconds that planning took


def test_state_is_made_in_shards_that_processes_share(two):
    assert not two[0]["with_created_state"]["is_whole"]


def test_every_process_loads_its_own_rows(two):
    for own in two:
        placed = own["with_data_loader"]["placed"]
        assert len(placed) >= 3
        assert all(one == [8, False] for one in placed)


@pytest.mark.parametrize("scenario", ERRORS)
def test_a_process_that_differs_is_an_error_in_all(two, scenario):
    first, last = two[0][scenario], two[-1][scenario]
    assert "error" in first and "error" in last, (first, last)
    *_, wanted_type, wanted_text = ERRORS[scenario]
    assert (first["error"], last["error"]) == (ERRORS[scenario][0], wanted_type)
    assert ERRORS[scenario][1] in first["message"]
    assert wanted_text in last["message"]


def test_errors_do_not_wait_for_limits(two):
    """The limits are minutes; what one process found out, the others know at once."""
    assert all(own[scenario]["seconds"] < 60 for own in two for scenario in ERRORS)


def test_messages_are_taken_away(two):
    assert all(own["after_errors"]["messages"] < 12 for own in two)


def test_a_process_that_does_not_come_is_named_after_the_limit(two):
    found = two[0]["one_does_not_come"]
    assert found["error"] == "PlanError"
    assert "process 1 did not arrive within 1 s" in found["message"]


@pytest.mark.slow
def test_a_gpt_in_two_processes(tmp_path):
    outcomes = run_two_devices_each(tmp_path, 2, ["gpt"])
    assert_as_on_one_device(outcomes, "gpt")
    assert not outcomes[0]["gpt"]["is_whole"]


@pytest.mark.slow
def test_processes_find_the_same_plan_of_a_gpt(tmp_path):
    """Each has its own hash seed, so a choice by the order of a set would differ."""
    outcomes = run_two_devices_each(tmp_path, 3, ["gpt_plans"])
    assert len({own["gpt_plans"]["own_plan"] for own in outcomes}) == 1
    assert len({str(own["gpt_plans"]["seconds_spent"]) for own in outcomes}) == 3


@pytest.mark.slow
def test_four_processes(tmp_path):
    equal = ["by_default", "with_split_weights", "with_data_loader", "with_created_state"]
    outcomes = run_two_devices_each(tmp_path, 4, [*equal, "another_shape"])
    for scenario in equal:
        assert_as_on_one_device(outcomes, scenario)
    for own in outcomes:
        assert "process 3: batch['x'] is 'float32[8, 8]'" in own["another_shape"]["message"]
