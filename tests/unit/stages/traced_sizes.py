"""What a step may contain so that the programs of its micro-batches are traced, not derived."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import autopar

autopar.register_rule("sums_of_rows", "r c -> r")


def zero_by_factors(rows: Any) -> Any:
    """0, by a kernel of each row for which `rewrite.row_ties` has no rule: it is never run."""
    rows = jax.lax.stop_gradient(rows).astype(jnp.float32).reshape(len(rows), -1)
    shape = jax.ShapeDtypeStruct((len(rows),), jnp.float32)
    return 0.0 * jnp.sum(jax.ffi.ffi_call("sums_of_rows", shape)(rows))
