"""The page of the planning benchmark, and one small case planned as the benchmark plans."""

from __future__ import annotations

import math
import os

import jax
import pytest

import autopar
from benchmarks.planning_zoo import __main__ as main
from benchmarks.planning_zoo import strangers
from benchmarks.planning_zoo.cases import CASES
from benchmarks.planning_zoo.page import page
from benchmarks.planning_zoo.planning import _promises

ROW = {
    "devices": 64,
    "planned_s": 61.2,
    "cpu_s": 58.0,
    "jax_trace_s": 6.0,
    "jax_lower_s": 4.0,
    "load": 1.5,
    "step_s": 1.02,
    "gap": 0.004,
    "stopped": "stopped by planning_time_s=60 after 61 s: 3 of 5 meshes",
    "passes_s": {"trace": 10.0, "tables": 30.0, "graph": 5.0, "shard": 5.0},
}


def test_every_case_has_a_line() -> None:
    results = {
        "limited": {"A": ROW, "B": {"load": 2.0, "error": "no plan within 300 s"}},
        "free": {"A": {**ROW, "step_s": 1.0, "cpu_s": 300.0}},
    }
    lines = page(results, ["A", "B", "C"]).splitlines()
    (row,) = [line for line in lines if line.startswith("| A ")]
    assert "61 s | 58 s | 10.0 s |" in row and "0.40%" in row and "tables 60%, trace 20%" in row
    assert "1 s (+2.0%), 300 s of CPU" in row
    assert any(line.startswith("| B ") and "**no plan**" in line for line in lines)
    assert any(line.startswith("| C | not planned") for line in lines)
    assert any(line.startswith("- A: stopped by planning") for line in lines)
    assert len({line.count(" | ") for line in lines if line.startswith("| ")}) == 1


def test_jobs_have_cores_of_their_own(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    assert main.core_sets(2, 2) == [(0, 1), (2, 3)]
    assert main.core_sets(3, None) == [(), (), ()]
    with pytest.raises(SystemExit, match="has 5 cores"):
        main.core_sets(3, 2)


def test_rows_come_from_as_many_processes_as_there_are_sets_of_cores(monkeypatch) -> None:
    used: dict[str, tuple[int, ...]] = {}
    running: set[tuple[int, ...]] = set()

    def plan(name, seconds, limit_s, cores):
        assert cores not in running and (seconds, limit_s) == (60.0, 10.0)
        running.add(cores)
        used[name] = cores
        running.remove(cores)
        return {"name": name}

    monkeypatch.setattr(main, "plan_in_a_process", plan)
    names = [f"case {k}" for k in range(7)]
    rows = dict(main.rows_of(names, 60.0, 10.0, [(0, 1), (2, 3)]))
    assert rows == {name: {"name": name} for name in names}
    assert set(used.values()) <= {(0, 1), (2, 3)}


def test_sizes_are_those_of_the_names() -> None:
    assert len(CASES) >= 15
    billions = {"Llama-70B, scan": 70, "GPT-39B, linen, float32": 39, "T5-11B": 11}
    for name, expected in billions.items():
        _, (state, *_) = CASES[name].make()
        params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state[0])) / 1e9
        assert abs(params / expected - 1) < 0.05


def test_a_strangers_model_is_planned() -> None:
    step = strangers.scanned_llama(4, 64, 8, 128, 16, length=32)
    batch = jax.eval_shape(lambda: step.make_batch(0))
    cluster = autopar.ClusterSpec(1, 8, "h100-sxm")
    plan = autopar.plan(step.step, jax.eval_shape(step.make_state), *batch, cluster=cluster)
    row = _promises(plan)
    assert row["step_s"] > 0 and row["gap"] <= 0.005 and "trace" in row["passes_s"]
