"""Pipelines in four real processes of the user's own: as `jax.jit` has it, saved and restored, with
an error in all of them if one brings another plan, and with the name of one that is killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.runtime.ranks.launch import run_ranks
from autopar.runtime.ranks.shared_gpu import CpuRanks
from tests.equivalence.controllers import LIMIT_S, ROOT, run_processes

SCRIPT = Path(__file__).with_name("multi_controller_pipelines.py")
KILLED, ABORTED = -9, -6
SCENARIOS = [
    "two_stages",
    "four_stages",
    "scanned",
    "scans_of_scans",
    "by_default",
    "out_of_memory_at_first",
    "across_processes",
    "with_loader_and_created_state",
    "checkpoint",
    "another_plan",
    "placed_arrays",
    "traced",
]


def run_four(
    folder: Path, scenarios: Sequence[str], codes: Sequence[Collection[int]] | None = None
) -> list[dict[str, Any]]:
    return run_processes(
        SCRIPT,
        folder,
        4,
        scenarios,
        devices_per_process=1,
        env={"PJRT_NPROC": "8", "CHECKPOINTS": str(folder / "checkpoints")},
        codes=codes,
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_four(tmp_path_factory.mktemp("four"), SCENARIOS)


def assert_as_on_one_device(outcomes: Sequence[Any], scenario: str) -> None:
    for own in outcomes:
        found = own[scenario]
        assert "losses" in found, found
        np.testing.assert_allclose(found["losses"], found["wanted"], rtol=2e-5)
        assert found["losses"] == outcomes[0][scenario]["losses"]
        assert found["losses"][-1] != found["losses"][-2]


@pytest.mark.ci
@pytest.mark.parametrize(("scenario", "num_stages"), [("two_stages", 2), ("four_stages", 4)])
def test_three_steps_are_those_of_jit_in_every_process(four, scenario, num_stages):
    assert_as_on_one_device(four, scenario)
    for own in four:
        assert own[scenario]["worst"] < 1e-6
        assert own[scenario]["num_stages"] == num_stages
        assert own[scenario]["shown"].startswith("DistributedArray(float32[16, 16]")


@pytest.mark.ci
def test_the_default_method_finds_a_pipeline(four):
    assert_as_on_one_device(four, "by_default")
    for own in four:
        assert own["by_default"]["worst"] < 1e-5
        assert own["by_default"]["num_stages"] > 1


@pytest.mark.ci
def test_a_first_run_for_which_one_worker_has_no_room_is_planned_again_by_all(four):
    assert_as_on_one_device(four, "out_of_memory_at_first")
    for own in (outcome["out_of_memory_at_first"] for outcome in four):
        assert own["num_stages"] == 2
        assert len(own["asked"]) == 2  # of both plans; the second needs less
        assert own["asked"][1] < own["asked"][0]
        assert set(own["begun"]) == {2}  # no worker began the first
        assert len(own["replanned"]) == 1 and "ran out of memory" in own["replanned"][0]


@pytest.mark.ci
def test_arrays_that_span_processes_are_planned_on_one_mesh(four):
    for own in four:
        assert own["across_processes"]["num_stages"] == 1, own["across_processes"]
        assert own["across_processes"]["loss"] == pytest.approx(four[0]["two_stages"]["losses"][0])


@pytest.mark.ci
@pytest.mark.parametrize(
    ("scenario", "rows"),
    [
        ("scanned", [[[0, 2]], [[2, 3]]]),
        ("scans_of_scans", [[[0, 1], [0, 2]], [[1, 2], [0, 1]], [[1, 2], [1, 2]]]),
    ],
)
def test_rows_of_stacked_parameters_are_where_their_layers_run(four, scenario, rows):
    assert_as_on_one_device(four, scenario)
    for own in four:
        found = own[scenario]
        assert found["rows"] == rows
        np.testing.assert_allclose(found["moved"], [found["after"]] * 2, rtol=2e-5)


@pytest.mark.ci
def test_state_is_created_evaluated_and_loaded_in_its_stages(four):
    assert_as_on_one_device(four, "with_loader_and_created_state")


@pytest.mark.ci
def test_a_checkpoint_is_restored_by_any_plan(four):
    for own in four:
        found = own["checkpoint"]
        assert "losses_by_plan" in found, found
        by_plan = found["losses_by_plan"]
        assert by_plan["same"] == by_plan["went on"]
        for name in ("four", "one mesh"):
            np.testing.assert_allclose(by_plan[name], by_plan["went on"], rtol=2e-5)


@pytest.mark.ci
def test_another_plan_is_an_error_in_every_process(four):
    for own in four:
        found = own["another_plan"]
        assert found.get("error") == "PlanError", found
        assert "process 3: plan is" in found["message"]


@pytest.mark.ci
def test_what_one_process_placed_is_refused_not_guessed(four):
    for own in four:
        assert own["placed_arrays"].get("error") == "ArgumentError", own["placed_arrays"]
        assert "was placed by this process" in own["placed_arrays"]["message"]


@pytest.mark.ci
def test_a_trace_has_what_all_processes_ran(four):
    """By one clock: with several, the span of a step would be as long as they differ."""
    for own in four:
        assert "traces" in own["traced"], own["traced"]
        for found in own["traced"]["traces"]:
            assert found["notes"] == []
            assert found["stages"] == [[0, 1, 2, 3]] * 2
            assert len(set(found["num_runs"])) == 1 and found["num_runs"][0] >= 4 * 4
            assert all(0 < seconds < 60 for seconds in found["spans_s"])
        assert own["traced"]["loss"] == four[0]["traced"]["loss"]


def launched(
    folder: Path, num_ranks: int, devices_per_rank: int, scenarios: Sequence[str]
) -> list[dict[str, Any]]:
    """What ranks say of scenarios, each started by `launch` with a core of its own."""
    script = f'exec {sys.executable} {SCRIPT} $RANK $WORLD_SIZE $MASTER_PORT outcomes_$RANK "$@"'
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PJRT_NPROC", "XLA_FLAGS"):
            patch.delenv(name, raising=False)
        patch.setattr(os, "cpu_count", lambda: num_ranks)
        with CpuRanks(num_ranks, devices_per_rank) as ranks:
            environment = ranks.environment()
            assert environment["PJRT_NPROC"] == "1"
            assert "--xla_cpu_multi_thread_eigen=false" in environment["XLA_FLAGS"]
            results = run_ranks(
                ["sh", "-c", script, "sh", *scenarios],
                ranks,
                limit_s=LIMIT_S,
                env={"PYTHONPATH": str(ROOT)},
                folder=folder,
            )
    assert not any(result.failed for result in results), results[0].output[-3000:]
    return [json.loads((folder / f"outcomes_{rank}").read_text()) for rank in range(num_ranks)]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("num_ranks", "devices_per_rank"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_launched_ranks_have_threads_for_collectives_and_transfers(
    tmp_path, num_ranks, devices_per_rank
):
    """Two stages of four devices, in one process each and in two."""
    outcomes = launched(tmp_path, num_ranks, devices_per_rank, ["gpt", "scanned_gpt"])
    for scenario in ("gpt", "scanned_gpt"):
        assert_as_on_one_device(outcomes, scenario)
        assert {own[scenario]["num_stages"] for own in outcomes} == {2}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("num_ranks", "devices_per_rank"), [(4, 1), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_hundreds_of_steps_need_a_thread_per_device(tmp_path, num_ranks, devices_per_rank):
    """Several steps are under way, with collectives of a stage in two processes, or of two stages
    in one."""
    for own in launched(tmp_path, num_ranks, devices_per_rank, ["many_steps"]):
        assert "2" in own["many_steps"], own["many_steps"]
        for num_stages, num_steps in (("2", 200), ("4", 50)):
            found = own["many_steps"][num_stages]
            assert found["num_stages"] == int(num_stages) and len(found["losses"]) == num_steps
            np.testing.assert_allclose(found["losses"][:20], found["wanted"][:20], rtol=1e-4)
            np.testing.assert_allclose(found["losses"], found["wanted"], rtol=1e-2)


@pytest.mark.ci
def test_a_killed_process_is_named_in_all_others(tmp_path):
    outcomes = run_four(tmp_path, ["a_killed_process"], [[0, 1]] * 3 + [[KILLED]])
    for own in outcomes[:-1]:
        found = own["a_killed_process"]
        assert "Process 3 died" in found.get("killed", ""), found
        assert found["after_s"] < 60


@pytest.mark.ci
def test_that_process_0_was_killed_is_said_by_all_others(tmp_path):
    """By an error, or on standard error before JAX ends them."""
    run_four(tmp_path, ["the_first_is_killed"], [[KILLED]] + [[0, 1, ABORTED]] * 3)
    for process in range(1, 4):
        assert "Process 0 died" in (tmp_path / f"log_{process}").read_text()


@pytest.mark.slow
def test_a_gpt_in_four_processes(tmp_path):
    outcomes = run_four(tmp_path, ["gpt"])
    assert_as_on_one_device(outcomes, "gpt")
