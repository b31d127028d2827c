"""Plans beside a plan."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from autopar.errors import ArgumentError
from autopar.inspect.report_page.compare import compare_data
from tests.report_plans import one_mesh, pipeline


def test_rows_are_relative_to_the_plan() -> None:
    plan = one_mesh()
    slow = replace(plan, estimated_step_s=2 * plan.estimated_step_s, memory_budget_bytes=1.0)
    data = compare_data(plan, {"slow": slow, "none": "does not fit"})
    assert data is not None
    this, other, none = data["rows"]
    assert (this["name"], this["ratio"], this["fits"]) == ("this plan", 1.0, True)
    assert (other["ratio"], other["fits"]) == (2.0, False)
    unbudgeted = replace(plan, estimated_peak_bytes=3.0, memory_budget_bytes=inf)
    tight = replace(plan, estimated_peak_bytes=1.0, memory_budget_bytes=2.0)
    compared = compare_data(tight, {"data": unbudgeted})
    assert compared is not None and not compared["rows"][1]["fits"]
    assert none == {"name": "none", "failure": "does not fit"}
    assert data["diff"] == ""  # of two plans only
    alone = compare_data(plan, {"slow": slow})
    assert alone is not None and alone["diff"]
    assert compare_data(plan, {}) is None


@pytest.mark.parametrize("given", [["plan"], {"a": 3}, {1: "no plan"}])
def test_what_is_no_comparison(tmp_path, given) -> None:
    with pytest.raises(ArgumentError, match="compare must be a dict from names to ParallelPlans"):
        one_mesh().report(tmp_path / "r.html", compare=given)


def test_a_row_says_where_the_plan_runs() -> None:
    plan = replace(one_mesh(), num_micro_batches=4, remat=("layer_0", "layer_1"))
    base = one_mesh()
    stages = pipeline()
    first, *rest = stages.stages
    recomputed = replace(
        stages, stages=tuple(replace(stage, remat=True) for stage in (first, *rest))
    )
    data = compare_data(base, {"a": plan, "b": replace(plan, remat=("layer_0",)), "c": recomputed})
    assert data is not None
    this, several, one, staged = (row["where"] for row in data["rows"])
    assert this == "on a mesh x=2 × y=4 of 8 devices"
    assert several == f"{this}, 4 micro-batches, recomputing 2 layers"
    assert one == f"{this}, 4 micro-batches, recomputing 1 layer"
    assert staged == (
        f"a pipeline of {len(stages.stages)} stages on 32 devices, 8 micro-batches, recomputing "
        f"{len(stages.stages)} stages"
    )
