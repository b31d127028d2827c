"""Conditions that replace state become selections, which stages can split by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from autopar import _jax
from autopar.ir.traced_step import TracedStep
from autopar.lower.annotate import annotated_function
from autopar.rewrite.select_branches import select_branches
from autopar.sharding.assemble import unsharded
from autopar.tracer.trace_step import trace_step

W = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
X = np.linspace(0, 1, 16, dtype=np.float32).reshape(2, 8)
OPTIMIZER = optax.apply_if_finite(optax.adam(1e-2), 3)


def traced(step: Callable[..., Any], *args: Any) -> TracedStep:
    return trace_step(step, args, {}, batch_argnums=(len(args) - 1,))


def names(step: TracedStep) -> list[str]:
    return [one.name for equation in step.program.equations for one in equation.with_bodies()]


def results(step: TracedStep, *args: Any) -> list[Any]:
    mesh = _jax.fresh_mesh(np.array(jax.devices()[:1]), ("x",))
    function = annotated_function(step.program, unsharded(step.program), mesh)
    return jax.jit(function)(*jax.tree.leaves(args))


def guarded(state: Any, x: Any) -> Any:
    params, moments = state

    def loss_of(params: Any) -> Any:
        return jnp.sum((x @ params.T) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, moments = OPTIMIZER.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


def by_number(state: Any, x: Any) -> Any:
    """Three branches, by a number that is out of range for one batch, one of them nested."""

    def halved(w: Any) -> Any:
        return lax.cond(w[0, 0] > 0, lambda w: w / 2, lambda w: w, w)

    number = jnp.sum(x).astype(jnp.int32)
    w = lax.switch(number, [lambda w: w, halved, lambda w: w - jnp.max(w)], state)
    return w, jnp.sum(x)


@pytest.mark.parametrize("factor", [1.0, 0.0, np.nan])
@pytest.mark.parametrize("step", [guarded, by_number])
def test_results_are_those_of_the_condition(step: Callable[..., Any], factor: float) -> None:
    batch = np.float32(factor) * X
    state = (W, OPTIMIZER.init(W)) if step is guarded else W
    one = traced(step, state, X)
    selected = select_branches(one)
    assert "cond" in names(one) and "cond" not in names(selected)
    wanted = jax.tree.leaves(jax.jit(step)(state, batch))
    for got, want in zip(results(selected, state, batch), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_branches_with_work_and_those_without_state_stay() -> None:
    def heavy(w: Any, x: Any) -> Any:
        return lax.cond(jnp.sum(x) > 0, lambda w: w @ w.T @ w, lambda w: w, w), jnp.sum(x)

    def of_batch(w: Any, x: Any) -> Any:
        y = lax.cond(jnp.sum(x) > 0, lambda x: x + 1, lambda x: x, x)
        return w + jnp.sum(y), jnp.sum(x)

    def in_loop(w: Any, x: Any) -> Any:
        def loop(w: Any) -> Any:
            return lax.fori_loop(0, 100, lambda _, w: w + 1, w)

        return lax.cond(jnp.sum(x) > 0, loop, lambda w: w, w), jnp.sum(x)

    for step in (heavy, of_batch, in_loop):
        one = traced(step, W, X)
        assert select_branches(one) is one
