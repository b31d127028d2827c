"""The first cases of `benchmarks.random_programs`, and what that script makes of failures.

The ten thousand are run by the script; `benchmarks/results/random_programs.json` has the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from benchmarks.random_programs import summary
from tests.properties.random_cases import (
    KINDS,
    Case,
    WrongResult,
    case_of,
    check_case,
    compare,
    smaller,
)
from tests.properties.random_programs import RandomProgram

ROOT = Path(__file__).parents[2]


def first_seed(kind: str) -> int:
    return next(seed for seed in range(1000) if case_of(seed).kind == kind)


@pytest.mark.representatives("program", "pipeline")
@pytest.mark.parametrize("kind", KINDS)
def test_a_case_of_each_kind_equals_jit(kind: str) -> None:
    check_case(case_of(first_seed(kind)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(10_000, 10_200, 50))
def test_cases_beyond_the_kept_ones_equal_jit(first: int) -> None:
    for seed in range(first, first + 50):
        try:
            check_case(case_of(seed))
        except autopar.MeshError:  # a mesh axis divides nothing of so small a program
            continue
        except Exception as error:
            error.add_note(f"python -m benchmarks.random_programs --seeds {seed}:{seed + 1}")
            raise


@pytest.mark.ci
def test_a_seed_is_always_the_same_case() -> None:
    code = (
        "from tests.properties.random_cases import case_of; print([case_of(s) for s in range(9)])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert runs == {f"{[case_of(s) for s in range(9)]}\n"}


def test_a_wrong_result_is_seen() -> None:
    with pytest.raises(WrongResult, match=r"\['a'\] differs by up to 0.01"):
        compare({"a": _floats(1.0)}, {"a": _floats(1.01)}, 1e-4)
    compare({"a": _floats(1.0)}, {"a": _floats(1.01)}, 3e-2)


def _floats(value: float):
    import numpy as np

    return np.full(3, value, np.float32)


def test_what_a_failure_does_not_need_is_dropped() -> None:
    steps = (("dot", 1), ("scan", 2), ("softmax", 3), ("sort", 4))
    program = RandomProgram(((8, 8),), ((4,),), steps, False)
    case = Case("program", program, None)

    def fails(candidate: Case) -> bool:
        assert isinstance(candidate.program, RandomProgram)
        return {"scan", "sort"} <= {name for name, _ in candidate.program.steps}

    left = replace(program, steps=(steps[1], steps[3]))
    assert smaller(case, fails) == Case("program", left, None)


def test_the_summary_counts_by_kind() -> None:
    rows = [
        {"seed": 5, "kind": "program", "outcome": "right", "seconds": 1.0, "jax": "0.12.0"},
        {"seed": 6, "kind": "pipeline", "outcome": "wrong", "seconds": 2.0, "jax": "0.12.0"},
        {"seed": 7, "kind": "program", "outcome": "right", "seconds": 3.0, "jax": "0.12.0"},
    ]
    found = summary(rows)
    assert (found["seeds"], found["cases"], found["mean_s"]) == ([5, 8], 3, 2.0)
    assert found["outcomes"] == {"right": 2, "wrong": 1}
    assert found["by_kind"] == {"pipeline": {"wrong": 1}, "program": {"right": 2}}


@pytest.mark.ci
def test_the_script_runs_seeds_and_takes_up_where_it_stopped(tmp_path: Path) -> None:
    seed = first_seed("program")

    def run(*seeds: int) -> list[dict[str, object]]:
        script = [sys.executable, "-m", "benchmarks.random_programs"]
        done = subprocess.run(
            [*script, "--seeds", f"{seeds[0]}:{seeds[1]}", "--json", str(tmp_path / "rows.json")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / "rows.json").read_text())["rows"]

    (row,) = run(seed, seed + 1)
    assert (row["seed"], row["outcome"]) == (seed, "right")
    again, _ = run(seed, seed + 2)
    assert again == row
