"""Steps timed in turns: how often each runs, and in which order."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from benchmarks.interleaved import Runner, sample_in_turns


def counting(calls: list[str], name: str, once_s: float = 1.0, **options: float) -> Runner:
    def note(what: str) -> Callable[[], None]:
        return lambda: calls.append(f"{name} {what}")

    return Runner(note("step"), begin=note("begin"), slowest=lambda _: once_s, **options)


def test_the_slowest_rank_decides_how_often_a_step_runs() -> None:
    calls: list[str] = []
    runner = counting(calls, "a", once_s=0.02, least_sample_s=0.1)
    assert calls == ["a begin", "a step", "a step"] and runner.num_steps == 5
    runner.sample()
    assert calls[3:] == ["a begin", *["a step"] * 5]
    assert len(runner.samples) == len(runner.processor_samples) == 1
    assert counting([], "a", once_s=1e-4, least_sample_s=1.0, max_steps=20).num_steps == 20
    assert counting([], "a", once_s=5.0).num_steps == 1


def test_a_round_visits_all_in_the_order_of_the_seed() -> None:
    def order_of(seed: int) -> list[str]:
        calls: list[str] = []
        runners = [counting(calls, name) for name in "abcdef"]
        calls.clear()
        order = random.Random(seed)
        for _ in range(3):
            sample_in_turns(runners, order)
        return [call[0] for call in calls if call.endswith("begin")]

    first = order_of(0)
    assert first == order_of(0) and first != order_of(1)
    assert all(sorted(first[i : i + 6]) == list("abcdef") for i in (0, 6, 12))


def test_the_median_and_the_spread_of_samples() -> None:
    runner = counting([], "a")
    runner.samples = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert runner.step_s == 3.0 and runner.spread == pytest.approx(1 / 3)
