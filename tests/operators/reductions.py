"""Cases of sums, windows, cumulative operators, products and convolutions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.operators.cases import bound, distinct, floats, integers, operator, unit

A, D, INTS = floats(8, 16), distinct(8, 16), integers(8, 16, limit=100)

operator("reduce_sum", "reductions", lambda a: jnp.sum(a, 1), A)
operator("reduce_max", "reductions", lambda a: jnp.max(a, 1), D)
operator("reduce_min", "reductions", lambda a: jnp.min(a, 0), D)
operator("reduce_prod", "reductions", lambda a: jnp.prod(a, 1), unit(8, 16))
operator("reduce_and", "reductions", lambda a: jnp.all(a > 20, 0), INTS)
operator("reduce_or", "reductions", lambda a: jnp.any(a > 90, 0), INTS)
operator(
    "reduce_xor", "reductions", lambda a: lax.reduce(a, np.int32(0), lax.bitwise_xor, (1,)), INTS
)
operator(
    "reduce",
    "reductions",
    lambda a: lax.reduce(a, np.float32(0), lambda x, y: jnp.maximum(x, y) + 0 * x, (1,)),
    D,
)
operator("argmax", "reductions", lambda a: lax.argmax(a, 1, jnp.int32), D)
operator("argmin", "reductions", lambda a: lax.argmin(a, 0, jnp.int32), D)

operator("cumsum", "cumulative", lambda a: lax.cumsum(a, 1), A)
operator("cumprod", "cumulative", lambda a: lax.cumprod(a, 1), unit(8, 16))
operator("cummax", "cumulative", lambda a: lax.cummax(a, 0), D)
operator("cummin", "cumulative", lambda a: lax.cummin(a, 1, reverse=True), D)
operator("cumlogsumexp", "cumulative", lambda a: lax.cumlogsumexp(a, 1), A)

ONE, PAIR = (1, 2), (2, 1)
operator(
    "reduce_window_sum",
    "windows",
    lambda a: lax.reduce_window(a, 0.0, lax.add, ONE, ONE, "VALID"),
    A,
)
operator(
    "reduce_window_max",
    "windows",
    lambda a: lax.reduce_window(a, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    D,
)
operator(
    "reduce_window_min",
    "windows",
    lambda a: lax.reduce_window(a, jnp.inf, lax.min, PAIR, PAIR, "VALID"),
    D,
)
operator(
    "reduce_window",
    "windows",
    lambda a: lax.reduce_window(a, 1.0, lambda x, y: x * y + 0 * x, ONE, ONE, "VALID"),
    A,
    gradient=False,
)
operator(
    "select_and_scatter_add",
    "windows",
    lambda a: jax.grad(
        lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, ONE, ONE, "VALID") ** 2)
    )(a),
    D,
)
operator(
    "select_and_gather_add",
    "windows",
    lambda a: jax.jvp(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, ONE, ONE, "VALID"), (a,), (a * 2,)
    ),
    D,
)

operator(
    "dot_general",
    "products",
    lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,)))),
    floats(8, 4, 16),
    floats(8, 16, 8),
)
operator(
    "conv_general_dilated",
    "products",
    lambda x, k: lax.conv_general_dilated(
        x, k, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ),
    floats(8, 4, 4, 8),
    floats(3, 3, 8, 8),
    tolerance=1e-4,
)
operator(
    "ragged_dot_general",
    "products",
    lax.ragged_dot,
    floats(16, 8),
    floats(4, 8, 16),
    np.array([3, 5, 0, 8], np.int32),
)
operator("fft", "products", lambda a: jnp.fft.rfft(a), A)
operator(
    "scaled_dot",
    "products",
    lambda a, b, s, t: bound(
        "scaled_dot",
        dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        preferred_element_type=np.dtype(np.float32),
    )(a, b, s, t),
    floats(8, 4, 32),
    floats(8, 8, 32),
    unit(8, 4, 1),
    unit(8, 8, 1),
    gradient=False,
)
