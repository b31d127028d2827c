"""Pipelines in four real processes of the user's own: as `jax.jit` has it, saved and restored, with
an error in all of them if one brings another plan, and with the name of one that is killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("multi_controller_pipelines.py")
NUM_PROCESSES = 4
LIMIT_S = 500
KILLED = -9
SCENARIOS = [
    "two_stages",
    "four_stages",
    "with_loader_and_created_state",
    "checkpoint",
    "another_plan",
    "placed_arrays",
    "traced",
]


def run_processes(
    folder: Path, scenarios: Sequence[str], codes: Sequence[Sequence[int]]
) -> list[dict[str, Any] | None]:
    """What every process says of every scenario; `codes`: the exit codes that each may have."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
        "PJRT_NPROC": "8",
        "CHECKPOINTS": str(folder / "checkpoints"),
    }
    processes = []
    try:
        for process in range(NUM_PROCESSES):
            with (folder / f"log_{process}").open("w") as log:
                own = [process, NUM_PROCESSES, port, folder / f"outcomes_{process}", *scenarios]
                command = [sys.executable, str(SCRIPT), *map(str, own)]
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
                )
        found = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"log_{p}").read_text()[-3000:] for p in range(NUM_PROCESSES))
    assert all(code in allowed for code, allowed in zip(found, codes, strict=True)), (found, logs)
    files = [folder / f"outcomes_{p}" for p in range(NUM_PROCESSES)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_processes(tmp_path_factory.mktemp("four"), SCENARIOS, [[0]] * NUM_PROCESSES)


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
def test_a_trace_is_refused_and_the_step_goes_on(four):
    for own in four:
        assert "does not record pipelines" in own["traced"].get("refused", ""), own["traced"]
        assert own["traced"]["loss"] == four[0]["traced"]["loss"]


@pytest.mark.ci
def test_a_killed_process_is_named_in_all_others(tmp_path):
    outcomes = run_processes(tmp_path, ["a_killed_process"], [[0, 1]] * 3 + [[KILLED]])
    for own in outcomes[:-1]:
        assert own is not None
        found = own["a_killed_process"]
        assert "Process 3 died" in found.get("killed", ""), found
        assert found["after_s"] < 60


@pytest.mark.slow
def test_a_gpt_in_four_processes(tmp_path):
    outcomes = run_processes(tmp_path, ["gpt"], [[0]] * NUM_PROCESSES)
    assert_as_on_one_device(outcomes, "gpt")
