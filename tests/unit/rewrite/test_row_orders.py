"""Rows that lie in another order than the batch's meet rows of the same order, or it is noted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.errors import TraceError
from tests.unit.rewrite.test_accumulate import accumulated, check_exact, parallel

ROWS, D = 8, 4
RNG = np.random.default_rng(0)
W = RNG.normal(size=(D, D)).astype(np.float32)
BATCH = {
    "x": RNG.normal(size=(ROWS, D)).astype(np.float32),
    "y": RNG.normal(size=(ROWS, D)).astype(np.float32),
    "ids": (np.arange(ROWS) * 3 % 7).astype(np.int32),
}
NOISE = RNG.normal(size=(2 * ROWS, D)).astype(np.float32)

Rows = Callable[[Any, Any, Any, Any], Any]  # of weights, x, y and ids


def twice(a: Any) -> Any:
    """Each view of the batch after the other: order 2."""
    return jnp.tile(a, (2, *(1 for _ in a.shape[1:])))


def net(w: Any, *views: Any) -> Any:
    return jnp.tanh(jnp.concatenate(views) @ w)


def halves(a: Any) -> Any:
    return a.reshape(2, -1, D).swapaxes(0, 1).reshape(-1, D)


def key() -> Any:
    return jax.random.key(0)


# Every row meets what it meets in the whole batch.
EXACT: dict[str, Rows] = {
    "tiled alike": lambda w, x, y, ids: twice(x @ w) * twice(y) * twice(ids)[:, None],
    "stacked, labels tiled": lambda w, x, y, ids: (
        jnp.stack([x @ w, y]).reshape(-1, D) * twice(ids)[:, None]
    ),
    "side by side, labels repeated": lambda w, x, y, ids: (
        jnp.stack([x @ w, y], 1).reshape(-1, D) * jnp.repeat(ids, 2)[:, None]
    ),
    "noise on views": lambda w, x, y, ids: twice(x @ w) + jax.random.normal(key(), (2 * len(x), D)),
    "dropout on heads": lambda w, x, y, ids: jnp.where(
        jax.random.bernoulli(key(), 0.5, (D * len(x),)), (x @ w).T.ravel(), 0.0
    ),
    "siamese": lambda w, x, y, ids: (lambda z: z[: len(x)] - z[len(x) :])(net(w, x, y)),
    "three views": lambda w, x, y, ids: (lambda z: z[0] * z[1] + z[2])(
        jnp.split(net(w, x, y, x * y), 3)
    ),
    "views of views": lambda w, x, y, ids: net(w, jnp.concatenate([x, y]), twice(x)) * y[0, 0],
    "real and made up": lambda w, x, y, ids: (
        net(w, x, y @ w) * jnp.concatenate([jnp.ones(len(x)), -jnp.ones(len(x))])[:, None]
    ),
    "views swapped": lambda w, x, y, ids: net(w, x, y) * jnp.concatenate([y, x]),
    "views in a loop": lambda w, x, y, ids: (lambda z: z[: len(x)] * z[len(x) :])(
        lax.scan(lambda c, _: (jnp.tanh(c @ w), None), jnp.concatenate([x, y]), None, length=2)[0]
    ),
}

# Rows meet others, and a micro-batch has only its own.
NOTED: dict[str, Rows] = {
    "tiled and repeated": lambda w, x, y, ids: twice(x @ w) * jnp.repeat(y, 2, 0),
    "stacked, labels repeated": lambda w, x, y, ids: (
        jnp.stack([x @ w, y]).reshape(-1, D) * jnp.repeat(ids, 2)[:, None]
    ),
    "transposed and not": lambda w, x, y, ids: (x @ w).T.ravel() * y.ravel(),
    "keys of views": lambda w, x, y, ids: (
        twice(x @ w)
        * jax.vmap(lambda k: jax.random.normal(k, (D,)))(jax.random.split(key(), 2 * len(x)))
    ),
    "every other row of views": lambda w, x, y, ids: twice(x @ w)[::2] * y,
    "every other row, by number": lambda w, x, y, ids: (
        twice(x @ w)[jnp.arange(0, 2 * len(x), 2), ids % D] * y[:, 0]
    ),
    "own columns of another order": lambda w, x, y, ids: twice(x @ w)[
        jnp.arange(2 * len(x)), jnp.repeat(ids, 2) % D
    ],
    "a constant per row of views": lambda w, x, y, ids: twice(x @ w) * NOISE[: 2 * len(x)],
    "halves swapped": lambda w, x, y, ids: halves(x @ w) * y,
    "halves swapped in a loop": lambda w, x, y, ids: (
        lax.scan(lambda c, _: (jnp.tanh(halves(c) @ w), None), x, None, length=2)[0] * y
    ),
    "halves swapped in a branch": lambda w, x, y, ids: lax.cond(
        w[0, 0] > 0, lambda a: halves(a) * y, lambda a: halves(a) - y, x @ w
    ),
    "orders that a branch chooses": lambda w, x, y, ids: (
        lax.cond(w[0, 0] > 0, lambda: twice(x @ w), lambda: jnp.repeat(y @ w, 2, 0)) * twice(y)
    ),
}


def mean_of(rows: Rows) -> Callable[[Any, Any], Any]:
    def step(w: Any, batch: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.sin(rows(w, batch["x"], batch["y"], batch["ids"])))

        value, slope = jax.value_and_grad(loss)(w)
        return w - 0.1 * slope, value

    return step


def in_one(cases: dict[str, Rows]) -> Callable[[Any, Any], Any]:
    """One step of all, since compiling one is quicker."""
    return lambda w, batch: {name: mean_of(rows)(w, batch) for name, rows in cases.items()}


@pytest.mark.parametrize("num", [2, 4])
def test_rows_that_meet_as_in_the_whole_batch(num: int) -> None:
    check_exact(in_one(EXACT), W, BATCH, num=num)


@pytest.mark.parametrize("name", NOTED)
def test_rows_that_meet_others_are_noted(name: str) -> None:
    step = accumulated(mean_of(NOTED[name]), W, BATCH, num=2)
    assert any("test_row_orders.py" in note and "rows of the batch" in note for note in step.notes)


def test_views_are_returned_in_their_order() -> None:
    def step(w: Any, batch: Any) -> Any:
        x, y = batch["x"] @ w, batch["y"]
        views = jnp.concatenate([x, y])
        return jnp.mean(x**2), views, twice(x), jnp.sort(views, axis=0)[:3]

    check_exact(step, W, BATCH, num=2)


# -- steps that name the size of their batch

NAMED: dict[str, Rows] = {
    "own column": lambda w, x, y, ids: (x @ w)[jnp.arange(ROWS), ids % D],
    "chosen columns": lambda w, x, y, ids: (
        (x @ w).at[jnp.arange(ROWS)[:, None], jnp.stack([ids % D, (ids + 1) % D], 1)].add(y[:, :2])
    ),
    "keys": lambda w, x, y, ids: (
        (x @ w) * jax.vmap(lambda k: jax.random.normal(k, (D,)))(jax.random.split(key(), ROWS))
    ),
    "raw keys": lambda w, x, y, ids: (
        (x @ w)
        * jax.vmap(jax.random.uniform)(jax.random.split(jax.random.PRNGKey(3), ROWS))[:, None]
    ),
    "reshape": lambda w, x, y, ids: (x @ w).reshape(2 * ROWS, -1).reshape(ROWS, D) * y,
}


def test_a_step_that_names_the_size_of_its_batch() -> None:
    check_exact(in_one(NAMED), W, BATCH, num=4)


def test_places_by_a_named_size_are_noted() -> None:
    step = accumulated(mean_of(lambda w, x, y, ids: (x @ w) * jnp.arange(ROWS)[:, None]), W, BATCH)
    assert "uses the place of rows" in " ".join(step.notes)


def test_a_named_size_that_no_micro_batch_can_have_is_an_error() -> None:
    step = parallel(mean_of(lambda w, x, y, ids: jnp.where(jnp.eye(ROWS), x @ y.T, 0.0)), 2)
    text = r"num_micro_batches=2 .* 4 of the batch's 8 rows.*test_row_orders\.py.*shape\[0\]"
    with pytest.raises(TraceError, match=text):
        step(W, BATCH)
