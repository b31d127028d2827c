"""Parts of the random bits of rbg keys are those that XLA draws."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax import lax

from autopar.lower.philox import philox_bits

ORDINARY = (11, 22, 33, 44)
# The counter runs over into its upper half, and on into the key.
AT_THE_END = (0xFFFFFFFF, 7, 0xFFFFFFFE, 0xFFFFFFFF)


@pytest.mark.representatives("(24,)-32-(11, 22, 33, 44)")
@pytest.mark.parametrize(
    ("shape", "bit_width", "words"),
    [
        ((24,), 32, ORDINARY),
        ((4, 8), 8, AT_THE_END),
        ((2, 4, 12), 16, ORDINARY),
        ((4, 6), 64, AT_THE_END),
        ((2, 8, 3), 32, AT_THE_END),
    ],
    ids=str,
)
def test_every_part_is_what_xla_draws(
    shape: tuple[int, ...], bit_width: int, words: tuple[int, ...]
) -> None:
    key = np.array(words, np.uint32)
    places = []
    for ways in itertools.product(*([1, 2] if n % 2 == 0 else [1] for n in shape)):
        part = [n // w for n, w in zip(shape, ways, strict=True)]
        places.append(([p * (w - 1) for p, w in zip(part, ways, strict=True)], part))
    with jax.enable_x64(True):
        _, whole = lax.rng_bit_generator(key, shape, dtype=f"uint{bit_width}")
        drawn = jax.jit(
            lambda key: [philox_bits(key, shape, at, part, bit_width) for at, part in places]
        )(key)
    for got, (starts, part) in zip(drawn, places, strict=True):
        own = tuple(slice(s, s + p) for s, p in zip(starts, part, strict=True))
        assert got.dtype == whole.dtype
        np.testing.assert_array_equal(got, whole[own])


def test_positions_beyond_32_bits() -> None:
    # The last elements of an array that is far too large to be drawn: XLA is asked for the same
    # count by a key that is as many counts ahead.
    shape, part = (1 << 20, 1 << 16), (1, 8)
    starts = [shape[0] - 1, shape[1] - 8]
    count = (starts[0] * shape[1] + starts[1]) // 4
    ahead = np.array([1, 2, count & 0xFFFFFFFF, count >> 32], np.uint32)
    _, want = lax.rng_bit_generator(ahead, part, dtype="uint32")
    key = np.array([1, 2, 0, 0], np.uint32)
    np.testing.assert_array_equal(philox_bits(key, shape, starts, part, 32), want)
