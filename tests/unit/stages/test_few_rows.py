"""Micro-batches of few rows: when the stage search looks at them; steps that cannot have them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.rewrite.step_source import StepSource
from autopar.sharding.planning_log import PlanningLog
from autopar.stages import choose_stages, plan_pipeline
from autopar.stages.pipeline_task import PipelineTask
from autopar.tracer.trace import StepOptions
from tests.unit.stages.traced_sizes import zero_by_factors

ROWS = 64
WEIGHTS = {
    "embed": jax.ShapeDtypeStruct((32, 64), jnp.float32),
    "layers": [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 4,
}
BATCH = {"tokens": jax.ShapeDtypeStruct((ROWS, 256), jnp.int32)}


def cluster(memory_bytes: float) -> autopar.ClusterSpec:
    return autopar.ClusterSpec(2, 4, "v100", memory_bytes=memory_bytes, host_bandwidth=1e8)


def step_needing(rows: int):
    def loss(weights: Any, batch: Any) -> Any:
        if batch["tokens"].shape[0] < rows:
            raise ValueError(f"needs {rows} rows")
        x = weights["embed"][batch["tokens"]]
        for weight in weights["layers"]:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x) + zero_by_factors(x)

    def train_step(weights: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    return train_step


def test_a_number_that_cannot_be_traced_is_halved() -> None:
    step = step_needing(4)  # so 16 micro-batches at most
    source = StepSource.of(step, (WEIGHTS, BATCH), {}, StepOptions())
    method = autopar.PipeshardParallel("auto")
    task = PipelineTask(method, cluster(1e9), PlanningLog())

    def found(number: int, known: int) -> int | None:
        looped = plan_pipeline._looped_near(source, task, number, known)
        return None if looped is None else looped.step.num_micro_batches

    assert found(64, 4) == 16
    assert found(64, 16) is None  # which is known already
    assert found(64, 32) is None
    assert found(16, 16) is None
    assert found(2, 4) == 2


@pytest.mark.ci
def test_what_fits_only_with_too_few_rows_is_our_error() -> None:
    """One row would fit by the tables, but the step cannot be traced with it."""
    method = autopar.PipeshardParallel("auto")
    with pytest.raises(autopar.MemoryBudgetError, match="no pipeline of its 4 layers fits"):
        autopar.plan(step_needing(2), WEIGHTS, BATCH, cluster=cluster(2e5), method=method)


@pytest.mark.ci
@pytest.mark.parametrize("slow", [0.0, 1e9])
def test_few_rows_are_looked_at_where_plans_lack_memory(
    monkeypatch: pytest.MonkeyPatch, slow: float
) -> None:
    """Fewer rows than a host has devices are ranked only if all else is slow and full."""
    monkeypatch.setattr(choose_stages, "SLOW", slow)
    monkeypatch.setattr(choose_stages, "FULL", 0.0)
    ranked: list[tuple[int, ...]] = []
    choose = choose_stages.choose_micro_batches

    def noted(tables: Any, setting: Any, candidates: Any, **options: Any) -> Any:
        ranked.append(tuple(candidates))
        return choose(tables, setting, candidates, **options)

    monkeypatch.setattr(choose_stages, "choose_micro_batches", noted)
    method = autopar.PipeshardParallel("auto")
    plan = autopar.plan(step_needing(2), WEIGHTS, BATCH, cluster=cluster(1e6), method=method)
    assert ROWS // plan.num_micro_batches >= 2
    assert max(ranked[0]) == ROWS // 4
    assert [max(numbers) for numbers in ranked[1:]] == ([ROWS // 2] if slow == 0.0 else [])


@pytest.mark.ci
@pytest.mark.parametrize("memory_bytes", [pytest.param(3e5, marks=pytest.mark.slow), 6e5])
def test_what_recomputes_more_than_meant_is_tried_with_half_the_rows(
    monkeypatch: pytest.MonkeyPatch, memory_bytes: float
) -> None:
    """The faster of the two is kept: here twice as many micro-batches only start more stage
    programs."""
    method = autopar.PipeshardParallel("auto")
    args = (step_needing(2), WEIGHTS, BATCH)
    plain = autopar.plan(*args, cluster=cluster(memory_bytes), method=method)
    searched: list[int] = []
    search = plan_pipeline.choose_stages

    def noted(looped: Any, *rest: Any, **options: Any) -> Any:
        searched.append(looped.step.num_micro_batches)
        return search(looped, *rest, **options)

    monkeypatch.setattr(plan_pipeline, "choose_stages", noted)
    monkeypatch.setattr(plan_pipeline, "_recomputes_more", lambda plan, report: True)
    plan = autopar.plan(*args, cluster=cluster(memory_bytes), method=method)
    assert plan.num_micro_batches == plain.num_micro_batches
    can_halve = ROWS // plain.num_micro_batches > 2  # two rows are needed
    assert (2 * plain.num_micro_batches in searched) == can_halve


@pytest.mark.parametrize("method", ["auto", "pipeline"])
def test_a_batch_without_rows_is_planned_as_one(method: str) -> None:
    """As `jax.jit` compiles it: the last batch of a data set may be empty."""

    def step(weights: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(batch @ w)))(weights)
        return weights - 0.1 * grads, loss

    weights, batch = (jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((64, 64), (0, 64)))
    plan = autopar.plan(step, weights, batch, cluster=cluster(1e9), method=method)
    assert plan.num_micro_batches == 1
