"""The rows of a micro-batch: functions on arrays that cut a batch into micro-batches and join them.

Rows are dealt out in blocks: blocks 0, n, 2n, … of k rows are micro-batch 0, blocks 1, n + 1, … are
micro-batch 1. So a batch whose rows are split over devices is cut in place: each device gives every
micro-batch an equal share of its rows. k is 1 unless the program groups neighbouring rows; groups
stay together.

Every function here is traced into the program; `num` is the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, lcm, prod

import jax
import jax.numpy as jnp

from autopar import _jax


def block_rows(num_rows: int, sizes: Iterable[int]) -> int:
    """The rows of a block. `sizes` are the sizes of the batch dimension in the program: if it is
    B / g, rows come in groups of g; if groups straddle rows, a block has enough rows for whole
    groups."""
    return lcm(*(num_rows // gcd(num_rows, size) for size in sizes))


def cut(array: jax.Array, *, num: int, dim: int, blocks: int) -> jax.Array:
    """(…, B, …) → (n, …, b, …): the stack of micro-batches, each of so many blocks."""
    shape = array.shape
    inside = shape[dim] // (num * blocks)
    apart = array.reshape(*shape[:dim], blocks, num, inside, *shape[dim + 1 :])
    stacked = jnp.moveaxis(apart, dim + 1, 0)
    return stacked.reshape(num, *shape[:dim], blocks * inside, *shape[dim + 1 :])


def join(stack: jax.Array, *, dim: int, blocks: int) -> jax.Array:
    """The inverse of `cut`; `dim` is the batch dimension of the result."""
    num, *shape = stack.shape
    inside = shape[dim] // blocks
    apart = stack.reshape(num, *shape[:dim], blocks, inside, *shape[dim + 1 :])
    ordered = jnp.moveaxis(apart, 0, dim + 1)
    return ordered.reshape(*shape[:dim], num * shape[dim], *shape[dim + 1 :])


def indices(*, num: int) -> jax.Array:
    return jnp.arange(num, dtype=jnp.uint32)


def bits_of_rows(
    key: jax.Array,
    index: jax.Array,
    *,
    shape: tuple[int, ...],
    dim: int,
    num: int,
    blocks: int,
    bit_width: int,
) -> jax.Array:
    """The random bits of the whole batch's program in the rows of micro-batch `index`."""
    high, low = _positions(index, shape, dim, num, blocks)

    def one(key: jax.Array) -> jax.Array:
        return _jax.threefry_bits(key, high, low, bit_width)

    for _ in key.shape:
        one = jax.vmap(one)
    return one(key)


def bits_of_micro_batch(
    key: jax.Array, index: jax.Array, *, shape: tuple[int, ...], bit_width: int
) -> jax.Array:
    """Separate random bits for a micro-batch, for keys whose bits cannot be drawn by position."""

    def one(key: jax.Array) -> jax.Array:
        folded = jax.random.fold_in(key, index)
        return jax.random.bits(folded, shape, f"uint{bit_width}")

    for _ in key.shape:
        one = jax.vmap(one)
    return one(key)


def _positions(
    index: jax.Array, shape: tuple[int, ...], dim: int, num: int, blocks: int
) -> tuple[jax.Array, jax.Array]:
    """The row-major position of each element in the whole batch's array: 64 bits as two words."""
    inside = shape[dim] // blocks
    whole = (*shape[:dim], shape[dim] * num, *shape[dim + 1 :])
    is_wide = prod(whole) > 2**32
    high = low = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        at = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        if axis == dim:
            at = (at // inside * num + index) * inside + at % inside
        stride = prod(whole[axis + 1 :])
        if is_wide:
            step_high, step_low = _product(at, stride)
            carried = (low + step_low < low).astype(jnp.uint32)
            high, low = high + step_high + carried, low + step_low
        else:
            low = low + at * jnp.uint32(stride)
    return high, low


def _product(word: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
    """(high, low) words of a word times a number below 2⁶⁴ (modulo 2⁶⁴)."""
    factor_high, factor_low = divmod(factor, 2**32)
    a_high, a_low = word >> 16, word & 0xFFFF
    b_high, b_low = (jnp.uint32(part) for part in divmod(factor_low, 2**16))
    low_low, low_high, high_low = a_low * b_low, a_low * b_high, a_high * b_low
    middle = (low_low >> 16) + (low_high & 0xFFFF) + (high_low & 0xFFFF)
    high = a_high * b_high + (low_high >> 16) + (high_low >> 16) + (middle >> 16)
    return high + word * jnp.uint32(factor_high), word * jnp.uint32(factor_low)
