"""Ragged products on shards: from the sizes of groups of all rows to those of a device's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.program import Equation
from autopar.ir.spec import Layout
from autopar.lower.unreduced import AnyMesh


def sizes_on_part(sizes: jax.Array, start: Any, num_rows: int) -> jax.Array:
    """How many of the rows from `start` on belong to each group. Groups follow one another."""
    ends = jnp.cumsum(sizes, axis=-1, dtype=sizes.dtype)

    def inside(rows: jax.Array) -> jax.Array:
        return jnp.clip(rows - start, 0, num_rows)

    return inside(ends) - inside(ends - sizes)


def operands_on_part(
    equation: Equation, operands: Sequence[Any], layout: Layout, mesh: AnyMesh
) -> list[Any]:
    """Inside of a `shard_map`: shards of a ragged product's operands, the sizes of groups those of
    the shard. `layout`: of the first operand, whose rows are in groups."""
    rows, other, sizes = operands
    (dim,) = equation.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    start: Any = 0
    for name, size, entry in zip(mesh.axis_names, mesh.axis_sizes, layout, strict=True):
        if entry == dim:
            start = start * size + jax.lax.axis_index(name)
    start = jnp.asarray(start * rows.shape[dim], sizes.dtype)
    return [rows, other, sizes_on_part(sizes, start, rows.shape[dim])]
