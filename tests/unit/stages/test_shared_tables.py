"""Tables and plans are the same, however many processes make them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import autopar
from autopar.sharding import planning_processes
from autopar.sharding.planning_processes import VARIABLE, PlanningProcess, PlanningProcesses
from autopar.stages.table_bench import TableBench
from examples.models import build

CLUSTER = autopar.ClusterSpec(2, 2, "a100-sxm", host_bandwidth=1e9)


class Watched:
    """What was made in this process, and the processes that were beside it."""

    def __init__(self) -> None:
        self.num_here = 0
        self.processes: list[PlanningProcess] = []


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Processes are started for any work, and ready before it begins."""
    seen, start, make = Watched(), PlanningProcesses.start, TableBench.make

    def start_and_wait(self: PlanningProcesses, module: str, expected_s: float) -> None:
        start(self, module, expected_s)
        seen.processes += [p for p in self.running if p not in seen.processes]
        assert all(process.is_ready_within(120) for process in self.running)

    def make_here(self: TableBench, job: Any) -> Any:
        seen.num_here += 1
        return make(self, job)

    monkeypatch.setattr(planning_processes, "_WORTH_S", 1e-6)
    monkeypatch.setattr(PlanningProcesses, "start", start_and_wait)
    monkeypatch.setattr(TableBench, "make", make_here)
    return seen


def planned(planning_time_s: float | None = None) -> autopar.ParallelPlan:
    example = build("mlp-tiny", 64)
    options = autopar.ShardingOptions(planning_time_s=planning_time_s)
    return autopar.plan(
        example.train_step,
        example.abstract_state(),
        example.abstract_batch(),
        cluster=CLUSTER,
        method=autopar.PipeshardParallel("auto", options=options),
    )


def without_seconds(data: Any) -> Any:
    """The plan's JSON without what was spent on it."""
    if isinstance(data, dict):
        return {k: without_seconds(v) for k, v in data.items() if k not in ("seconds", "sha256")}
    return [without_seconds(x) for x in data] if isinstance(data, list) else data


def text(plan: autopar.ParallelPlan) -> str:
    return json.dumps(without_seconds(json.loads(plan.to_json())))


def test_the_plan_is_the_same(monkeypatch: pytest.MonkeyPatch, watched: Watched) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    alone = planned()
    num_jobs, watched.num_here = watched.num_here, 0
    assert num_jobs > 4 and not watched.processes
    monkeypatch.setenv(VARIABLE, "3")
    shared = planned()
    assert len(watched.processes) == 2 and watched.num_here < num_jobs
    assert text(shared) == text(alone)


def test_the_plan_is_the_same_without_those_that_end(
    monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    alone, num_jobs = planned(), watched.num_here
    monkeypatch.setenv(VARIABLE, "2")
    call: Callable[..., Any] = PlanningProcess.call

    def call_and_end(self: PlanningProcess, *given: Any) -> Any:
        self._process.kill()
        return call(self, *given)

    monkeypatch.setattr(PlanningProcess, "call", call_and_end)
    watched.num_here = 0
    assert text(planned()) == text(alone)
    assert watched.processes and watched.num_here == num_jobs


def test_a_deadline_holds_for_all(monkeypatch: pytest.MonkeyPatch, watched: Watched) -> None:
    """Past it, one mesh is solved, as without other processes; none is left behind."""
    monkeypatch.setenv(VARIABLE, "3")
    plan = planned(planning_time_s=1e-3)
    assert plan.solver.stopped is not None and "stages on" in plan.solver.stopped
    assert watched.processes
    assert all(process._process.returncode is not None for process in watched.processes)
