"""Predicted times and timelines of plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.ir.plan import ParallelPlan
from autopar.stages import simulate
from autopar.stages.simulate import predicted_timeline
from examples.models import build


def planned(method: Any, num_hosts: int = 1) -> ParallelPlan:
    example = build("mlp-tiny")
    cluster = autopar.ClusterSpec(num_hosts, 8 // num_hosts, "cpu")
    return autopar.plan(
        example.train_step,
        example.abstract_state(),
        example.abstract_batch(),
        cluster=cluster,
        method=method,
    )


@pytest.fixture(scope="module")
def pipeline() -> ParallelPlan:
    return planned(autopar.PipeshardParallel(4, stages=autopar.UniformStages(2)), num_hosts=2)


@pytest.fixture(scope="module")
def accumulated() -> ParallelPlan:
    return planned(autopar.ShardParallel((8,), num_micro_batches=2))


def test_a_pipelines_step_time_is_its_timelines(pipeline: ParallelPlan) -> None:
    line = predicted_timeline(pipeline)
    assert line.step_s == pipeline.estimated_step_s == max(e.end_s for e in line.events)
    assert predicted_timeline(ParallelPlan.from_json(pipeline.to_json())) == line
    times = pipeline.times
    assert times is not None
    for stage, own in enumerate(pipeline.stages):
        assert own.forward_s == times.forward_s[stage]
        arriving = [c for c in times.crossings if c.target == stage and c.phase]
        assert own.transfer_s == pytest.approx(sum(c.seconds for c in arriving))
    assert {c.phase for c in times.crossings} == {"", "forward", "backward"}


def test_what_crosses_takes_the_network_between_hosts(pipeline: ParallelPlan) -> None:
    """Both stages fill a host, so every byte goes over a host's network."""
    device = autopar.ClusterSpec(2, 4, "cpu").spec
    assert pipeline.times is not None
    for crossing in pipeline.times.crossings:
        assert crossing.latency_s == device.inter_host_alpha_s
        least_s = device.inter_host_alpha_s + crossing.num_bytes / device.host_bandwidth
        assert crossing.seconds >= least_s * (1 - 1e-9)


def test_memory_goes_up_and_down_with_micro_batches(pipeline: ParallelPlan) -> None:
    times, line = pipeline.times, predicted_timeline(pipeline)
    assert times is not None
    for stage, own in enumerate(line.memory):
        held, kept = times.held_bytes[stage], times.kept_bytes[stage]
        working = times.working_bytes[stage]
        in_flight = 2 - stage
        most = max(value for _, value in own)
        assert held <= most <= (held + in_flight * kept + working) * (1 + 1e-9)
        assert own[-1][1] == pytest.approx(held)


def test_large_meshes_are_priced_in_closed_form(
    pipeline: ParallelPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "MAX_TILED", 1)
    other = planned(autopar.PipeshardParallel(4, stages=autopar.UniformStages(2)), num_hosts=2)
    assert pipeline.times is not None and other.times is not None
    for tiled, closed in zip(pipeline.times.crossings, other.times.crossings, strict=True):
        assert closed.num_bytes == tiled.num_bytes
        assert closed.seconds <= tiled.seconds * (1 + 1e-9)  # which gathers besides


def test_a_plan_without_times_has_a_timeline(pipeline: ParallelPlan) -> None:
    line = predicted_timeline(replace(pipeline, times=None))
    assert {e.phase for e in line.events} == {"forward", "backward", "update"}
    assert not [e for e in line.events if e.kind != "run"]


def test_a_step_on_one_mesh_is_its_regions(accumulated: ParallelPlan) -> None:
    line = predicted_timeline(accumulated)
    phases = [(e.phase, e.micro_batch) for e in line.events]
    assert phases[:4] == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    assert ("update", None) in phases[4:]
    assert line.events[-1].end_s == pytest.approx(accumulated.estimated_step_s) == line.step_s
