"""What a step may contain so that the programs of its micro-batches are traced, not derived."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def zero_by_factors(rows: Any) -> Any:
    """0, by an op of each row for which `rewrite.row_ties` has no rule."""
    squares = jnp.square(jax.lax.stop_gradient(rows).astype(jnp.float32))
    matrices = 1.0 + jnp.sum(squares.reshape(len(rows), -1), 1)[:, None, None]
    return 0.0 * jnp.sum(jax.lax.linalg.cholesky(matrices))
