"""Operations of random programs in other types: half floats, narrow integers, unsigned ones, bools.

Integer arithmetic wraps around alike in every order, so its results are exact. Results of `HALF`
operations are compared by what a half float can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.properties.random_operations import alike
from tests.properties.random_pool import MAX_SIZE, Entry, Pool, noise, operation

NARROW = (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16)
HALVES = (jnp.bfloat16, jnp.float16)
HALF: set[str] = set()


def half_operation(fn: Callable[[Pool], Any]) -> Callable[[Pool], Any]:
    HALF.add(fn.__name__)
    return operation(fn)


def half_array(pool: Pool, min_dims: int = 1) -> Entry | None:
    return pool.any_type(min_dims, lambda e: e.value.dtype in HALVES)


def narrow_array(pool: Pool, min_dims: int = 0) -> Entry | None:
    wide = (*NARROW, jnp.uint32, jnp.int32)
    return pool.any_type(min_dims, lambda e: e.value.dtype in wide)


@half_operation
def to_half(pool: Pool) -> Any:
    a = pool.array(0)
    return a and Entry(a.value.astype(pool.rng.choice(HALVES)), False)


@half_operation
def half_product(pool: Pool) -> Any:
    a = pool.array()
    if a is None or prod(a.shape) // a.shape[-1] * 8 > MAX_SIZE:
        return None
    kind = pool.rng.choice(HALVES)
    left = jnp.tanh(a.value).astype(kind)
    right = (noise((a.shape[-1], 8)) / np.sqrt(a.shape[-1])).astype(kind)
    wide = jnp.float32 if pool.rng.random() < 0.5 else None
    return jnp.matmul(left, right, preferred_element_type=wide)


@half_operation
def half_sum(pool: Pool) -> Any:
    a = half_array(pool)
    return a and jnp.mean(jnp.tanh(a.value), axis=pool.axis(a))


@half_operation
def half_elementwise(pool: Pool) -> Any:
    a = half_array(pool, 0)
    return a and pool.rng.choice((jnp.tanh, jnp.sin, jax.nn.sigmoid))(a.value)


@half_operation
def half_norm(pool: Pool) -> Any:
    """As mixed precision does it: statistics in float32, the rest in the half type."""
    a = half_array(pool)
    if a is None:
        return None
    wide = a.value.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 0.1)
    return (wide * scale).astype(a.value.dtype)


@half_operation
def from_half(pool: Pool) -> Any:
    a = half_array(pool, 0)
    return a and a.value.astype(jnp.float32)


@operation
def to_narrow(pool: Pool) -> Any:
    a = pool.index()
    kind = pool.rng.choice((*NARROW, jnp.uint32))
    return a and Entry((a.value % 100).astype(kind), True)


@operation
def integer_arithmetic(pool: Pool) -> Any:
    a = narrow_array(pool)
    b = a and pool.any_type(0, lambda e: alike(e, a))
    if a is None or b is None:
        return None
    by = pool.rng.choice(
        (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, jnp.bitwise_xor, jnp.bitwise_and)
    )
    return Entry(by(a.value, b.value), True)


@operation
def integer_sum(pool: Pool) -> Any:
    a = narrow_array(pool, 1)
    if a is None:
        return None
    by, axis = pool.rng.choice((jnp.sum, jnp.max, jnp.min, jnp.prod)), pool.axis(a)
    options = {"dtype": a.value.dtype} if by in (jnp.sum, jnp.prod) else {}
    return Entry(by(a.value, axis=axis, **options), True)


@operation
def integer_cumsum(pool: Pool) -> Any:
    a = narrow_array(pool, 1)
    return a and Entry(jnp.cumsum(a.value, axis=pool.axis(a), dtype=a.value.dtype), True)


@operation
def integer_product(pool: Pool) -> Any:
    """A quantised product: int8 by int8, summed in int32."""
    a = pool.array()
    if a is None or not a.exact or prod(a.shape) // a.shape[-1] * 8 > MAX_SIZE:
        return None
    quantised = jnp.clip(jnp.round(a.value * 32), -127, 127).astype(jnp.int8)
    weights = (jnp.arange(a.shape[-1] * 8, dtype=jnp.int32) * 7 % 200 - 100).astype(jnp.int8)
    weights = weights.reshape(a.shape[-1], 8)
    return Entry(jnp.matmul(quantised, weights, preferred_element_type=jnp.int32) % 1009, True)


@operation
def to_bool(pool: Pool) -> Any:
    a = pool.any_type(1, lambda e: e.exact and e.value.dtype != bool)
    return a and Entry(a.value > 1, True)


@operation
def mask_by(pool: Pool) -> Any:
    mask = pool.any_type(1, lambda e: e.value.dtype == bool)
    a = mask and pool.array(accept=lambda e: e.shape == mask.shape)
    if mask is None:
        return None
    if a is None:
        return Entry(jnp.sum(mask.value, axis=pool.axis(mask), dtype=jnp.int32), True)
    return Entry(jnp.where(mask.value, a.value, 0.0), a.exact)


@operation
def bits(pool: Pool) -> Any:
    a = pool.array(accept=lambda e: e.exact)
    if a is None or pool.differentiable:
        return None
    words = jax.lax.bitcast_convert_type(a.value, jnp.uint32)
    return Entry((words >> pool.rng.choice((1, 5, 9))) ^ jnp.uint32(0x5BD1E995), True)
