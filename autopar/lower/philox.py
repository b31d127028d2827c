"""A shard of the random bits of an `rbg` key: from the key and the shard's position to its bits.

XLA draws the bits of such keys with one `rng_bit_generator`, which it cannot split: every device
would draw the whole array and keep its slice. On CPUs and GPUs the generator is Philox-4x32-10, a
hash of a 128-bit counter: four words of 32 bits for each count, in the order of the array. So any
shard can be drawn by itself, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

PLATFORMS = ("cpu", "gpu", "cuda", "rocm")

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW_HALF = 0xFFFF


def philox_bits(
    words: Any, shape: Sequence[int], starts: Sequence[Any], part: Sequence[int], bit_width: int
) -> Any:
    """The bits of a key (four words) in an array of `shape`: its shard of shape `part` that begins
    at `starts`."""
    per_count = 2 if bit_width == 64 else 4
    if part and shape[-1] % per_count == 0 and part[-1] % per_count == 0:
        counts = [*shape[:-1], shape[-1] // per_count]
        part_counts = [*part[:-1], part[-1] // per_count]
        first = [*starts[:-1], starts[-1] // per_count] if starts else []
        drawn = _hashed(words, _position(counts, first, part_counts))
        stacked = jnp.stack(_elements(drawn, bit_width), axis=-1)
        return stacked.reshape(tuple(part))
    # Rows begin within the words of a count: hash for each element, and select its word.
    low, high = _position(shape, starts, part)
    shift = per_count.bit_length() - 1
    count = (low >> shift) | (high << (32 - shift)), high >> shift
    elements = _elements(_hashed(words, count), bit_width)
    return lax.select_n((low & (per_count - 1)).astype(jnp.int32), *elements)


def _position(shape: Sequence[int], starts: Sequence[Any], part: Sequence[int]) -> tuple[Any, Any]:
    """The position of every element of a shard in the whole array, as (low word, high word)."""
    low, high = (jnp.zeros(tuple(part), jnp.uint32) for _ in range(2))
    for dim, size in enumerate(shape):
        at = lax.broadcasted_iota(jnp.uint32, tuple(part), dim)
        at = at + jnp.asarray(starts[dim]).astype(jnp.uint32)
        carry, scaled = _multiplied(low, size)
        low = scaled + at
        high = high * jnp.uint32(size) + carry + (low < at).astype(jnp.uint32)
    return low, high


def _hashed(words: Any, count: tuple[Any, Any]) -> list[Any]:
    """Four words for each count. The key is also the upper half of the counter."""
    key = [words[0], words[1]]
    low = words[2] + count[0]
    carry = (low < count[0]).astype(jnp.uint32)
    middle = words[3] + count[1]
    over = (middle < count[1]).astype(jnp.uint32)
    middle = middle + carry
    over = over + (middle < carry).astype(jnp.uint32)
    upper = words[0] + over
    top = words[1] + (upper < over).astype(jnp.uint32)
    state = [low, middle, upper, top]
    for _ in range(_ROUNDS):
        high0, low0 = _multiplied(state[0], _MULTIPLIERS[0])
        high1, low1 = _multiplied(state[2], _MULTIPLIERS[1])
        state = [high1 ^ state[1] ^ key[0], low1, high0 ^ state[3] ^ key[1], low0]
        key = [k + jnp.uint32(step) for k, step in zip(key, _KEY_STEPS, strict=True)]
    return state


def _multiplied(a: Any, b: int) -> tuple[Any, Any]:
    """The 64 bits of a product of words, as (high word, low word)."""
    b_high, b_low = jnp.uint32(b >> 16), jnp.uint32(b & _LOW_HALF)
    a_high, a_low = a >> 16, a & _LOW_HALF
    cross, other = a_low * b_high, a_high * b_low
    middle = (a_low * b_low >> 16) + (cross & _LOW_HALF) + (other & _LOW_HALF)
    high = a_high * b_high + (cross >> 16) + (other >> 16) + (middle >> 16)
    return high, a * jnp.uint32(b)


def _elements(drawn: list[Any], bit_width: int) -> list[Any]:
    if bit_width < 64:
        return [word.astype(f"uint{bit_width}") for word in drawn]
    wide = [word.astype(jnp.uint64) for word in drawn]
    return [wide[0] | (wide[1] << 32), wide[2] | (wide[3] << 32)]
