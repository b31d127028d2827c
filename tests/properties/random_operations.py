"""The operations of random programs on arrays of floats: products, sums, moves, windows, sorts."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.properties.random_pool import MAX_SIZE, Entry, Pool, noise, operation


@operation
def dot(pool: Pool) -> Any:
    a = pool.array()
    if a is None:
        return None
    axis = pool.axis(a)
    size = a.shape[axis]
    b = pool.array(accept=lambda e: size in e.shape and e is not a) or a
    other = b.shape.index(size)
    if prod(a.shape) * prod(b.shape) // size**2 > MAX_SIZE:
        return None
    return jnp.tensordot(a.value, b.value, ((axis,), (other,))) / np.sqrt(size)


@operation
def batched_dot(pool: Pool) -> Any:
    a = pool.array(2)
    b = a and pool.array(2, lambda e: e.shape[0] == a.shape[0] and e.shape[-1] == a.shape[-1])
    if b is None or prod(a.shape) * prod(b.shape) // a.shape[0] // a.shape[-1] ** 2 > MAX_SIZE:
        return None
    numbers = (((a.value.ndim - 1,), (b.value.ndim - 1,)), ((0,), (0,)))
    return jax.lax.dot_general(a.value, b.value, numbers) / np.sqrt(a.shape[-1])


@operation
def project(pool: Pool) -> Any:
    a = pool.array()
    if a is None or prod(a.shape) // a.shape[-1] * 16 > MAX_SIZE:
        return None
    return a.value @ noise((a.shape[-1], pool.rng.choice((8, 16)))) / np.sqrt(a.shape[-1])


@operation
def reduce_sum(pool: Pool) -> Any:
    a = pool.array()
    return a and jnp.sum(a.value, axis=pool.axis(a), keepdims=pool.rng.random() < 0.5) / 4


@operation
def reduce_mean(pool: Pool) -> Any:
    a = pool.array()
    return a and jnp.mean(a.value, axis=pool.axis(a))


@operation
def reduce_max(pool: Pool) -> Any:
    a = pool.array(accept=lambda e: e.exact or not pool.differentiable)
    return a and Entry(jnp.max(a.value, axis=pool.axis(a)), a.exact)


@operation
def argmax(pool: Pool) -> Any:
    a = pool.pick(lambda e: e.exact and e.value.ndim > 0)
    return a and Entry(jnp.argmax(a.value, axis=pool.axis(a)).astype(jnp.int32), True)


@operation
def reshape_merge(pool: Pool) -> Any:
    a = pool.any_type(2)
    if a is None:
        return None
    at = pool.rng.randrange(a.value.ndim - 1)
    shape = (*a.shape[:at], a.shape[at] * a.shape[at + 1], *a.shape[at + 2 :])
    return Entry(a.value.reshape(shape), a.exact)


@operation
def reshape_split(pool: Pool) -> Any:
    a = pool.any_type(accept=lambda e: any(n % 4 == 0 for n in e.shape) and e.value.ndim < 4)
    if a is None:
        return None
    at = next(i for i, n in enumerate(a.shape) if n % 4 == 0)
    part = pool.rng.choice((2, 4))
    pair = (part, a.shape[at] // part) if pool.rng.random() < 0.5 else (a.shape[at] // part, part)
    return Entry(a.value.reshape(*a.shape[:at], *pair, *a.shape[at + 1 :]), a.exact)


@operation
def transpose(pool: Pool) -> Any:
    a = pool.pick(lambda e: e.value.ndim >= 2)
    if a is None:
        return None
    order = list(range(a.value.ndim))
    pool.rng.shuffle(order)
    return Entry(jnp.transpose(a.value, order), a.exact)


@operation
def broadcast(pool: Pool) -> Any:
    a = pool.any_type(0, lambda e: prod(e.shape) * 8 <= MAX_SIZE and e.value.ndim < 4)
    if a is None:
        return None
    at = pool.rng.randrange(a.value.ndim + 1)
    wide = jnp.expand_dims(a.value, at)
    return Entry(jnp.broadcast_to(wide, (*a.shape[:at], 8, *a.shape[at:])), a.exact)


@operation
def slice_part(pool: Pool) -> Any:
    a = pool.pick(lambda e: e.value.ndim > 0)
    if a is None:
        return None
    axis = pool.axis(a)
    size = a.shape[axis]
    start = pool.rng.randrange(size)
    step = pool.rng.choice((1, 1, 2))
    return Entry(jax.lax.slice_in_dim(a.value, start, size, step, axis), a.exact)


@operation
def dynamic_slice_part(pool: Pool) -> Any:
    a, start = pool.array(), pool.index()
    if a is None or start is None:
        return None
    axis = pool.axis(a)
    size = max(1, a.shape[axis] // 2)
    where = start.value.ravel()[0] % 3
    return Entry(jax.lax.dynamic_slice_in_dim(a.value, where, size, axis), a.exact)


@operation
def dynamic_update(pool: Pool) -> Any:
    a, start = pool.array(), pool.index()
    if a is None or start is None:
        return None
    axis = pool.axis(a)
    shape = list(a.shape)
    shape[axis] = max(1, shape[axis] // 2)
    where = start.value.ravel()[0] % 3
    # The update must not be made from the array: XLA's CPU compiler fuses the two and reads what it
    # has written already (`jax.jit` on one device, JAX 0.12).
    return jax.lax.dynamic_update_slice_in_dim(a.value, noise(tuple(shape)), where, axis)


@operation
def pad(pool: Pool) -> Any:
    a = pool.any_type()
    if a is None:
        return None
    widths = [(0, 0)] * a.value.ndim
    widths[pool.axis(a)] = pool.rng.choice(((0, 8), (1, 1), (4, 4), (3, 0)))
    return Entry(jnp.pad(a.value, widths), a.exact)


def alike(a: Entry, b: Entry) -> bool:
    return a.shape == b.shape and a.value.dtype == b.value.dtype


@operation
def concatenate(pool: Pool) -> Any:
    a = pool.any_type(accept=lambda e: prod(e.shape) * 2 <= MAX_SIZE)
    if a is None:
        return None
    b = pool.any_type(accept=lambda e: alike(e, a)) or a
    axis = pool.axis(a)
    return Entry(jnp.concatenate([a.value, b.value], axis), a.exact and b.exact)


@operation
def roll(pool: Pool) -> Any:
    a = pool.any_type()
    return a and Entry(jnp.roll(a.value, pool.rng.choice((1, 3, -2)), pool.axis(a)), a.exact)


@operation
def reverse(pool: Pool) -> Any:
    a = pool.any_type()
    return a and Entry(jnp.flip(a.value, pool.axis(a)), a.exact)


@operation
def lookup(pool: Pool) -> Any:
    table, ids = pool.any_type(), pool.index()
    if table is None or ids is None:
        return None
    size = prod(ids.shape) * prod(table.shape[1:])
    if size > MAX_SIZE or ids.value.ndim + table.value.ndim > 5:
        return None
    return Entry(table.value[ids.value % table.shape[0]], table.exact)


@operation
def take_along(pool: Pool) -> Any:
    a = pool.any_type()
    if a is None:
        return None
    axis = pool.axis(a)
    ids = pool.pick(lambda e: e.is_int and e.shape == a.shape)
    if ids is None:
        count = jnp.arange(prod(a.shape), dtype=jnp.int32).reshape(a.shape)
        ids = Entry(count * 7, True)
    return Entry(jnp.take_along_axis(a.value, ids.value % a.shape[axis], axis), a.exact)


@operation
def scatter_add(pool: Pool) -> Any:
    a, ids = pool.array(), pool.index(1)
    if a is None or ids is None or prod(ids.shape) * prod(a.shape[1:]) > MAX_SIZE:
        return None
    rows = ids.value.ravel() % a.shape[0]
    return a.value.at[rows].add(noise((len(rows), *a.shape[1:])))


@operation
def scatter_set(pool: Pool) -> Any:
    a, by = pool.array(), pool.index()
    if a is None or by is None:
        return None
    count = max(1, a.shape[0] // 2)
    rows = (jnp.arange(count) * 2 + by.value.ravel()[0] % 2) % a.shape[0]  # all different
    return a.value.at[rows].set(noise((count, *a.shape[1:])), unique_indices=True)


@operation
def scatter_columns(pool: Pool) -> Any:
    a, ids = pool.array(2), pool.index(1)
    if a is None or ids is None or prod(ids.shape) * a.shape[0] > MAX_SIZE or a.value.ndim > 2:
        return None
    columns = ids.value.ravel() % a.shape[1]
    return a.value.at[:, columns].add(0.5)


@operation
def conv1d(pool: Pool) -> Any:
    a = pool.array(accept=lambda e: prod(e.shape) % 64 == 0)
    if a is None:
        return None
    return jax.lax.conv_general_dilated(
        a.value.reshape(-1, 8, 8),
        noise((3, 8, 8)) / 5,
        (pool.rng.choice((1, 2)),),
        pool.rng.choice(("SAME", "VALID")),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )


@operation
def conv2d(pool: Pool) -> Any:
    a = pool.array(accept=lambda e: prod(e.shape) % 128 == 0)
    if a is None:
        return None
    groups = pool.rng.choice((1, 1, 2, 8))
    return jax.lax.conv_general_dilated(
        a.value.reshape(-1, 4, 4, 8),
        noise((2, 2, 8 // groups, 8)) / 5,
        (1, pool.rng.choice((1, 2))),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@operation
def max_pool(pool: Pool) -> Any:
    a = pool.array(2, lambda e: e.exact or not pool.differentiable)
    if a is None or a.shape[-1] < 2:
        return None
    window = (*((1,) * (a.value.ndim - 1)), 2)
    return Entry(
        jax.lax.reduce_window(a.value, -jnp.inf, jax.lax.max, window, window, "VALID"), a.exact
    )


@operation
def softmax(pool: Pool) -> Any:
    a = pool.array()
    return a and jax.nn.softmax(a.value, axis=pool.axis(a)) * 4


@operation
def cumsum(pool: Pool) -> Any:
    a = pool.array()
    return a and jnp.cumsum(a.value, axis=pool.axis(a)) / 8


@operation
def sort(pool: Pool) -> Any:
    a = pool.array(accept=lambda e: e.exact or not pool.differentiable)
    return a and Entry(jnp.sort(a.value, axis=pool.axis(a)), a.exact)


@operation
def top_k(pool: Pool) -> Any:
    a = pool.array(accept=lambda e: e.exact and e.shape[-1] >= 2)
    return a and [Entry(v, True) for v in jax.lax.top_k(a.value, 2)]


@operation
def elementwise(pool: Pool) -> Any:
    a = pool.array(0)
    return a and pool.rng.choice((jnp.tanh, jnp.sin, jax.nn.gelu, jnp.square))(a.value)


@operation
def add(pool: Pool) -> Any:
    a = pool.array(0)
    b = a and pool.array(0, lambda e: e.shape == a.shape)
    return b and (a.value + b.value) / 2


@operation
def multiply_by_vector(pool: Pool) -> Any:
    a = pool.array()
    b = a and pool.array(accept=lambda e: e.value.ndim == 1 and e.shape[0] in (1, a.shape[-1]))
    return b and a.value * jnp.tanh(b.value)


@operation
def where(pool: Pool) -> Any:
    a, ids = pool.array(), pool.index(1)
    if a is None or ids is None:
        return None
    mask = jnp.resize(ids.value % 2, a.shape) == 0
    return jnp.where(mask, a.value, -0.5)


@operation
def convert(pool: Pool) -> Any:
    a = pool.array(0)
    # Through bfloat16 and back a last bit can become a large one, unless the value is exact.
    kind = jnp.bfloat16 if a is not None and a.exact else jnp.float32
    return a and Entry(a.value.astype(kind).astype(jnp.float32), a.exact)


@operation
def integers(pool: Pool) -> Any:
    a = pool.index()
    return a and Entry((a.value * 5 + pool.rng.randrange(7)) % 23, True)


@operation
def one_hot(pool: Pool) -> Any:
    ids = pool.pick(lambda e: e.is_int and prod(e.shape) * 8 <= MAX_SIZE and e.value.ndim < 4)
    return ids and Entry(jax.nn.one_hot(ids.value % 8, 8), True)


@operation
def random_normal(pool: Pool) -> Any:
    a = pool.array()
    key = jax.random.key(pool.rng.randrange(100))
    return a and a.value + jax.random.normal(key, a.shape)


@operation
def scan(pool: Pool) -> Any:
    a = pool.array(accept=lambda e: prod(e.shape) * 3 <= MAX_SIZE)
    if a is None:
        return None
    matrix = noise((a.shape[-1], a.shape[-1])) / np.sqrt(a.shape[-1])
    xs = jnp.stack([a.value, -a.value, a.value * 0.5])

    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        carry = jnp.tanh(carry @ matrix + x)
        return carry, carry.sum(-1)

    return list(jax.lax.scan(body, a.value, xs, reverse=pool.rng.random() < 0.5))


@operation
def cond(pool: Pool) -> Any:
    a, ids = pool.array(), pool.index()
    if a is None or ids is None:
        return None
    branches = [jnp.tanh, lambda x: jnp.cumsum(x, axis=0) / 8]
    return jax.lax.switch(ids.value.ravel()[0] % 2, branches, a.value)


@operation
def while_loop(pool: Pool) -> Any:
    a = pool.array()
    if a is None or pool.differentiable:
        return None
    state = jax.lax.while_loop(
        lambda c: c[1] < 3, lambda c: (jnp.roll(jnp.sin(c[0]), 1, 0), c[1] + 1), (a.value, 0)
    )
    return state[0]


@operation
def checkpoint(pool: Pool) -> Any:
    a = pool.array()
    return a and jax.checkpoint(lambda x: jnp.sin(jax.nn.softmax(x, axis=-1) * 3))(a.value)
