"""`ShardingOptions(xla_options=…)` reaches XLA on every path, and the plan keeps it.

An option that XLA does not know shows that it was asked: compiling fails and names it. One that it
knows leaves results as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autopar
from examples.models import build

KNOWN = {"xla_llvm_disable_expensive_passes": True}
UNKNOWN = {"xla_cpu_no_such_option": True}


def options(xla_options: dict[str, Any]) -> autopar.ShardingOptions:
    return autopar.ShardingOptions(xla_options=xla_options)


def methods(xla_options: dict[str, Any]) -> dict[str, Any]:
    chosen = options(xla_options)
    return {
        "mesh": autopar.ShardParallel((2, 4), options=chosen),
        "pipeline": autopar.PipeshardParallel(
            2, layers=autopar.AutoLayers(2), stages=autopar.UniformStages(2), options=chosen
        ),
    }


@pytest.mark.parametrize("kind", ["mesh", "pipeline"])
def test_an_unknown_option_is_named_when_the_step_is_compiled(kind: str) -> None:
    example = build("mlp-tiny")
    step = autopar.parallelize(example.train_step, method=methods(UNKNOWN)[kind])
    with pytest.raises(autopar.CompileError, match="xla_cpu_no_such_option"):
        step(example.create_state(), example.make_batch())


@pytest.mark.parametrize("kind", ["mesh", "pipeline"])
def test_a_known_option_leaves_results_as_they_are(kind: str) -> None:
    example = build("mlp-tiny")
    batch = example.make_batch()
    expected_state, expected = jax.jit(example.train_step)(example.create_state(), batch)
    step = autopar.parallelize(example.train_step, method=methods(KNOWN)[kind])
    state, loss = step(example.create_state(), batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["mesh", "pipeline"])
def test_a_plan_keeps_and_shows_them_and_runs_with_them_from_a_file(
    kind: str, tmp_path: Path
) -> None:
    example = build("mlp-tiny")
    step = autopar.parallelize(example.train_step, method=methods(UNKNOWN)[kind])
    plan = step.plan(example.abstract_state(), example.abstract_batch())
    assert plan.xla_options == (("xla_cpu_no_such_option", "true"),)
    for detail in ("short", "full"):
        assert "xla_cpu_no_such_option=true" in plan.explain(detail=detail)
    plan.save(tmp_path / "plan.json")
    read = autopar.ParallelPlan.load(tmp_path / "plan.json")
    assert read.xla_options == plan.xla_options
    again = autopar.parallelize(example.train_step, method=read)
    with pytest.raises(autopar.CompileError, match="xla_cpu_no_such_option"):
        again(example.create_state(), example.make_batch())


def test_plans_without_options_say_nothing() -> None:
    example = build("mlp-tiny")
    step = autopar.parallelize(example.train_step, method=methods({})["mesh"])
    plan = step.plan(example.abstract_state(), example.abstract_batch())
    assert plan.xla_options is None
    assert "xla" not in plan.explain(detail="full").lower()
