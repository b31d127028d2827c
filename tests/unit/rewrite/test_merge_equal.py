"""What a step computes twice is computed once; values, effects and barriers stay as they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.program import Program
from autopar.rewrite.merge_equal import merge_equal
from autopar.rewrite.step_source import StepSource
from autopar.tracer.flatten import flatten_jaxpr
from autopar.tracer.trace import StepOptions
from tests.unit.tracer.test_flatten import evaluate, names

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def flatten(fn: Callable[..., Any], *args: Any) -> Program:
    return flatten_jaxpr(jax.jit(fn).trace(*args).jaxpr)


def hidden(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def energy(x: Any, w: Any) -> Any:
    return (hidden(x, w) @ w).sum()


REPEATED: dict[str, Callable[[Any, Any], Any]] = {
    "a model applied twice": lambda x, w: hidden(x, w) + 2 * hidden(x, w),
    "through casts": lambda x, w: hidden(x.astype("bfloat16"), w) + hidden(x.astype("bfloat16"), w),
    "two losses and their gradients": lambda x, w: jax.value_and_grad(
        lambda w: energy(x, w) + jax.grad(energy)(x, w).sum()
    )(w),
    "as outputs": lambda x, w: (hidden(x, w), hidden(x, w)),
    "in the body of a loop": lambda x, w: jax.lax.scan(
        lambda c, _: (hidden(c, w) - hidden(c, w) / 2, None), x, None, 3
    ),
}


def num_products(program: Program) -> int:
    return sum(e.name == "dot_general" for e in program.all_equations())


@pytest.mark.parametrize("name", REPEATED)
def test_products_are_as_many_as_xla_computes(name: str) -> None:
    fn = REPEATED[name]
    before = flatten(fn, X, W)
    after = merge_equal(before)
    compiled = jax.jit(fn).lower(X, W).compile().as_text() or ""
    assert num_products(after) == len(re.findall(r" dot\(", compiled)) < num_products(before)
    for got, expected in zip(evaluate(after, X, W), jax.tree.leaves(fn(X, W)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "other operands": lambda x, w: (x @ w) @ w,
    "other parameters": lambda x, w: (x @ w).sum(0) + (x @ w.T).sum(0),
    "other constants": lambda x, w: 2.0 * (x @ w) + 3.0 * jnp.sin(x @ w.T),
    "recomputed layers": lambda x, w: jax.grad(
        lambda w: jax.checkpoint(lambda w: jnp.sin(jnp.sin(x @ w)))(w).sum()
    )(w),
    "before any product": lambda x, w: jnp.cos(x) @ (w @ (jnp.cos(x).T @ x)),
    "moves": lambda x, w: jnp.tile((x @ w)[:, None], (1, 4, 1)).sum() + (x @ w.T)[:, None].sum(),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_repeated_is_left(name: str) -> None:
    program = flatten(KEPT[name], X, W)
    assert merge_equal(program) is program


def test_effects_happen_as_often_as_before() -> None:
    def fn(x: Any, w: Any) -> Any:
        y = hidden(x, w)
        jax.debug.print("{}", y[0, 0])
        z = hidden(x, w)
        jax.debug.print("{}", z[0, 0])
        return y + z

    after = merge_equal(flatten(fn, X, W))
    assert names(after).count("dot_general") == 1
    assert sum(e.has_effect for e in after.equations) == 2


def test_named_values_keep_their_names() -> None:
    def fn(x: Any, w: Any) -> Any:
        return autopar.constrain(x @ w, name="a") + autopar.constrain(x @ w, name="b")

    after = merge_equal(flatten(fn, X, W))
    assert [value.name for value in after.named_values()] == ["a", "b"]


def test_a_step_that_repeats_products_gives_the_same_result_on_devices() -> None:
    """A loss of u, u' and u'' of one network: XLA computes its products once."""

    def step(w: Any, batch: Any) -> Any:
        def u(x: Any, w: Any) -> Any:
            return (jnp.tanh(jnp.tanh(x * w[0]) @ w) @ w).sum()

        def loss(w: Any) -> Any:
            slope = jax.grad(u)
            bend = jax.grad(slope)
            parts = jax.vmap(lambda x: u(x, w) + slope(x, w) + bend(x, w))(batch["x"])
            return jnp.mean(parts**2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    w, batch = jnp.asarray(W), {"x": jnp.linspace(0.0, 1.0, 16)}
    traced = StepSource.of(step, (w, batch), {}, StepOptions()).with_recomputation(())
    assert num_products(traced.program) < num_products(flatten(step, w, batch))
    expected = jax.jit(step)(w, batch)
    got = autopar.parallelize(step, method=autopar.ShardParallel((8,)))(w, batch)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_means_that_are_equal_for_a_micro_batch_alone_are_two() -> None:
    """A mean over a micro-batch of four rows, and a division by four."""

    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            rows = jnp.tanh(batch @ w).sum(1)
            return rows.sum() / 4.0 + jnp.mean(rows)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    w, batch = jnp.asarray(W), jnp.asarray(np.concatenate([X, X + 1]))
    expected = jax.jit(step)(w, batch)
    method = autopar.ShardParallel(num_micro_batches=2)
    got = autopar.parallelize(step, method=method)(w, batch)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
