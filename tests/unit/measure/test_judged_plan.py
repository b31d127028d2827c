"""The judged step of a plan: on one mesh its program's, in a pipeline the simulation with scaled
stage programs."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

import autopar
from autopar.compiler import plan_step
from autopar.executables import make_executable
from autopar.ir.judged import JudgedStep
from autopar.measure.judged_plan import added_runs, judged_executable, judged_step
from autopar.session import cluster_of_devices
from autopar.stages.simulate import predicted_timeline
from examples.models import build

EXAMPLE = build("mlp-tiny")
PIPELINE = autopar.PipeshardParallel(
    2, layers=autopar.AutoLayers(2), stages=autopar.UniformStages(2)
)


def planned(method):
    arguments = EXAMPLE.abstract_state(), EXAMPLE.abstract_batch()
    cluster = cluster_of_devices(jax.devices())
    return plan_step(EXAMPLE.train_step, arguments, {}, cluster=cluster, method=method)


def test_runs_add_up():
    found = added_runs([(2, JudgedStep(3.0, 2.0, 1.5, 1.0)), (1, JudgedStep(1.0, 1.0, 0.0, 0.0))])
    assert found == JudgedStep(7.0, 5.0, 3.0, 2.0)


def test_on_one_mesh_it_is_the_programs():
    plan = planned(autopar.ShardParallel((2, 4))).plan
    one = JudgedStep(0.5, 0.4, 0.3, 0.1)
    assert judged_step(plan, [one]) == one


def test_a_pipeline_is_simulated_with_its_meshes_times():
    """With every stage program twice as long, so is the step, but for its transfers."""
    plan = planned(PIPELINE).plan
    busy = predicted_timeline(plan).busy_s()

    def step_s(factor: float) -> float:
        return judged_step(plan, [JudgedStep(factor * b, 0.0, 0.0, 0.0) for b in busy]).step_s

    assert step_s(1.0) == pytest.approx(plan.estimated_step_s, rel=0.05)
    assert 1.5 * step_s(1.0) < step_s(2.0) <= 2 * step_s(1.0)
    first, second = (
        JudgedStep(f * b, 0.0, 0.0, 0.0) for f, b in zip((9.0, 1.0), busy, strict=True)
    )
    slow = judged_step(plan, [first, second]).step_s
    assert slow >= first.step_s > step_s(1.0)


@pytest.mark.parametrize(
    "method", [autopar.ShardParallel((8,)), PIPELINE], ids=["mesh", "pipeline"]
)
def test_what_is_compiled_here_can_be_judged(method):
    """On devices with a hundredth of the bandwidth it takes longer."""
    step, devices = planned(method), jax.devices()
    executable = make_executable(step, devices)
    cluster = cluster_of_devices(devices)
    found = judged_executable(executable, cluster)
    assert 0 < found.compute_s <= found.step_s
    spec = cluster.spec
    slower = replace(
        spec,
        memory_bandwidth=spec.memory_bandwidth / 100,
        intra_host_bandwidth=spec.intra_host_bandwidth / 100,
    )
    slow = judged_executable(executable, autopar.ClusterSpec(1, len(devices), device=slower))
    assert slow.compute_s > found.compute_s and slow.links_s >= found.links_s


def test_a_step_that_ran_shows_what_its_schedule_takes():
    step = autopar.parallelize(EXAMPLE.train_step, method=autopar.ShardParallel((8,)))
    with pytest.raises(autopar.ArgumentError, match="Call the step once"):
        step.judged_plan()
    step(EXAMPLE.create_state(), EXAMPLE.make_batch())
    plan = step.judged_plan()
    assert plan.judged is not None and plan.judged.step_s >= plan.judged.compute_s > 0
    assert "step by XLA's schedule: " in plan.explain()
    assert step.last_planned is not None and step.last_planned.plan.judged is None
