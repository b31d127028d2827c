"""Failures as data: what they say of an exception, and which exceptions a search survives."""

from __future__ import annotations

import pickle
import threading

import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import ArgumentError, MemoryBudgetError, PlanningError, TraceError
from autopar.ir.failures import (
    Failure,
    failure_warnings,
    is_contained,
    is_users,
    planning_failed,
)
from autopar.ir.spec import num_shards
from autopar.sharding.planning_log import PlanningLog


def raised(call) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def ours() -> Exception:
    """A bug of autopar's own: a layout that is longer than its mesh."""
    return raised(lambda: num_shards((0, 1), (2,)))


def users() -> Exception:
    def step(state, batch):
        return state @ jnp.ones((3, 3))

    plan = autopar.plan
    cluster = autopar.ClusterSpec(1, 2)
    return raised(lambda: plan(step, jnp.ones((2, 2)), jnp.ones(4), cluster=cluster))


def test_a_failure_names_the_exception_and_the_line_of_autopar() -> None:
    failure = Failure.of("mesh (2,)", ours())
    assert failure.what == "mesh (2,)"
    assert failure.error == "ValueError"
    assert failure.where.startswith("autopar/ir/spec.py:")
    assert failure.exception == f"ValueError: {failure.message} ({failure.where})"
    assert isinstance(failure.cause, ValueError)


def test_a_failure_outside_of_autopar_names_its_own_line() -> None:
    error = raised(lambda: {}["no such key"])
    assert "test_failures.py:" in Failure.of("x", error).where
    assert Failure.of("x", ValueError("never raised\nsecond line.")).exception == (
        "ValueError: never raised"
    )


def test_what_the_users_function_raises_is_the_users() -> None:
    assert is_users(users()) and not is_contained(users())
    assert not is_users(ours()) and is_contained(ours())


def test_errors_that_speak_to_the_user_are_not_contained() -> None:
    for kind in (ArgumentError, TraceError, MemoryBudgetError):
        assert not is_contained(kind("x"))
    assert is_contained(PlanningError("a search inside failed"))


def test_the_log_keeps_what_it_contains_and_raises_the_rest() -> None:
    log, error = PlanningLog(), ours()
    (failure,) = log.contain("mesh (2,)", error)
    assert log.failures == [failure]
    inner = planning_failed("step", [failure], "nothing is left")
    assert log.contain("a pipeline", inner) == [failure]
    assert log.failures == [failure]  # counted once
    with pytest.raises(ArgumentError, match="bad"):
        log.contain("mesh (2,)", ArgumentError("bad"))
    assert log.failures == [failure]


def test_warnings_count_the_candidates_of_an_exception() -> None:
    same = [Failure(f"mesh {n}", "IndexError", "out of range", "autopar/a.py:1") for n in range(5)]
    other = Failure("mesh 9", "KeyError", "3", "autopar/b.py:2")
    first, second = failure_warnings([*same, other, same[0]])
    assert "ruled out 5 candidates (mesh 0, mesh 1, mesh 2 and 2 more)" in first
    assert "IndexError: out of range (autopar/a.py:1)" in first
    assert "ruled out mesh 9: KeyError: 3 (autopar/b.py:2)" in second
    assert failure_warnings([]) == ()


def test_the_error_of_a_step_that_cannot_be_planned() -> None:
    failures = [Failure.of(f"mesh {n}", ours()) for n in range(5)]
    error = planning_failed("train_step", failures, "no mesh could be solved")
    text = str(error)
    assert text.startswith("train_step: planning failed, by a fault of autopar's own: no mesh")
    assert "mesh 2: ValueError" in text and "mesh 3" not in text and "and 2 more" in text
    assert error.__cause__ is failures[0].cause
    assert error.failures == tuple(failures)


def test_errors_go_to_other_processes() -> None:
    failed = planning_failed("step", [Failure.of("mesh (2,)", ours())], "nothing is left")
    failed.failures[0].cause.lock = threading.Lock()  # what cannot go
    copy = pickle.loads(pickle.dumps(failed))
    assert str(copy) == str(failed) and copy.failures == failed.failures
    misfit = MemoryBudgetError("x: no sharding fits.", 3.0, 2.0, remedies={"a": "b"})
    misfit = misfit.having_tried({"pipelines": "not tried"})
    copy = pickle.loads(pickle.dumps(misfit))
    assert str(copy) == str(misfit) == str(copy.having_tried({}))
    assert (copy.peak_bytes, copy.budget_bytes, copy.tried) == (3.0, 2.0, misfit.tried)
