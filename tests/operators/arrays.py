"""Cases of operators that move elements: shapes, slices, gathers, scatters."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.operators.cases import bound, floats, integers, operator

A, B = floats(8, 16), floats(8, 16, seed=1)
CUBE = floats(8, 4, 16)
ROWS = integers(8, limit=16)

operator("broadcast_in_dim", "shapes", lambda a: lax.broadcast_in_dim(a, (4, 8, 16), (1, 2)), A)
operator("reshape", "shapes", lambda a: lax.reshape(a, (8, 64)), CUBE)
operator("transpose", "shapes", lambda a: lax.transpose(a, (2, 0, 1)), CUBE)
operator("squeeze", "shapes", lambda a: lax.squeeze(a, (1,)), floats(8, 1, 16))
operator("rev", "shapes", lambda a: lax.rev(a, (0,)), A)
operator("concatenate", "shapes", lambda a, b: lax.concatenate([a, b], 0), A, B)
operator("pad", "shapes", lambda a, b: lax.pad(a, b, ((1, 2, 1), (0, 0, 0))), A, np.float32(0.5))
operator("slice", "shapes", lambda a: lax.slice(a, (1, 2), (7, 14), (1, 3)), A)
operator("split", "shapes", lambda a: lax.split(a, (4, 8, 4), axis=1), A)
operator("stack", "shapes", lambda a, b: bound("stack", axis=1)(a, b), A, B)
operator("unstack", "shapes", lambda a: bound("unstack", axis=1)(a), CUBE)
operator("tile", "shapes", lambda a: bound("tile", reps=(2, 1))(a), A)
operator("iota", "shapes", lambda a: a + lax.broadcasted_iota(jnp.float32, (8, 16), 1), A)
operator("empty", "shapes", lambda a: a + 0 * lax.empty((8, 16), jnp.int32), A)
operator("sort", "shapes", lambda a, b: lax.sort((a, b), dimension=1, num_keys=1), A, B)
operator("top_k", "shapes", lambda a: lax.top_k(a, 3), A)
operator("approx_top_k", "shapes", lambda a: lax.approx_max_k(a, 3), A)

operator(
    "dynamic_slice", "indices", lambda a, i: lax.dynamic_slice(a, (i, 0), (4, 16)), A, np.int32(3)
)
operator(
    "dynamic_update_slice",
    "indices",
    lambda a, b, i: lax.dynamic_update_slice(a, b, (i, 4)),
    A,
    floats(4, 8),
    np.int32(9),
)
operator("gather", "indices", lambda table, i: table[i], floats(16, 8), ROWS)


def scatter(kind: str) -> Any:
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    unique = kind in ("scatter", "scatter_mul")
    return lambda table, i, u: getattr(lax, kind)(
        table, i[:, None], u, numbers, unique_indices=unique, mode="drop"
    )


TABLE, UPDATES = floats(16, 8), floats(8, 8)
EACH_ONCE = np.arange(8, dtype=np.int32) * 3 % 16
operator("scatter", "indices", scatter("scatter"), TABLE, EACH_ONCE, UPDATES)
operator("scatter-add", "indices", scatter("scatter_add"), TABLE, ROWS, UPDATES)
operator("scatter-sub", "indices", scatter("scatter_sub"), TABLE, ROWS, UPDATES)
operator("scatter-mul", "indices", scatter("scatter_mul"), TABLE, EACH_ONCE, UPDATES)
operator("scatter-min", "indices", scatter("scatter_min"), TABLE, ROWS, UPDATES)
operator("scatter-max", "indices", scatter("scatter_max"), TABLE, ROWS, UPDATES)
