"""Predicted memory beside XLA's, and what would free how much."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

import autopar
from autopar.inspect.memory_text import found_sentences, freeing_sentences
from autopar.ir.memory_found import MemoryCorrection, MemoryFound

WEIGHTS = [jnp.ones((16, 64)), jnp.ones((64, 16))]


def step(weights, x):
    def loss(weights):
        return jnp.mean(jnp.square(jnp.tanh(x @ weights[0]) @ weights[1]))

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def planned(budget_bytes: float | None = None) -> autopar.ParallelPlan:
    options = autopar.ShardingOptions(memory_budget_bytes=budget_bytes, remat="none")
    method = autopar.ShardParallel(options=options)
    cluster = autopar.ClusterSpec(1, 1, "h100-sxm")
    return autopar.plan(step, WEIGHTS, jnp.ones((512, 16)), cluster=cluster, method=method)


def test_a_plan_that_was_not_compiled_has_nothing_to_tell() -> None:
    plan = planned()
    assert found_sentences(plan) == [] == freeing_sentences(plan)
    assert "by XLA" not in plan.explain()


def test_both_figures_stand_side_by_side() -> None:
    plan = planned()
    xla = 1.25 * plan.estimated_peak_bytes
    why = "a plan predicted at 1 GiB takes 2 GiB by XLA, over the limit of 1 GiB."
    found = MemoryFound((xla,), 2 * xla, (why,))
    plan = replace(plan, memory_found=found, correction=MemoryCorrection(1.3))
    for text in (plan.explain(), plan.explain(detail="full")):
        words = " ".join(text.split())
        assert "(1.25 × predicted); the limit is" in words
        assert f"planned again: {why}" in words
        assert "corrected by 1.30, 1.00" in words


def test_a_tight_plan_says_what_would_free_how_much() -> None:
    peak = planned().estimated_peak_bytes
    (told,) = freeing_sentences(planned(1.05 * peak))
    assert told.startswith("what would free memory: recomputing every layer, at most")
    assert "2 micro-batches" in told
    assert freeing_sentences(planned(2 * peak)) == []
