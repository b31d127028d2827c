"""Rows that other rows decide, in front of the first product or after the last: on micro-batches a
step gives what `jax.jit` gives for the whole batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.rewrite.test_accumulate import MIXES, W, X, check_exact, parallel, sgd

NOT_PUT_OFF = ("convolution along rows", "groups of rows", "given groups", "a callback")
PUT_OFF = {
    **{name: mix for name, mix in MIXES.items() if name not in (*NOT_PUT_OFF, "merged features")},
    "cumulative": lambda y: jnp.cumsum(y, axis=0),
    "softmax of rows": lambda y: jax.nn.softmax(y, axis=0),
    "beside their median": lambda y: y - jnp.median(y, axis=0),
    "differences": lambda y: jnp.sum((y[:, None] - y) ** 2, axis=-1),
    "other rows alone": lambda y: jnp.where(jnp.eye(len(y)) > 0, 0, y[:, :1] - y[:, 1]),
    "by number": lambda y: y * jnp.arange(len(y))[:, None],
}


@pytest.mark.representatives("rows by batch", "softmax of rows", "other rows alone", "by number")
@pytest.mark.parametrize("mix", PUT_OFF.values(), ids=PUT_OFF)
def test_what_mixes_rows_waits_for_all_rows(mix: Any):
    """If no product depends on it: as results, and as sums."""

    def step(w: Any, x: Any) -> Any:
        loss, slope = jax.value_and_grad(lambda w: jnp.mean(jnp.sin(x @ w) ** 2))(w)
        y = mix(jnp.tanh(x @ w))
        return w - slope, loss, y, jnp.mean(jnp.sin(y))

    check_exact(step, W, X)


@pytest.mark.parametrize(
    "measure",
    [jnp.var, jax.nn.logsumexp, lambda rows: jnp.var(rows, axis=0) / jnp.std(rows[:, :1])],
    ids=["var", "logsumexp", "ratio"],
)
def test_metrics_of_rows_beside_their_statistics_are_exact(measure: Any):
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y = jnp.sin(x @ w)
            return jnp.mean(y**2), (measure(y), measure(y @ W.T))

        (value, metrics), slope = jax.value_and_grad(loss, has_aux=True)(w)
        return w - slope, value, metrics

    check_exact(step, W, X)


MIXED_BATCHES = {
    "mixup": lambda x: 0.3 * x + 0.7 * x[jax.random.permutation(jax.random.key(0), len(x))],
    "reversed": lambda x: jnp.where(jnp.arange(6) < 2, x, x[::-1]),
    "ranks": lambda x: x + jnp.argsort(jnp.argsort(x, axis=0), axis=0) / len(x),
    "cumulative": lambda x: jnp.tanh(jnp.cumsum(x, axis=0)),
}


@pytest.mark.parametrize("mix", MIXED_BATCHES.values(), ids=MIXED_BATCHES)
def test_rows_of_the_batch_are_mixed_before_the_loop(mix: Any):
    """Whatever mixes the batch itself, in front of the first product, sees all of it."""
    check_exact(sgd(lambda w, x: jnp.mean(jnp.sin(mix(x) @ w) ** 2)), W, X)


@pytest.mark.parametrize(
    "order",
    [
        lambda x: jnp.argsort(x[:, 0]),
        lambda x: jax.random.permutation(jax.random.key(0), len(x)),
    ],
    ids=["sorted", "shuffled"],
)
def test_an_order_that_the_loop_needs_is_that_of_a_micro_batch_everywhere(order: Any):
    """What is put in the same order beside it, without a product, still meets its own rows."""

    def loss(w: Any, x: Any) -> Any:
        at = order(x)
        return jnp.mean(jnp.sin((x @ w)[at] - x[at] @ W) ** 2)

    step = parallel(sgd(loss))
    got, want = step(0.5 * W, X), jax.jit(sgd(loss))(0.5 * W, X)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
    assert any("gather combines" in note for note in step.last_executable.plan.warnings)
