"""The gathers and scatters of random programs, most of them by constants: indices, updates or both
are part of the program, so an operator may have fewer operands than its primitive."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.properties.random_pool import MAX_SIZE, Entry, Pool, noise, operation


def some_rows(pool: Pool, size: int) -> np.ndarray:
    """Distinct constant indices into a dimension, in any order."""
    count = pool.rng.randint(1, size)
    return np.array(pool.rng.sample(range(size), count), np.int32)


@operation
def gather_constant_rows(pool: Pool) -> Any:
    a = pool.any_type()
    return a and Entry(a.value[some_rows(pool, a.shape[0])], a.exact)


@operation
def gather_constant_columns(pool: Pool) -> Any:
    a = pool.any_type(2)
    return a and Entry(a.value[..., some_rows(pool, a.shape[-1])], a.exact)


@operation
def gather_pairs(pool: Pool) -> Any:
    a, ids = pool.any_type(2), pool.index(1)
    if a is None or ids is None or prod(ids.shape) * prod(a.shape[2:]) > MAX_SIZE:
        return None
    rows = ids.value.ravel()
    return Entry(a.value[rows % a.shape[0], (rows * 3) % a.shape[1]], a.exact)


@operation
def gather_filled(pool: Pool) -> Any:
    """Indices beyond the end read a fill value, or the last element."""
    a, ids = pool.array(), pool.index(1)
    if a is None or ids is None or prod(ids.shape) * prod(a.shape[1:]) > MAX_SIZE:
        return None
    mode = pool.rng.choice(("fill", "clip", "wrap"))
    rows = ids.value.ravel() - 3
    return Entry(jnp.take(a.value, rows, axis=0, mode=mode, fill_value=0.25), a.exact)


@operation
def scatter_constant(pool: Pool) -> Any:
    """Constant rows get a constant: only the array is an operand."""
    a = pool.array()
    if a is None:
        return None
    target = a.value.at[some_rows(pool, a.shape[0])]
    kind = pool.rng.choice(("set", "add", "multiply", "min", "max"))
    if pool.differentiable and not a.exact and kind in ("min", "max"):
        kind = "set"
    return Entry(getattr(target, kind)(0.5), a.exact and kind == "set")


@operation
def scatter_ones(pool: Pool) -> Any:
    """Counts, as of tokens per expert: the updates are a constant."""
    ids = pool.index(1)
    if ids is None:
        return None
    size = pool.rng.choice((5, 8, 16))
    return Entry(jnp.zeros(size, jnp.int32).at[ids.value.ravel() % size].add(1), True)


@operation
def scatter_into_zeros(pool: Pool) -> Any:
    """The array is a constant, updates and indices are not."""
    a, ids = pool.array(), pool.index(1)
    if a is None or ids is None:
        return None
    rows = jnp.resize(ids.value.ravel(), a.shape[0]) % 8
    return jnp.zeros((8, *a.shape[1:]), jnp.float32).at[rows].add(a.value) / 4


@operation
def scatter_dropped(pool: Pool) -> Any:
    """Updates beyond the end are dropped, as tokens over an expert's capacity are."""
    a, ids = pool.array(), pool.index(1)
    if a is None or ids is None or prod(ids.shape) * prod(a.shape[1:]) > MAX_SIZE:
        return None
    rows = ids.value.ravel() - 2
    return a.value.at[rows].add(noise((len(rows), *a.shape[1:])), mode="drop")


@operation
def scatter_pairs(pool: Pool) -> Any:
    a, ids = pool.array(2), pool.index(1)
    if a is None or ids is None or prod(ids.shape) * prod(a.shape[2:]) > MAX_SIZE:
        return None
    rows = ids.value.ravel()
    return a.value.at[rows % a.shape[0], (rows * 3) % a.shape[1]].add(0.25)


@operation
def scatter_slice(pool: Pool) -> Any:
    """A slice with constant bounds is written."""
    a = pool.array()
    if a is None or a.shape[0] < 2:
        return None
    start = pool.rng.randrange(a.shape[0] - 1)
    return a.value.at[start : start + 2].multiply(0.5)


@operation
def segment_sum(pool: Pool) -> Any:
    a, ids = pool.array(), pool.index(1)
    if a is None or ids is None:
        return None
    segments = jnp.sort(jnp.resize(ids.value.ravel(), a.shape[0]) % 5)
    return jax.ops.segment_sum(a.value, segments, 5, indices_are_sorted=True) / 4


@operation
def segment_max(pool: Pool) -> Any:
    a = pool.array(accept=lambda e: e.exact)
    ids = pool.index(1)
    if a is None or ids is None or pool.differentiable:
        return None
    segments = jnp.resize(ids.value.ravel(), a.shape[0]) % 6
    return Entry(jnp.maximum(jax.ops.segment_max(a.value, segments, 6), -9.0), True)


@operation
def sort_by_key(pool: Pool) -> Any:
    """Rows in the order of integers, as tokens are sorted by expert."""
    a, ids = pool.array(), pool.index(1)
    if a is None or ids is None:
        return None
    order = jnp.argsort(jnp.resize(ids.value.ravel(), a.shape[0]) % 4, stable=True)
    return [Entry(a.value[order], a.exact), Entry(order.astype(jnp.int32), True)]


@operation
def slice_two_ways(pool: Pool) -> Any:
    a, start = pool.any_type(2), pool.index()
    if a is None or start is None:
        return None
    sizes = [max(1, n // 2) for n in a.shape]
    first = start.value.ravel()[0]
    starts = [first % 3 if n > 1 else 0 for n in sizes]
    return Entry(jax.lax.dynamic_slice(a.value, starts, sizes), a.exact)
