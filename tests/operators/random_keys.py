"""Cases of random numbers: keys come as words, since a case's arguments are plain arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.operators.cases import bound, floats, integers, operator, unit

WORDS = np.array([3, 7], np.uint32)
FAMILY = "random numbers"


def key(words: Any) -> Any:
    return jax.random.wrap_key_data(words)


def data(keys: Any) -> Any:
    return jax.random.key_data(keys)


operator("random_bits", FAMILY, lambda w: jax.random.bits(key(w), (8, 16)), WORDS)
operator("random_wrap", FAMILY, lambda w: jax.random.uniform(key(w), (8, 16)), WORDS)
operator("random_unwrap", FAMILY, lambda w: data(key(w)), WORDS)
operator("random_split", FAMILY, lambda w: data(jax.random.split(key(w), 8)), WORDS)
operator(
    "random_fold_in", FAMILY, lambda w, i: data(jax.random.fold_in(key(w), i)), WORDS, np.int32(5)
)
operator("random_seed", FAMILY, lambda i: data(jax.random.key(i)), np.int32(5))
operator("random_clone", FAMILY, lambda w: data(jax.random.clone(key(w))), WORDS)
operator(
    "random_gamma",
    FAMILY,
    lambda w, a: jax.random.gamma(key(w), a),
    WORDS,
    unit(8, 16) * 3,
    tolerance=1e-4,
)
COUNTS = integers(8, 16, limit=1000).astype(np.uint32)
operator(
    "threefry2x32",
    FAMILY,
    lambda w, c: bound("threefry2x32")(
        jnp.broadcast_to(w[0], c.shape), jnp.broadcast_to(w[1], c.shape), c, c + 1
    ),
    WORDS,
    COUNTS,
)
operator(
    "rng_bit_generator",
    FAMILY,
    lambda w: lax.rng_bit_generator(w, (8, 16))[1],
    np.arange(4, dtype=np.uint32),
)
operator(
    "rng_uniform",
    FAMILY,
    lambda a: a + 0 * lax.rng_uniform(np.float32(0), np.float32(1), (8, 16)),
    floats(8, 16),
    gradient=True,
)

# Keys of other kinds: their generators work on counters, like threefry.
operator(
    "threefry4x32", FAMILY, lambda c: bound("threefry4x32")(*(c + i for i in range(8))), COUNTS
)
