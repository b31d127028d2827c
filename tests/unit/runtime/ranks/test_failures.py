"""Real processes of which one fails: all end soon, and all say why."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import _jax
from autopar.runtime.ranks.failures import FailureWatch, add_remedy, is_out_of_memory
from autopar.runtime.ranks.launch import RankResult, run_ranks
from autopar.runtime.ranks.shared_gpu import CpuRanks

SCRIPT = Path(__file__).with_name("failing_ranks.py")
ROOT = Path(__file__).parents[4]
FAILING, NUM_RANKS = 1, 3
LIMIT_S = 240.0


def run(scenario: str) -> list[RankResult]:
    """JAX alone takes 300 s, and `run_ranks` here would wait as long for the others."""
    return run_ranks(
        [sys.executable, str(SCRIPT), scenario],
        CpuRanks(NUM_RANKS),
        limit_s=LIMIT_S,
        env={"PYTHONPATH": str(ROOT)},
        grace_s=LIMIT_S,
    )


def said(results: list[RankResult]) -> str:
    return "\n".join(f"rank {r.rank}, exit code {r.returncode}:\n{r.output}" for r in results)


@pytest.mark.representatives(
    "in the step-RESOURCE_EXHAUSTED", slow=["between steps-OSError: no such file"]
)
@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        ("in the step", "RESOURCE_EXHAUSTED"),
        ("between steps", "OSError: no such file"),
        ("while others compute", "OSError: no such file"),
    ],
    ids=lambda value: value,
)
def test_a_failure_of_one_ends_all(scenario: str, error: str) -> None:
    results = run(scenario)
    assert [r.returncode for r in results] == [1] * NUM_RANKS, said(results)
    for r in results:
        assert error in r.output, said(results)
        assert r.rank == FAILING or f"process {FAILING} failed" in r.output, said(results)
        assert scenario != "in the step" or "memory_budget_bytes" in r.output, said(results)
    if scenario == "while others compute":
        assert "WorkerError" in results[0].output, said(results)


@pytest.mark.representatives("at the end-", slow=["all well-"])
@pytest.mark.parametrize(
    ("scenario", "codes"),
    [("all well", [0, 0, 0]), ("at the end", [0, 1, 0]), ("all at the end", [1, 1, 1])],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_processes_that_come_to_their_end_leave_in_peace(scenario: str, codes: list[int]) -> None:
    results = run(scenario)
    assert [r.returncode for r in results] == codes, said(results)
    assert not any(re.search(r"inside a step|Terminating", r.output) for r in results)


def test_an_error_about_memory_says_what_to_do() -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED"))
    add_remedy(error)
    add_remedy(error)
    assert len(error.__notes__) == 1 and "memory_budget_bytes" in error.__notes__[0]


def test_out_of_memory_is_not_taken_for_an_old_state() -> None:
    """The step has used up the state that it was given, as donated arguments are."""
    step = autopar.parallelize(lambda w, x: (w - x.mean(), w.sum()))
    w, x = jnp.ones((8, 4)), jnp.ones((8, 4))
    w, _ = step(w, x)

    def refuse(*leaves: Any) -> Any:
        leaves[0].delete()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    step.last_executable.compiled = refuse
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        step(w, x)
    assert any("memory_budget_bytes" in note for note in caught.value.__notes__)


class FailedResult:
    """A result of a step that failed after it was called, as on a GPU."""

    def is_ready(self) -> bool:
        return True

    def is_deleted(self) -> bool:
        return False

    def block_until_ready(self) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def test_a_failure_is_found_in_results(monkeypatch: Any, capfd: Any) -> None:
    stored: dict[str, bytes] = {}
    monkeypatch.setattr(_jax, "store_get_now", stored.get)
    monkeypatch.setattr(_jax, "store_set_new", lambda key, value: stored.setdefault(key, value))
    watch = FailureWatch()
    try:
        watch.run("train_step", lambda: [FailedResult()], 0)
        until_s = time.monotonic() + 20
        while not stored and time.monotonic() < until_s:
            time.sleep(0.05)
    finally:
        watch.stop()
    (told,) = stored.values()
    assert json.loads(told) == {
        "process": 0,
        "step": "train_step",
        "error": "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory",
    }
    assert "memory_budget_bytes" in capfd.readouterr().err
