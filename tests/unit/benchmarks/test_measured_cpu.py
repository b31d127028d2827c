"""Measured steps on CPU devices: which experts continue, and which one autopar is compared with."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks.experts.measured_cpu import StepRunner, compared, near_the_fastest


def runner(name: str, clock: list[float], processor: list[float]) -> StepRunner:
    def step(state: Any, _: Any) -> Any:
        return state, state

    made = StepRunner(name, name, step, jnp.zeros(()), None)
    made.samples, made.processor_samples = clock, processor
    return made


def test_the_best_by_the_clock_need_not_be_the_best_by_processor_time() -> None:
    ours = runner("autopar", [1.0, 1.1, 1.2], [2.0, 2.0, 2.0])
    experts = [
        runner("quick", [1.0, 1.0, 1.0], [4.0, 4.0, 4.0]),
        runner("thrifty", [2.0, 2.0, 2.0], [1.0, 2.0, 1.6]),
    ]
    row = compared(ours, experts)
    assert (row["best"], row["processor_best"]) == ("quick", "thrifty")
    assert row["ratio"] == pytest.approx(1.1)
    assert row["processor_ratio"] == pytest.approx(1.25)


def test_experts_near_the_best_by_either_time_continue() -> None:
    experts = [
        runner("quick", [1.0], [4.0]),
        runner("thrifty", [2.0], [1.0]),
        runner("near", [1.9], [1.1]),
        runner("neither", [1.5], [1.5]),
    ]
    assert [one.plan for one in near_the_fastest(experts)] == ["quick", "thrifty", "near"]
