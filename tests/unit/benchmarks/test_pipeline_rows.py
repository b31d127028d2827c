"""Rows of the pipeline benchmarks: what they say of a plan, by hand and of a plan that was made."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from benchmarks import pipeline_rows, stage_planning
from benchmarks.stage_planning import GROWTH
from examples.models import build


def stage(submesh: tuple[int, int], mesh: list[int], remat: bool = False) -> dict[str, Any]:
    return {"submesh": list(submesh), "mesh": mesh, "remat": remat}


def test_equal_neighbours_are_told_together() -> None:
    stages = [stage((1, 4), [4]), stage((1, 4), [4]), stage((2, 8), [2, 8], True)]
    assert pipeline_rows.structure({"stages": stages}) == "2 × 1×4 as (4,), 2×8 as (2, 8) remat"
    stages = [stage((1, 4), [4]), stage((2, 8), [16]), stage((1, 4), [4])]
    assert pipeline_rows.structure({"stages": stages}) == "1×4 as (4,), 2×8 as (16,), 1×4 as (4,)"


def test_tflops_are_those_of_one_device() -> None:
    assert pipeline_rows.tflops_per_device(64e15, 4.0, 8) == pytest.approx(2000.0)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (autopar.AutoParallel(), "AutoParallel()"),
        (autopar.AutoParallel(num_micro_batches=8), "AutoParallel(num_micro_batches=8)"),
        (autopar.PipeshardParallel(8), "PipeshardParallel(8)"),
    ],
)
def test_methods_are_written_as_users_do(method: Any, expected: str) -> None:
    assert pipeline_rows.repr_of(method) == expected
    changed = autopar.PipeshardParallel(8, schedule="gpipe")
    assert "gpipe" in pipeline_rows.repr_of(changed)


@pytest.mark.ci
def test_row_of_a_plan() -> None:
    example = build("mlp-tiny", batch_size=32)
    cluster = autopar.ClusterSpec(1, 2, "h100-sxm")
    method = autopar.PipeshardParallel(4, stages=autopar.UniformStages(2))
    row = pipeline_rows.planned_row(example, cluster, method)
    assert [stage["submesh"] for stage in row["stages"]] == [[1, 1], [1, 1]]
    assert row["num_micro_batches"] == 4 and row["devices"] == 2
    flops = row["tflops_per_device"] * 2e12 * row["step_s"]
    assert flops == pytest.approx(example.flops_per_step())
    assert row["stages"][0]["layers"][1] == row["stages"][1]["layers"][0]
    assert "step" in pipeline_rows.line("mlp", row)


@pytest.mark.ci
def test_row_of_a_plan_that_does_not_fit_says_why() -> None:
    cluster = autopar.ClusterSpec(1, 2, "h100-sxm", memory_bytes=1e3)
    row = pipeline_rows.planned_row(build("mlp-tiny"), cluster, autopar.PipeshardParallel(2))
    assert row["error"].startswith("MemoryBudgetError")
    assert "MemoryBudgetError" in pipeline_rows.line("mlp", row)


def test_growth_needs_both_rows() -> None:
    few, many = GROWTH
    rows = {few: {"planned_s": 10.0, "cpu_s": 8.0}}
    assert stage_planning.growth(rows) is None
    rows[many] = {"planned_s": 25.0, "cpu_s": 24.0}
    assert stage_planning.growth(rows) == {"planned_s": 2.5, "cpu_s": 3.0}


def test_error_of_tables() -> None:
    assert stage_planning.table_errors({"checked": [[2.0, 3.0], [4.0, 4.0]]}) == [1.5, 1.0]
    assert stage_planning.table_errors({"error": "too large"}) == []


def test_cases_are_the_sizes_they_are_called() -> None:
    for name, billions in {"GPT-6.7B on 2×8": 6.7, "GPT-39B on 8×8": 39}.items():
        config = stage_planning.CASES[name].example().config
        params = 12 * config.num_layers * config.hidden_size**2
        params += config.vocab_size * config.hidden_size
        assert params / 1e9 == pytest.approx(billions, rel=0.03)
    layers = [stage_planning.CASES[name].example().config.num_layers for name in GROWTH]
    assert layers == [24, 96]
