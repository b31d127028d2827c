"""The fastest of the best plans is taken, by what running them shows; the second time is free."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import ArgumentError, MemoryBudgetError
from autopar.ir.identity import plan_digest
from autopar.ir.judged import JudgedStep
from autopar.ir.profile import Timing
from autopar.measure import rerank
from autopar.measure.candidates import plan_candidates
from autopar.measure.database import Database
from autopar.measure.time_step import StepTiming
from autopar.session import cluster_of_devices

OPTIONS = autopar.ShardingOptions(rerank=3)


def step(state, batch):
    def loss(w):
        return jnp.mean((jnp.tanh(batch @ w["a"]) @ w["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def arguments():
    key = jax.random.key(0)
    state = {"a": jax.random.normal(key, (32, 64)), "b": jax.random.normal(key, (64, 16))}
    return state, jnp.ones((64, 32))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return Database(tmp_path / "timings.sqlite")


@pytest.fixture
def compiled(monkeypatch):
    """Names of all that is compiled by us."""
    from autopar.runtime.local import LocalExecutable

    names = []
    real = LocalExecutable._lower

    def noting(self):
        names.append(self.plan.name)
        return real(self)

    monkeypatch.setattr(LocalExecutable, "_lower", noting)
    return names


def test_plans_are_run_ranked_and_known_the_second_time(cache, compiled, monkeypatch):
    method = autopar.ShardParallel(mesh_shape=(8,), options=OPTIONS)
    first = autopar.parallelize(step, method=method)
    results = first(*arguments())
    assert len(compiled) == 3  # the plan that is run is not compiled again
    tried = first.last_planned.plan.search.tried
    assert len(tried) == 3 and [one.is_known for one in tried] == [False] * 3
    assert [one.predicted_s for one in tried] == sorted(one.predicted_s for one in tried)
    chosen = [one for one in tried if one.is_chosen]
    assert [one.measured_s for one in chosen] == [min(one.measured_s for one in tried)]
    plain = jax.jit(step)(*arguments())
    for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(plain), strict=True):
        assert jnp.allclose(ours, theirs, rtol=1e-5, atol=1e-6)

    with monkeypatch.context() as patch:
        patch.setattr(rerank, "plan_candidates", None)  # nothing is searched
        again = autopar.parallelize(step, method=method).plan(*arguments())
    fewer = replace(method, options=autopar.ShardingOptions(rerank=2))
    assert len(autopar.parallelize(step, method=fewer).plan(*arguments()).search.tried) == 2
    assert len(compiled) == 3
    assert all(one.is_known for one in again.search.tried)
    assert plan_digest(again) == plan_digest(first.last_planned.plan)
    text = again.explain(detail="full")
    assert "3 plans timed with synthetic inputs; → is chosen:" in text
    assert "from the database" in text and "→ predicted" in text
    assert autopar.ParallelPlan.from_json(again.to_json()).search == again.search
    assert len(cache.rows()) == 3

    monkeypatch.setattr(Database, "find_choice", lambda *_: "{}")  # no plan of this version
    anew = autopar.parallelize(step, method=method).plan(*arguments())
    assert plan_digest(anew) == plan_digest(again) and len(compiled) == 3


def candidates(method, num):
    return plan_candidates(
        step,
        arguments(),
        {},
        cluster=cluster_of_devices(jax.devices()),
        method=method,
        options=None,
        num=num,
    )


def test_candidates_are_the_best_over_all_meshes_and_differ():
    plans = candidates(autopar.ShardParallel(options=OPTIONS), 6)
    assert len(plans) == 6
    seconds = [planned.plan.estimated_step_s for planned in plans]
    assert seconds == sorted(seconds)
    assert len({plan_digest(planned.plan) for planned in plans}) == 6
    assert len({planned.plan.mesh_shape for planned in plans}) > 1
    best = autopar.parallelize(step, method=autopar.ShardParallel()).plan(*arguments())
    assert seconds[0] == pytest.approx(best.estimated_step_s)


def test_candidates_of_a_pipeline_search_have_other_stages():
    def deep(state, batch):
        def loss(weights):
            x = batch
            for w in weights:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, state, jax.grad(loss)(state))

    wide = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    plans = plan_candidates(
        deep,
        ([wide] * 4, jax.ShapeDtypeStruct((512, 4096), jnp.float32)),
        {},
        cluster=autopar.ClusterSpec(4, 2, "v100-32gb"),
        method=autopar.PipeshardParallel(8, layers=autopar.AutoLayers(4), options=OPTIONS),
        options=None,
        num=2,
    )
    stages = [[(s.layers, s.submesh, s.mesh_shape) for s in p.plan.stages] for p in plans]
    assert len(stages) == 2 and stages[0] != stages[1]
    assert all(planned.plan.is_pipeline for planned in plans)
    assert all("stages: " in rerank.plan_summary(planned.plan) for planned in plans)
    assert all("8 micro-batches" in rerank.plan_summary(planned.plan) for planned in plans)


@pytest.mark.parametrize(
    ("remat", "activation", "width", "rows", "num_devices", "budget"),
    [
        ("none", jnp.tanh, 512, 16384, 8, 1.6e8),  # of 168 MB; state that is split further fits
        ("auto", jax.nn.gelu, 64, 65536, 2, 3.5e8),  # of 387 MB; activations can be recomputed
    ],
)
def test_candidates_keep_to_the_budget(remat, activation, width, rows, num_devices, budget):
    def deep(state, batch):
        def loss(layers):
            x = batch
            for number, (up, down) in enumerate(layers):
                with jax.named_scope(f"layer_{number}"):
                    x = x + activation(x @ up) @ down
            return jnp.mean(x**2)

        weights, moments = state
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(weights))
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = [(of(width, 4 * width), of(4 * width, width))] * 4
    options = autopar.ShardingOptions(memory_budget_bytes=budget, rerank=3, remat=remat)
    plans = plan_candidates(
        deep,
        ((weights, weights), of(rows, width)),
        {},
        cluster=autopar.ClusterSpec(1, num_devices, "v100-32gb"),
        method=autopar.ShardParallel((num_devices,), options=options),
        options=None,
        num=3,
    )
    assert len(plans) == 3
    assert all(planned.plan.estimated_peak_bytes <= budget for planned in plans)
    recomputed = ["recomputing" in rerank.plan_summary(planned.plan) for planned in plans]
    assert any(recomputed) == (remat == "auto")


class Figures:
    """Stands for the devices: what each plan takes, in the order in which they are tried."""

    def __init__(self, monkeypatch, *timings):
        self.timings = iter(timings)
        monkeypatch.setattr(rerank, "time_executable", lambda *_, **__: next(self.timings))


def took(seconds):
    return StepTiming(Timing(seconds, 0.02, 5), 1.0, 2.0**20)


FULL = StepTiming(None, 1.0, 2.0**30, "RESOURCE_EXHAUSTED: Out of memory")


def test_the_measured_order_counts_and_memory_comes_first(monkeypatch):
    plans = candidates(autopar.ShardParallel(mesh_shape=(8,), options=OPTIONS), 3)
    Figures(monkeypatch, FULL, took(2.0), took(1.0))
    made = []

    def make(planned, _):
        made.append(object())
        return made[-1]

    monkeypatch.setattr(rerank, "make_executable", make)
    found = rerank.fastest(plans, jax.devices(), Database(None))
    assert plan_digest(found.planned.plan) == plan_digest(plans[2].plan)
    assert found.executable is made[2]
    tried = found.planned.plan.search.tried
    assert [one.measured_s for one in tried] == [None, 2.0, 1.0]
    assert [one.is_chosen for one in tried] == [False, False, True]
    assert "failed: RESOURCE_EXHAUSTED" in found.planned.plan.explain(detail="full")


def test_what_is_nearly_as_fast_is_timed_again(monkeypatch):
    plans = candidates(autopar.ShardParallel(mesh_shape=(8,), options=OPTIONS), 3)

    def noisy(seconds):
        return StepTiming(Timing(seconds, 0.5, 5), 1.0, 2.0**20)

    Figures(monkeypatch, noisy(2.0), noisy(1.5), took(9.0), noisy(1.0), noisy(1.6))
    monkeypatch.setattr(rerank, "make_executable", lambda *_: object())
    found = rerank.fastest(plans, jax.devices(), Database(None))
    plan = found.planned.plan
    assert plan_digest(plan) == plan_digest(plans[0].plan)  # which had been disturbed
    assert [one.measured_s for one in plan.search.tried] == [1.0, 1.5, 9.0]
    assert "time varied by 50%: the devices seem busy" in plan.warnings[-1]


def test_where_nothing_fits_all_that_was_tried_is_said(monkeypatch):
    plans = candidates(autopar.ShardParallel(mesh_shape=(8,), options=OPTIONS), 2)
    Figures(monkeypatch, FULL, FULL)
    monkeypatch.setattr(rerank, "make_executable", lambda *_: object())
    with pytest.raises(MemoryBudgetError, match=r"all 2 plans .* ran out of memory") as error:
        rerank.fastest(plans, jax.devices(), Database(None))
    assert error.value.peak_bytes == 2.0**30 and str(error.value).count("RESOURCE") == 2


def test_where_plans_cannot_be_run_they_are_not_ranked(monkeypatch):
    method = autopar.ShardParallel(options=OPTIONS)
    with pytest.raises(ArgumentError, match=r"rerank=3\): plans are run on devices to be ranked"):
        autopar.plan(
            step, *arguments(), cluster=autopar.ClusterSpec(1, 8, "h100-sxm"), method=method
        )
    monkeypatch.setattr("autopar.api.is_multi_controller", lambda: True)
    with pytest.raises(ArgumentError, match="runs on devices of several processes"):
        autopar.parallelize(step, method=method).plan(*arguments())


@pytest.mark.parametrize("given", [-1, 1.5, True, "3"])
def test_a_number_of_plans_is_needed(given):
    with pytest.raises(ArgumentError, match=r"ShardingOptions\(rerank=.*needs a number of plans"):
        autopar.ShardingOptions(rerank=given)


def test_by_program_nothing_runs_and_the_judge_decides(cache, compiled, monkeypatch):
    """Of three plans the judge is told that the last is the fastest."""
    seconds = iter((3e-3, 2e-3, 1e-3))

    def told(executable, cluster):
        found = next(seconds)
        return JudgedStep(found, found, 0.0, 0.0)

    monkeypatch.setattr(rerank, "judged_executable", told)
    monkeypatch.setattr(rerank, "time_executable", None)  # nothing runs
    options = autopar.ShardingOptions(rerank=3, rerank_by="program")
    method = autopar.ShardParallel(mesh_shape=(8,), options=options)
    first = autopar.parallelize(step, method=method)
    plan = first.plan(*arguments())
    tried = plan.search.tried
    assert [one.compiled_s for one in tried] == [3e-3, 2e-3, 1e-3]
    assert [one.is_chosen for one in tried] == [False, False, True]
    assert all(one.measured_s is None and one.memory_bytes > 0 for one in tried)
    assert plan.judged == JudgedStep(1e-3, 1e-3, 0.0, 0.0)
    text = plan.explain(detail="full")
    assert "3 plans compiled; → is chosen:" in text and "step by XLA's schedule: 1.00 ms" in text
    results = first(*arguments())
    assert len(compiled) == 3  # the chosen one is not compiled again
    plain = jax.jit(step)(*arguments())
    for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(plain), strict=True):
        assert jnp.allclose(ours, theirs, rtol=1e-5, atol=1e-6)

    again = autopar.parallelize(step, method=method).plan(*arguments())  # from the database
    assert len(compiled) == 3 and again.judged == plan.judged


def test_a_judged_plan_over_its_budget_is_out(cache, monkeypatch):
    """By XLA's count, whatever was predicted; here all of them."""
    monkeypatch.setattr(rerank, "limit_of", lambda *_: 1.0)
    options = autopar.ShardingOptions(rerank=2, rerank_by="program")
    method = autopar.ShardParallel(mesh_shape=(8,), options=options)
    with pytest.raises(MemoryBudgetError, match="exceeds the budget by"):
        autopar.parallelize(step, method=method).plan(*arguments())


def test_candidates_keep_the_options_of_xla():
    options = autopar.ShardingOptions(rerank=3, xla_options={"xla_llvm_x": 2})
    candidates = plan_candidates(
        step,
        arguments(),
        {},
        cluster=cluster_of_devices(jax.devices()),
        method=autopar.ShardParallel(mesh_shape=(8,), options=options),
        options=None,
        num=3,
    )
    assert [p.plan.xla_options for p in candidates] == [(("xla_llvm_x", "2"),)] * 3
