"""Plans measured on ranks: rows and summaries whose answer is known, failures, and resuming."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.compiler import plan_step
from autopar.ir.devices import DEVICES
from autopar.runtime.ranks.launch import RankResult
from benchmarks.shared_gpu.__main__ import MODELS
from benchmarks.shared_gpu.cases import CASES
from benchmarks.shared_gpu.driver import Driver, failure_of
from benchmarks.shared_gpu.group import HANG_CODE, progress_file
from benchmarks.shared_gpu.plans import (
    clusters_of,
    merged_by_xla,
    meshes_of,
    plan_file,
)
from benchmarks.shared_gpu.rank import result_file, tasks_of
from benchmarks.shared_gpu.tables import (
    JUDGE,
    case_row,
    line_of,
    loss_deviation,
    tables_of,
    with_tables,
)

PAGE = Path(__file__).parents[3] / "docs" / "benchmarks.md"
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "shared_gpu_h200.json"


def plan(name: str, mesh: list[int], profile_s: float, preset_s: float, chosen: list[str]) -> Any:
    def costs(seconds: float) -> dict[str, float]:
        return {"step_s": seconds, "compute_s": seconds, "communication_s": 0.0}

    return {
        "name": name,
        "mesh": mesh,
        "chosen_by": chosen,
        "num_micro_batches": 1,
        "remat_layers": 0,
        "strategies": {},
        "predicted": {"preset": costs(preset_s), "profile": costs(profile_s)},
        "predicted_bytes": 90.0,
        "plan": {"text": "of the plan"},
    }


PLANNED = {
    "profile": "0123",
    "tiny": True,
    "planned_s": 2.0,
    "search": {"is_pipeline": False, "num_stages": 1, "step_s": 1.0},
    "plans": [
        plan("autopar 0", [8], 2.0, 4.0, ["profile"]),
        plan("autopar 1", [2, 4], 4.0, 2.0, ["preset"]),
        plan("autopar 2", [4, 2], 6.0, 6.0, []),
        plan("autopar 3", [8], 1.0, 1.0, []),
    ],
    "experts": [
        {"name": "FSDP (ZeRO-3)", "family": "FSDP"},
        {"name": "data parallel", "family": "data parallel"},
    ],
}


def of_rank(slower: float = 1.0) -> dict[str, Any]:
    """What a rank measures; the last plan could not be compiled."""
    steps = {"autopar 0": 1.0, "autopar 1": 2.0, "autopar 2": 3.0, "FSDP (ZeRO-3)": 0.5,
             "data parallel": 4.0}  # fmt: skip
    programs = {
        name: {
            "samples": [slower * step_s] * 3,
            "num_steps": 2,
            "losses": [4.0, 3.0],
            "xla_bytes": 100,
            "seen_bytes": 125,
            "compile_s": 1.5,
            "judged": {"step_s": 2 * step_s} if name.startswith("autopar") else None,
        }
        for name, step_s in steps.items()
    }
    return {
        "programs": programs,
        "errors": {"autopar 3": "PlanError: another program"},
        "phases_s": {"compile": 1.0},
    }


@pytest.fixture
def row() -> dict[str, Any]:
    return case_row("GPT", PLANNED, [of_rank(), of_rank(2.0)], {})


def test_the_slowest_rank_counts(row: dict[str, Any]) -> None:
    assert [one["step_s"] for one in row["plans"]] == [2.0, 4.0, 6.0]
    assert [one["step_s"] for one in row["experts"]] == [1.0, 8.0]
    assert all("plan" not in one for one in row["plans"])
    assert row["errors"] == {"autopar 3": "PlanError: another program"}


def test_regret_and_the_best_expert(row: dict[str, Any]) -> None:
    found = row["summary"]
    profile, preset = found["by"]["profile"], found["by"]["preset"]
    assert (profile["regret"], preset["regret"]) == (1.0, 2.0)
    assert profile["rank_correlation"] == pytest.approx(1)
    assert preset["rank_correlation"] == pytest.approx(0.5)
    assert profile["ratio"] == pytest.approx(1)
    assert found["best_expert"] == "FSDP (ZeRO-3)"
    assert (profile["over_best_expert"], preset["over_best_expert"]) == (2.0, 4.0)
    assert profile["over_fastest"] == 2.0
    assert found["memory_ratio"] == [0.9, 0.9, 0.9] and found["xla_over_seen"] == 0.8


def test_the_judge_chooses_among_the_plans_that_ran(row: dict[str, Any]) -> None:
    assert [one["name"] for one in row["plans"] if JUDGE in one["chosen_by"]] == ["autopar 0"]
    assert row["summary"]["judge"] == {
        "ratio": 1.0,
        "lowest": 1.0,
        "highest": 1.0,
        "rank_correlation": pytest.approx(1),
    }


def test_programs_that_the_judge_cannot_read_have_no_judge() -> None:
    measured = of_rank()
    for program in measured["programs"].values():
        program["judged"] = None
    row = case_row("GPT", PLANNED, [measured], {})
    assert row["summary"]["judge"] is None
    assert not any(JUDGE in one["chosen_by"] for one in row["plans"])


def test_the_default_plan_has_a_twin_with_xlas_merging() -> None:
    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
        return weights - gradient, loss

    arguments = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((64, 16), "float32")
    options = autopar.ShardingOptions(
        xla_options={"xla_gpu_all_gather_combine_threshold_bytes": 2**20}
    )
    method = autopar.ShardParallel((8,), options=options)
    cluster = autopar.ClusterSpec(1, 8, "h100-sxm")
    planned = plan_step(step, arguments, {}, cluster=cluster, method=method)
    assert planned.plan.xla_options
    assert merged_by_xla(planned).plan == replace(planned.plan, xla_options=None)


def test_a_loss_that_is_no_number_is_no_small_difference() -> None:
    assert isnan(loss_deviation([[4.0, 3.0], [4.0, nan], [4.0, 3.0]]))


def test_losses_are_compared_step_by_step() -> None:
    assert loss_deviation([[4.0, 3.0], [4.0, 3.0], [4.0, 3.3]]) == pytest.approx(0.1)


def test_a_program_that_one_rank_lacks_is_left_out() -> None:
    other = of_rank()
    del other["programs"]["autopar 1"]
    row = case_row("GPT", PLANNED, [of_rank(), other], {"autopar 1": "hung"})
    assert [one["name"] for one in row["plans"]] == ["autopar 0", "autopar 2"]
    assert row["summary"]["by"]["preset"]["regret"] is None
    assert row["errors"]["autopar 1"] == "hung"


def test_text_and_tables_say_the_figures(row: dict[str, Any]) -> None:
    text = line_of("gpt", row)
    assert "FSDP (ZeRO-3)" in text and "regret 100.0%" in text and "another program" in text
    tables = tables_of({"cases": {"gpt": row}})
    steps = tables["steps"].splitlines()[-1]
    assert steps.split(" | ")[1:4] == ["3 + 2", "4000.0 ms on 2×4", "2000.0 ms on 8"]
    assert "1000.0 ms, FSDP (ZeRO-3) | 4.00 | 2.00 | – | – |" in steps
    assert "| 0.50 | 100.0% |" in tables["predictions"]
    page = "a\n<!-- shared-gpu:steps -->\nold\n<!-- /shared-gpu:steps -->\nb\n"
    assert tables["steps"] in with_tables(page, tables) and "old" not in with_tables(page, tables)


def test_tasks_are_plans_and_experts() -> None:
    tasks = tasks_of(PLANNED)
    assert [one["name"] for one in tasks[3:]] == ["autopar 3", "FSDP (ZeRO-3)", "data parallel"]
    assert [one["results"] for one in tasks] == [list] * 4 + [tuple] * 2


# -- failures and resuming


def note(folder: Path, rank: int, **what: str) -> None:
    progress_file(folder, rank).write_text(json.dumps(what))


def test_an_error_that_a_rank_noted_names_the_program(tmp_path: Path) -> None:
    note(tmp_path, 0, case="gpt", program="autopar 0", phase="time")
    note(tmp_path, 1, case="gpt", program="autopar 1", phase="time", error="XlaError: no memory")
    results = [RankResult(0, -15, ""), RankResult(1, 1, "")]
    assert failure_of(tmp_path, results) == ("gpt", "autopar 1", "XlaError: no memory")


def test_a_rank_that_hung_or_crashed_names_its_program(tmp_path: Path) -> None:
    note(tmp_path, 0, case="gpt", program="autopar 0", phase="time")
    note(tmp_path, 1, case="gpt", program="FSDP", phase="check")
    hung = [RankResult(0, -15, ""), RankResult(1, HANG_CODE, "")]
    assert failure_of(tmp_path, hung) == ("gpt", "FSDP", "hung in phase 'check'")
    crashed = [RankResult(0, -11, ""), RankResult(1, -15, "")]
    assert failure_of(tmp_path, crashed) == ("gpt", "autopar 0", "exit code -11")


def test_ranks_that_never_began_fail_without_a_program(tmp_path: Path) -> None:
    assert failure_of(tmp_path, [RankResult(0, 1, "")]) == ("", "", "exit code 1")


def options(folder: Path, **changed: Any) -> argparse.Namespace:
    given = {
        "out": str(folder),
        "work": str(folder / "work"),
        "json": str(folder / "results.json"),
        "model": ["gpt", "moe"],
        "ranks": 2,
        "platform": "cpu",
        "limit_s": 60.0,
        **changed,
    }
    return argparse.Namespace(**given)


def test_a_case_is_collected_once_all_ranks_have_written(tmp_path: Path) -> None:
    for name in ("gpt", "moe"):
        plan_file(tmp_path, name).write_text(json.dumps(PLANNED))
    driver = Driver(options(tmp_path), {"jax": "1"})
    assert driver._wanted() == ["gpt", "moe"]
    result_file(driver.work, "gpt", 0).write_text(json.dumps(of_rank()))
    driver._collect("gpt")
    assert not Path(driver.options.json).exists()
    result_file(driver.work, "gpt", 1).write_text(json.dumps(of_rank()))
    driver._collect("gpt")
    written = json.loads(Path(driver.options.json).read_text())
    assert written["jax"] == "1" and list(written["cases"]) == ["gpt"]
    again = Driver(options(tmp_path), {"jax": "2"})
    assert again._wanted() == ["moe"] and again.document["jax"] == "1"


def test_a_case_that_fails_too_often_is_given_up(tmp_path: Path) -> None:
    plan_file(tmp_path, "gpt").write_text(json.dumps(PLANNED))
    driver = Driver(options(tmp_path), {})
    for number in range(3):
        assert driver._wanted() == ["gpt"]
        note(driver.work, 0, case="gpt", program=f"autopar {number}", phase="time", error="no")
        driver._note_failure([RankResult(0, 1, "")], ["gpt"])
    assert driver._wanted() == []


def test_models_without_plans_are_not_run(tmp_path: Path) -> None:
    assert Driver(options(tmp_path), {}).run()["cases"] == {}


# -- models and clusters


def test_every_case_is_offered() -> None:
    assert tuple(CASES) == MODELS


@pytest.mark.parametrize("name", MODELS)
def test_states_fit_beside_each_other(name: str) -> None:
    """Of an eighth of an H200: the whole state, and that of a replicated program."""
    import jax

    example = CASES[name].example()
    leaves = jax.tree.leaves((example.abstract_state(), example.abstract_batch()))
    assert 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) < 5e9


def test_ranks_of_a_shared_gpu_are_priced_as_shares() -> None:
    cluster = clusters_of("h200-sxm", None)["preset"]
    whole = DEVICES["h200-sxm"]
    assert cluster.spec.flops_16bit == whole.flops_16bit / 8
    assert cluster.spec.memory_bytes == pytest.approx(0.9 * whole.memory_bytes / 8)
    assert meshes_of(cluster) == [(8,), (2, 4), (4, 2)]
    alone = clusters_of("h200-sxm", None, ranks_per_gpu=1)["preset"]
    assert alone.spec.flops_16bit == whole.flops_16bit


def test_the_page_shows_the_results() -> None:
    text = PAGE.read_text()
    assert ("<!-- shared-gpu:steps -->" in text) == RESULTS.exists()
    if RESULTS.exists():
        assert with_tables(text, tables_of(json.loads(RESULTS.read_text()))) == text
