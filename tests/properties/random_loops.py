"""The loops of random programs: several carries, nested bodies, trips that the data decide."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.properties.random_pool import MAX_SIZE, Entry, Pool, noise, operation


def square_matrix(size: int, seed: int = 0) -> Any:
    return noise((size, size), seed) / np.sqrt(size)


@operation
def scan_of_carries(pool: Pool) -> Any:
    """An array, a sum and a counter are carried; arrays and integers are read and stacked."""
    a, ids = pool.array(accept=lambda e: prod(e.shape) * 5 <= MAX_SIZE), pool.index(1)
    if a is None or ids is None:
        return None
    rows = ids.value[: pool.rng.choice((2, 3, 5))]
    matrix = square_matrix(a.shape[-1])

    def body(carry: Any, row: Any) -> Any:
        hidden, total, count = carry
        hidden = jnp.tanh(hidden @ matrix) + jnp.sum(row % 3) / 4
        return (hidden, total + hidden.mean(), count + 1), (hidden, count * row)

    start = (a.value, jnp.float32(0.0), jnp.int32(pool.rng.randrange(4)))
    (hidden, total, count), (stacked, counts) = lax.scan(
        body, start, rows, reverse=pool.rng.random() < 0.5
    )
    return [hidden, stacked, total, Entry(counts, True), Entry(count, True)]


@operation
def scan_of_layers(pool: Pool) -> Any:
    """As a model scans over its layers: stacked weights, a checkpointed body."""
    a = pool.array(accept=lambda e: e.shape[-1] <= 16)
    if a is None:
        return None
    weights = noise((3, a.shape[-1], a.shape[-1])) / np.sqrt(a.shape[-1])
    biases = noise((3, a.shape[-1]), 1)

    def body(hidden: Any, layer: Any) -> Any:
        weight, bias = layer
        return hidden + jnp.tanh(hidden @ weight + bias), None

    wrapped = jax.checkpoint(body) if pool.rng.random() < 0.5 else body
    return lax.scan(wrapped, a.value, (weights, biases))[0] / 4


@operation
def nested_scan(pool: Pool) -> Any:
    a = pool.array(2, lambda e: e.shape[0] <= 8 and e.shape[1] <= 8)
    if a is None:
        return None

    def inner(carry: Any, x: Any) -> Any:
        return carry * 0.5 + x.mean(), carry

    def outer(carry: Any, x: Any) -> Any:
        last, seen = lax.scan(inner, carry, x)
        return jnp.sin(last), seen

    return list(lax.scan(outer, jnp.float32(0.5), a.value))


@operation
def scan_with_switch(pool: Pool) -> Any:
    a, ids = pool.array(), pool.index(1)
    if a is None or ids is None:
        return None

    def body(carry: Any, which: Any) -> Any:
        branches = [jnp.tanh, lambda x: jnp.roll(x, 1, 0), lambda x: -x * 0.5]
        return lax.switch(which % 3, branches, carry), None

    return lax.scan(body, a.value, ids.value.ravel()[:3])[0]


@operation
def fori_of_carries(pool: Pool) -> Any:
    a = pool.array()
    b = a and pool.array(accept=lambda e: e.shape == a.shape)
    if b is None:
        return None

    def body(i: Any, carry: Any) -> Any:
        x, y, total = carry
        return jnp.sin(y) + i * 0.1, x, total + jnp.max(jnp.abs(jnp.tanh(y)))

    x, y, total = lax.fori_loop(0, 3, body, (a.value, b.value, jnp.float32(0)))
    return [x, y] if pool.differentiable else [x, y, total]


@operation
def fori_fills(pool: Pool) -> Any:
    """Reads a row and writes another, trip by trip."""
    a = pool.array(accept=lambda e: 2 <= e.shape[0] <= 16)
    if a is None:
        return None
    size = a.shape[0]

    def body(i: Any, filled: Any) -> Any:
        row = lax.dynamic_index_in_dim(a.value, size - 1 - i, 0, keepdims=False)
        return filled.at[i].set(jnp.tanh(row) + noise(row.shape))

    return lax.fori_loop(0, size, body, jnp.zeros_like(a.value))


@operation
def while_of_carries(pool: Pool) -> Any:
    """The data decide on the number of trips."""
    a, ids = pool.array(), pool.index()
    if a is None or ids is None or pool.differentiable:
        return None
    limit = ids.value.ravel()[0] % 4

    def body(carry: Any) -> Any:
        x, seen, i = carry
        return jnp.sin(x) + 0.1, seen.at[i % 4].add(x.mean()), i + 1

    x, seen, trips = lax.while_loop(lambda c: c[2] < limit, body, (a.value, jnp.zeros(4), 0))
    return [x, seen, Entry(jnp.int32(trips), True)]


@operation
def while_of_integers(pool: Pool) -> Any:
    a = pool.index(1)
    if a is None:
        return None
    halve = lambda c: (jnp.where(c[0] > 3, c[0] // 2, c[0]), c[1] + (c[0] > 3))  # noqa: E731
    start = (a.value, jnp.zeros_like(a.value))
    return [Entry(v, True) for v in lax.while_loop(lambda c: jnp.any(c[0] > 3), halve, start)]


@operation
def map_rows(pool: Pool) -> Any:
    a = pool.array(2, lambda e: e.shape[0] <= 16)
    return a and lax.map(lambda row: jax.nn.softmax(row, axis=-1) * 2, a.value)


@operation
def associative_scan(pool: Pool) -> Any:
    a = pool.array()
    if a is None:
        return None

    def compose(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    decay = jax.nn.sigmoid(a.value)
    return lax.associative_scan(compose, (decay, a.value), axis=pool.axis(a))[1] / 2
