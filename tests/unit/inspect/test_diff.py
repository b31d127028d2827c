"""Two plans side by side."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.errors import ArgumentError
from autopar.inspect.lines import WIDTH
from autopar.ir.plan import ParallelPlan
from examples.models import build

CLUSTER = autopar.ClusterSpec(1, 8, "cpu")


@cache
def plan_of(how: str, model: str = "mlp-tiny", batch: int | None = None) -> ParallelPlan:
    methods: dict[str, Any] = {
        "data": autopar.DataParallel(),
        "zero3": autopar.Zero3Parallel(),
        "mesh": autopar.ShardParallel((2, 4)),
        "micro": autopar.ShardParallel((2, 4), num_micro_batches=2),
        "pipeline": autopar.PipeshardParallel(2, stages=autopar.UniformStages(2)),
    }
    example = build(model)
    arguments = (example.abstract_state(), example.abstract_batch(batch))
    return autopar.plan(example.train_step, *arguments, cluster=CLUSTER, method=methods[how])


def table_of(text: str, start: str) -> list[str]:
    (found,) = (part for part in text.split("\n\n") if part.strip().startswith(start))
    return found.split("\n")


def test_a_plan_and_itself() -> None:
    plan = plan_of("data")
    slower = replace(plan, solver=replace(plan.solver, seconds={"trace": 100.0}))
    text = autopar.diff(plan, slower)
    assert text.endswith("The plans are the same.")
    assert autopar.diff(plan, ParallelPlan.from_json(plan.to_json())) == text
    pipeline = plan_of("pipeline")
    again = replace(
        pipeline,
        stages=tuple(
            replace(stage, plan=replace(stage.plan, solver=replace(stage.plan.solver, seconds={})))
            for stage in pipeline.stages
            if stage.plan is not None
        ),
    )
    assert autopar.diff(pipeline, again).endswith("The plans are the same.")


def test_what_zero_changes_and_costs() -> None:
    a, b = plan_of("data"), plan_of("zero3")
    text = autopar.diff(a, b)
    assert "different programs" not in text
    costs = table_of(text, "predicted")
    (peak,) = (line for line in costs if line.strip().startswith("peak memory per device"))
    assert peak.split()[-1] == f"{b.estimated_peak_bytes / a.estimated_peak_bytes:.4g}"
    (step,) = (line for line in costs if line.strip().startswith("step"))
    assert step.split()[-1] == f"{b.estimated_step_s / a.estimated_step_s:.4g}"
    assert "method:\n  a  DataParallel(" in text and "\n  b  Zero3Parallel(" in text
    assert "mesh:" not in text and "micro-batches:" not in text
    (line,) = (x for x in table_of(text, "different specs") if "state.…['kernel']" in x)
    assert line.split()[-1] == "18" and "P()" in line and "'x'" in line
    words = table_of(text, "different parallelism of parameters")
    (line,) = (x for x in words if "state.params[*]['kernel']" in x)
    assert [c.strip() for c in line.split("  ") if c][1:] == ["x: data", "x: data + ZeRO", "6"]
    assert any(
        "all-gather(x): resharded parameters" in x for x in table_of(text, "different collectives")
    )
    assert max(map(len, text.split("\n"))) <= WIDTH


def test_the_other_way_round() -> None:
    a, b = plan_of("data"), plan_of("mesh")
    ratios = [
        {
            line.split("  ")[1]: line.split()[-1]
            for line in table_of(autopar.diff(one, two), "predicted")[2:]
        }
        for one, two in ((a, b), (b, a))
    ]
    assert float(ratios[0]["step"]) * float(ratios[1]["step"]) == pytest.approx(1, rel=1e-2)
    assert "mesh:\n  a  x=8\n  b  x=2 × y=4" in autopar.diff(a, b)


def test_pipelines_and_micro_batches_are_the_same_program() -> None:
    one, micro, pipeline = plan_of("mesh"), plan_of("micro"), plan_of("pipeline")
    for other in (micro, pipeline):
        assert "different programs" not in autopar.diff(one, other)
        assert "micro-batches:\n  a  1\n  b  2" in autopar.diff(one, other)
    text = autopar.diff(one, pipeline)
    assert "stages:\n  a  1\n  b  2: layers 0" in text
    assert "schedule:\n  a  none\n  b  1f1b" in text
    assert ", stage 1" in text


@pytest.mark.ci
def test_plans_of_different_programs() -> None:
    text = autopar.diff(plan_of("data"), plan_of("data", "gpt-tiny"))
    said = " ".join(text.split())
    assert "These are plans of different programs: " in said
    assert "inputs exist in one only, such as state.params[0]" in said
    larger = autopar.diff(plan_of("data"), plan_of("data", batch=64))
    assert "batch['x'] is float32[16, 32] in a and float32[64, 32] in b" in larger
    other = replace(plan_of("data"), fingerprint=replace(plan_of("data").fingerprint, program="x"))
    assert "inputs agree, but not their equations" in autopar.diff(plan_of("data"), other)


def test_what_is_no_plan() -> None:
    with pytest.raises(ArgumentError, match=r"diff\(plan_b='a plan'\): needs a ParallelPlan"):
        autopar.diff(plan_of("data"), "a plan")  # type: ignore[arg-type]
