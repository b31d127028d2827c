"""Plans that fit by XLA's own count: planned again, at most three times, with what was learned."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.memory_found import MemoryCorrection, MemoryFound
from autopar.ir.plan import item_bytes
from autopar.runtime.local import LocalExecutable
from autopar.sharding import refit

BLOCKS = [(0.3 * jnp.eye(32, 128), 0.2 * jnp.eye(128, 32))] * 4
BATCH = jnp.linspace(-1.0, 1.0, 1024 * 32).reshape(1024, 32)
ONE = autopar.ClusterSpec(1, 1, "h100-sxm")


def train_step(blocks: list[Any], x: Any) -> tuple[list[Any], Any]:
    def loss(blocks: list[Any]) -> Any:
        y = x
        for up, down in blocks:
            y = y + jnp.tanh(y @ up) @ down
        return jnp.mean(jnp.square(y))

    value, grads = jax.value_and_grad(loss)(blocks)
    return jax.tree.map(lambda w, g: w - 0.1 * g, blocks, grads), value


def with_budget(num_bytes: float | None) -> autopar.AutoParallel:
    return autopar.AutoParallel(options=autopar.ShardingOptions(memory_budget_bytes=num_bytes))


@pytest.fixture
def one_device() -> Iterator[None]:
    autopar.init(devices=jax.devices()[:1])
    yield
    autopar.init()


def free_bytes() -> float:
    step = autopar.parallelize(train_step, donate_argnums=())
    step(BLOCKS, BATCH)
    assert step.last_executable is not None
    return step.last_executable.memory_bytes()


def count_too_much(monkeypatch: pytest.MonkeyPatch, factor: float, times: int) -> list[float]:
    """Let XLA count more than it does for the first plans; returns what was counted."""
    counted: list[float] = []
    count = LocalExecutable.mesh_memory_bytes

    def more(executable: LocalExecutable) -> tuple[float]:
        (found,) = count(executable)
        counted.append(found * (factor if len(counted) < times else 1.0))
        return (counted[-1],)

    monkeypatch.setattr(LocalExecutable, "mesh_memory_bytes", more)
    return counted


def test_a_plan_without_a_limit_is_compiled_once_and_shows_its_bytes(one_device: None) -> None:
    step = autopar.parallelize(train_step, donate_argnums=())
    step(BLOCKS, BATCH)
    assert step.last_executable is not None
    found = step.last_executable.plan.memory_found
    assert found == MemoryFound((step.last_executable.memory_bytes(),))
    assert step.plan(BLOCKS, BATCH).memory_found == found


def test_a_plan_over_its_budget_is_made_again(
    one_device: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    budget = 1.5 * free_bytes()
    counted = count_too_much(monkeypatch, 2.0, times=1)
    step = autopar.parallelize(train_step, method=with_budget(budget), donate_argnums=())
    with caplog.at_level(logging.WARNING, "autopar"):
        results = step(BLOCKS, BATCH)
    assert len(counted) == 2
    assert counted[0] > budget >= counted[1]
    assert caplog.text.count("Planning again") == 1
    plan = step.plan(BLOCKS, BATCH)
    assert plan.num_micro_batches > 1 or plan.remat
    assert plan.correction is not None and plan.correction.kept > 1
    found = plan.memory_found
    assert found is not None and found.limit_bytes == budget
    assert len(found.replanned) == 1 and "by XLA, over the limit of" in found.replanned[0]
    for ours, theirs in zip(
        jax.tree.leaves(results), jax.tree.leaves(jax.jit(train_step)(BLOCKS, BATCH)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    # Another process finds the plan that fits in the cache, and plans nothing.
    again = autopar.parallelize(train_step, method=with_budget(budget), donate_argnums=())
    again(BLOCKS, BATCH)
    kept = again.plan(BLOCKS, BATCH)
    assert kept.cached and kept.correction == plan.correction
    assert kept.num_micro_batches == plan.num_micro_batches and kept.remat == plan.remat
    assert autopar.ParallelPlan.from_json(plan.to_json()).memory_found == found


def test_after_three_more_plans_the_error_has_both_figures(
    one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 1.5 * free_bytes()
    counted: list[float] = []

    def always(_: LocalExecutable) -> tuple[float]:
        counted.append(1.01 * budget)
        return (counted[-1],)

    monkeypatch.setattr(LocalExecutable, "mesh_memory_bytes", always)
    step = autopar.parallelize(train_step, method=with_budget(budget), donate_argnums=())
    with pytest.raises(autopar.MemoryBudgetError, match="no plan fits by XLA's count") as caught:
        step(BLOCKS, BATCH)
    assert len(counted) <= 1 + refit.MAX_REPLANS
    error = caught.value
    assert error.peak_bytes == 1.01 * budget and error.budget_bytes == budget
    assert "predicted at" in str(error) and "by XLA" in error.tried["planned again"]


def test_real_budgets_are_kept(one_device: None) -> None:
    free = free_bytes()
    for share in (0.8, 0.5):
        step = autopar.parallelize(train_step, method=with_budget(share * free), donate_argnums=())
        step(BLOCKS, BATCH)
        assert step.last_executable is not None
        assert step.last_executable.memory_bytes() <= share * free


def test_a_prediction_that_is_a_little_too_large_refuses_nothing(one_device: None) -> None:
    """XLA keeps less than predicted: the step is compiled, and XLA decides."""
    options = autopar.ShardingOptions(remat="none")
    shard = autopar.ShardParallel(options=options)
    predicted = autopar.plan(train_step, BLOCKS, BATCH, cluster=ONE, method=shard)
    step = autopar.parallelize(train_step, method=shard, donate_argnums=())
    step(BLOCKS, BATCH)
    assert step.last_executable is not None
    xla = step.last_executable.memory_bytes()
    tight = 1.001 * xla
    pessimistic = MemoryCorrection(1.3 * xla / predicted.estimated_peak_bytes)
    options = replace(options, memory_budget_bytes=tight, memory_correction=pessimistic)
    shard = autopar.ShardParallel(options=options)
    with pytest.raises(autopar.MemoryBudgetError):
        autopar.plan(train_step, BLOCKS, BATCH, cluster=ONE, method=shard)
    step = autopar.parallelize(train_step, method=shard, donate_argnums=())
    step(BLOCKS, BATCH)
    assert step.last_executable.memory_bytes() <= tight


def out_of_memory(monkeypatch: pytest.MonkeyPatch, times: int) -> list[LocalExecutable]:
    failed: list[LocalExecutable] = []
    run = LocalExecutable._run

    def fails(executable: LocalExecutable, *arguments: Any) -> list[Any]:
        if len(failed) < times:
            failed.append(executable)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return run(executable, *arguments)

    monkeypatch.setattr(LocalExecutable, "_run", fails)
    return failed


def test_a_first_run_out_of_memory_is_planned_again(
    one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 1.1 * free_bytes()
    failed = out_of_memory(monkeypatch, times=1)
    step = autopar.parallelize(train_step, method=with_budget(budget), donate_argnums=())
    _, loss = step(BLOCKS, BATCH)
    assert len(failed) == 1
    assert step.last_executable is not None
    smaller = step.last_executable
    assert smaller.memory_bytes() < failed[0].memory_bytes()
    found = smaller.plan.memory_found
    assert found is not None and "ran out of memory" in found.replanned[0]
    np.testing.assert_allclose(loss, jax.jit(train_step)(BLOCKS, BATCH)[1], rtol=1e-6)


def test_once_training_has_begun_running_out_of_memory_is_an_error(
    one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = with_budget(1.1 * free_bytes())
    step = autopar.parallelize(train_step, method=method, donate_argnums=())
    state, _ = step(BLOCKS, BATCH)
    failed = out_of_memory(monkeypatch, times=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step(state, BATCH)
    assert len(failed) == 1


def test_state_that_is_used_up_is_not_planned_again(
    one_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = with_budget(1.1 * free_bytes())
    blocks = jax.tree.map(jnp.array, BLOCKS)
    out_of_memory(monkeypatch, times=1)
    step = autopar.parallelize(train_step, method=method)
    blocks[0][0].delete()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        step(blocks, BATCH)


def test_stages_are_judged_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit holds for every mesh of a pipeline."""
    pipeline = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))
    step = autopar.parallelize(train_step, method=pipeline, donate_argnums=())
    step(BLOCKS, BATCH)
    assert step.last_executable is not None
    plan, counted = step.last_executable.plan, step.last_executable.mesh_memory_bytes()
    assert plan.memory_found == MemoryFound(counted) and len(counted) == 2
    over = [0.9 * counted[0], 1.1 * counted[1]]
    limit = max(counted)
    learned = refit.learned(plan, over, limit if over[1] > limit else 0.99 * over[1])
    assert learned.kept == learned.recomputed > 1


def test_of_a_correction_only_what_is_beside_the_arguments_grows() -> None:
    plain = autopar.plan(train_step, BLOCKS, BATCH, cluster=ONE)
    options = autopar.ShardingOptions(memory_correction=MemoryCorrection(2.0, 5.0))
    method = autopar.AutoParallel(options=options)
    corrected = autopar.plan(train_step, BLOCKS, BATCH, cluster=ONE, method=method)
    held = refit.argument_bytes(plain)
    assert held == sum(leaf.nbytes for leaf in jax.tree.leaves((BLOCKS, BATCH)))
    assert corrected.estimated_peak_bytes - held == pytest.approx(
        2 * (plain.estimated_peak_bytes - held)
    )
    assert corrected.correction == MemoryCorrection(2.0, 5.0)
    assert "memory_correction" not in corrected.method


def test_random_keys_count_among_the_arguments() -> None:
    """A step with keys over its budget was a `TypeError`."""

    def step(state: Any, x: Any) -> Any:
        key, used = jax.random.split(state["key"])
        blocks, loss = train_step(state["blocks"], x * jax.random.bernoulli(used, 0.9, x.shape))
        return {"blocks": blocks, "key": key}, loss

    state = {"blocks": BLOCKS, "key": jax.random.key(0)}
    plan = autopar.plan(step, state, BATCH, cluster=ONE)
    held = refit.argument_bytes(plan)
    assert held == sum(leaf.nbytes for leaf in jax.tree.leaves((BLOCKS, BATCH))) + 8
    assert refit.learned(plan, [2 * plan.estimated_peak_bytes], held).kept > 1


@pytest.mark.parametrize("name", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_bytes_of_random_keys_are_those_that_jax_holds(name: str) -> None:
    key = jax.random.key(0, impl=name)
    assert item_bytes(str(key.dtype)) == jax.random.key_data(key).nbytes


def test_what_is_learned_is_xla_over_predicted() -> None:
    plan = autopar.plan(train_step, BLOCKS, BATCH, cluster=ONE)
    held = refit.argument_bytes(plan)
    beside = plan.estimated_peak_bytes - held
    learned = refit.learned(plan, [held + 3 * beside], held + 2 * beside)
    assert learned.kept == pytest.approx(3 * 1.02) and learned.recomputed == 1.0


def test_a_step_that_is_far_too_large_is_not_compiled() -> None:
    error = autopar.MemoryBudgetError("too large", 200.0, 100.0)
    assert refit.hopeful(error) is None
    near = refit.hopeful(autopar.MemoryBudgetError("too large", 110.0, 100.0))
    assert near is not None and 0.85 < near.kept < 100 / 110


def test_what_is_hoped_for_leaves_the_arguments_as_they_are() -> None:
    error = autopar.MemoryBudgetError("too large", 110.0, 100.0, argument_bytes=80.0)
    hope = refit.hopeful(error, MemoryCorrection(1.5, 3.0))
    assert hope is not None and 80 + 30 * hope.kept / 1.5 < 100 < 80 + 31 * hope.kept / 1.5
    assert hope.recomputed == 2 * hope.kept
    assert refit.hopeful(error.having_tried({"host memory": "never"})) == refit.hopeful(error)
    state_alone = autopar.MemoryBudgetError("too large", 110.0, 100.0, argument_bytes=100.0)
    assert refit.hopeful(state_alone) is None


def test_the_error_of_a_step_that_does_not_fit_knows_its_arguments() -> None:
    held = refit.argument_bytes(autopar.plan(train_step, BLOCKS, BATCH, cluster=ONE))
    with pytest.raises(autopar.MemoryBudgetError) as caught:
        autopar.plan(train_step, BLOCKS, BATCH, cluster=ONE, method=with_budget(1.01 * held))
    assert caught.value.argument_bytes == held < caught.value.peak_bytes


def too_large(peak_bytes: float, plan: autopar.ParallelPlan) -> autopar.MemoryBudgetError:
    held = refit.argument_bytes(plan)
    return autopar.MemoryBudgetError(
        "no sharding fits", peak_bytes, plan.memory_budget_bytes, argument_bytes=held
    )


@pytest.mark.parametrize("smallest", [0.99, 1.01])
def test_a_smaller_plan_is_compiled_although_a_larger_one_taught_that_it_does_not_fit(
    smallest: float,
) -> None:
    """The smallest plan is predicted over the limit, but below what XLA counted of the first. No
    plan is left where that one was the smallest itself."""
    first = autopar.plan(train_step, BLOCKS, BATCH, cluster=ONE)
    limit = first.estimated_peak_bytes
    first = replace(first, memory_budget_bytes=limit)
    counted = {"first": 1.1 * limit, "smallest": 0.98 * limit}
    asked: list[MemoryCorrection] = []

    def plan_again(correction: MemoryCorrection) -> str:
        asked.append(correction)
        if len(asked) == 1:
            raise too_large(smallest * counted["first"], first)
        return "smallest"

    loop = refit.Refit[str](plan_again, lambda one: [counted[one]], lambda _: first, limit)
    if smallest > 1:
        with pytest.raises(autopar.MemoryBudgetError, match="no plan fits by XLA's count"):
            loop.fitted("first")
        assert len(asked) == 1
        return
    fitted, found = loop.fitted("first")
    assert fitted == "smallest" and found.peak_bytes == counted["smallest"]
    assert len(found.replanned) == 1 and asked[1].kept < asked[0].kept


def test_a_first_plan_that_is_predicted_not_to_fit_is_left_to_xla() -> None:
    plan = autopar.plan(train_step, BLOCKS, BATCH, cluster=ONE)
    error = too_large(1.2 * plan.estimated_peak_bytes, plan)
    error.budget_bytes = plan.estimated_peak_bytes

    def planned(correction: MemoryCorrection | None) -> float:
        if correction is None:
            raise error
        return correction.kept

    factor, misfit = refit.first_plan(planned)
    assert factor < 1 and misfit is error
    assert refit.first_plan(lambda _: 1.0) == (1.0, None)
    error.budget_bytes = 0.5 * error.peak_bytes
    with pytest.raises(autopar.MemoryBudgetError, match="no sharding fits"):
        refit.first_plan(planned)


@pytest.mark.parametrize(
    ("given", "platform", "limit"),
    [(None, "gpu", 72e9), (None, "cpu", None), (5e9, "cpu", 5e9), (5e9, "gpu", 5e9)],
)
def test_limits(given: float | None, platform: str, limit: float | None) -> None:
    plan = autopar.plan(train_step, BLOCKS, BATCH, cluster=ONE)
    assert refit.limit_of(plan, given, platform) == limit
