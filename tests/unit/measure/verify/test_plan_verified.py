"""Plans ranked by compiling, with stand-ins for XLA's costs."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import ArgumentError, MemoryBudgetError
from autopar.ir.identity import plan_digest
from autopar.ir.judged import JudgedStep
from autopar.measure.verify import plan_verified
from autopar.measure.verify.report import Compared

METHOD = autopar.ShardParallel(mesh_shape=(8,), options=autopar.ShardingOptions(rerank=3))
CLUSTER = autopar.ClusterSpec(1, 8, "h100-sxm")


def step(state, batch):
    grads = jax.grad(lambda w: jnp.mean((jnp.tanh(batch @ w["a"]) @ w["b"]) ** 2))(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads)


STATE = {"a": jnp.ones((32, 64)), "b": jnp.ones((64, 16))}
ARGUMENTS = STATE, jnp.ones((64, 32))


def told(sent, excess, judged=None):
    """A report of plans that send so many times the predicted bytes, as judged or not."""
    collectives = (SimpleNamespace(sent_bytes=Compared(sent * 100.0, 100.0)),)
    return SimpleNamespace(
        fits=excess <= 0,
        excess_bytes=float(excess),
        peak_bytes=2.0**20 + excess,
        target="h100-80gb",
        meshes=(SimpleNamespace(collectives=collectives, judged=judged),),
    )


def verified(monkeypatch, *reports):
    compiled = []

    def verify(fn, *args, plan, target, **_):
        assert target == "h100-80gb" and fn is step
        compiled.append(plan)
        return reports[len(compiled) - 1]

    monkeypatch.setattr(plan_verified, "verify", verify)
    monkeypatch.setattr(plan_verified, "check_compiler", lambda *_: None)

    def run():
        return autopar.plan_verified(
            step, *ARGUMENTS, cluster=CLUSTER, method=METHOD, target="h100-80gb"
        )

    return run, compiled


def test_what_does_not_fit_or_sends_more_is_not_taken(monkeypatch):
    run, compiled = verified(monkeypatch, told(1, 4096), told(1e6, 0), told(1, -1))
    plan = run()
    assert len(compiled) == 3 and plan_digest(plan) == plan_digest(compiled[2])
    tried = plan.search.tried
    assert [one.is_chosen for one in tried] == [False, False, True]
    assert tried[0].failure == "exceeds the memory by 4.0 KiB"
    assert tried[1].compiled_s > 1e3 * tried[1].predicted_s
    assert tried[2].compiled_s == pytest.approx(tried[2].predicted_s)
    text = plan.explain(detail="full")
    assert "3 plans compiled; → is chosen:" in text and "as compiled" in text
    assert autopar.ParallelPlan.from_json(plan.to_json()).search == plan.search


def test_the_judge_decides_where_it_has_read_the_programs(monkeypatch):
    """The second is the shortest by XLA's schedule, although it sends more than was predicted."""
    seconds = (0.03, 0.01, 0.02)
    judged = [JudgedStep(s, s / 2, s, s / 2) for s in seconds]
    run, compiled = verified(monkeypatch, *[told(n, -1, j) for n, j in enumerate(judged, 1)])
    plan = run()
    assert plan_digest(plan) == plan_digest(compiled[1])
    assert plan.judged == judged[1]
    assert [one.compiled_s for one in plan.search.tried] == list(seconds)
    assert "step by XLA's schedule: 10.00 ms" in plan.explain()
    assert autopar.ParallelPlan.from_json(plan.to_json()).judged == judged[1]


def test_where_none_fits_all_are_named(monkeypatch):
    run, _ = verified(monkeypatch, *[told(1, 2048)] * 3)
    with pytest.raises(MemoryBudgetError, match="none of 3 plans compiled for h100-80gb"):
        run()


def test_bad_arguments_are_said():
    with pytest.raises(ArgumentError, match="needs a method that searches"):
        autopar.plan_verified(step, *ARGUMENTS, cluster=CLUSTER, method=autopar.DataParallel())
    with pytest.raises(ArgumentError, match=r"needs an autopar\.ClusterSpec"):
        autopar.plan_verified(step, *ARGUMENTS, cluster=8, method=METHOD)


def counted(*ratios):
    """Stand-ins for `verify`: XLA counts so many times what was predicted."""
    plans = []

    def verify(fn, *args, plan, **_):
        plans.append(plan)
        xla = ratios[min(len(plans), len(ratios)) - 1] * plan.estimated_peak_bytes
        budget = plan.memory_budget_bytes
        mesh = SimpleNamespace(
            peak_bytes=Compared(xla, plan.estimated_peak_bytes),
            limit_bytes=2 * budget,
            budget_bytes=budget,
            judged=JudgedStep(0.02, 0.015, 0.01, 0.005),
        )
        return SimpleNamespace(meshes=(mesh,), fits=xla <= 2 * budget, peak_bytes=xla)

    return verify, plans


def fitted(monkeypatch, budget_share, *ratios):
    free = autopar.plan(step, *ARGUMENTS, cluster=CLUSTER, method=autopar.ShardParallel())
    options = autopar.ShardingOptions(memory_budget_bytes=budget_share * free.estimated_peak_bytes)
    verify, plans = counted(*ratios)
    monkeypatch.setattr(plan_verified, "verify", verify)
    monkeypatch.setattr(plan_verified, "check_compiler", lambda *_: None)
    method = autopar.AutoParallel(options=options)
    return lambda: autopar.plan_verified(step, *ARGUMENTS, cluster=CLUSTER, method=method), plans


def test_one_plan_that_fits_by_xlas_count_is_taken(monkeypatch):
    run, plans = fitted(monkeypatch, 2.0, 1.1)
    plan = run()
    assert len(plans) == 1
    assert plan.memory_found.compiled_bytes == (1.1 * plan.estimated_peak_bytes,)
    assert plan.judged.step_s == 0.02
    assert plan.memory_found.replanned == ()


def test_a_plan_over_its_budget_is_made_again_without_gpus(monkeypatch):
    run, plans = fitted(monkeypatch, 1.2, 1.5, 1.0)
    plan = run()
    assert len(plans) == 2 and plan.correction.kept > 1
    assert plan.estimated_peak_bytes <= plan.memory_budget_bytes
    assert "over the limit of" in plan.memory_found.replanned[0]


def test_what_never_fits_is_refused_with_both_figures(monkeypatch):
    run, plans = fitted(monkeypatch, 1.2, 40.0)
    with pytest.raises(MemoryBudgetError, match="no plan fits by XLA's count"):
        run()
    assert len(plans) <= 4
