"""JAX equations that simpler ones can write: split, unstack, stack and tile → slices and the like.

JAX keeps `jnp.split`, `jnp.stack`, `jnp.tile` and iteration over an array as equations of their
own. XLA never sees these: they lower to slices, reshapes, broadcasts and concatenations. Written as
such from the start, they need no rules of their own for fusion, cost, sharding and micro-batches,
and a step costs the same however its user takes arrays apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import jax
from jax import Array, lax
from jax.core import ShapedArray

from autopar import _jax


def is_simple(eqn: _jax.JaxprEqn) -> bool:
    return eqn.primitive.name not in SIMPLIFIED


def simpler_jaxpr(eqn: _jax.JaxprEqn, kept: Sequence[int]) -> Any:
    """A jaxpr that computes these results of the equation by simpler ones."""
    avals = tuple(atom.aval for atom in eqn.invars)
    params = tuple(sorted(_jax.parameters(eqn).items()))
    return _written(eqn.primitive.name, avals, params, tuple(kept))


@lru_cache(maxsize=1024)
def _written(
    name: str,
    avals: tuple[ShapedArray, ...],
    params: tuple[tuple[str, Any], ...],
    kept: tuple[int, ...],
) -> Any:
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    writer = _WRITERS[name]
    return jax.make_jaxpr(lambda *arrays: writer(arrays, kept, **dict(params)))(*types)


def _split(
    arrays: Sequence[Array], kept: Sequence[int], *, axis: int, sizes: Sequence[int]
) -> list[Array]:
    ends = [int(end) for end in accumulate(sizes)]
    return [lax.slice_in_dim(arrays[0], ends[i] - int(sizes[i]), ends[i], axis=axis) for i in kept]


def _unstack(arrays: Sequence[Array], kept: Sequence[int], *, axis: int) -> list[Array]:
    return [lax.index_in_dim(arrays[0], i, axis, keepdims=False) for i in kept]


def _stack(arrays: Sequence[Array], kept: Sequence[int], *, axis: int) -> list[Array]:
    rows = [lax.expand_dims(array, (axis,)) for array in arrays]
    return [lax.concatenate(rows, axis)] if kept else []


def _tile(arrays: Sequence[Array], kept: Sequence[int], *, reps: Sequence[int]) -> list[Array]:
    (array,) = arrays
    repeated = [(int(n), size) for n, size in zip(reps, array.shape, strict=True)]
    shape = [size for pair in repeated for size in pair]
    spread = lax.broadcast_in_dim(array, shape, range(1, len(shape), 2))
    return [lax.reshape(spread, [n * size for n, size in repeated])] if kept else []


_WRITERS: dict[str, Callable[..., list[Array]]] = {
    "split": _split,
    "unstack": _unstack,
    "stack": _stack,
    "tile": _tile,
}
SIMPLIFIED = frozenset(_WRITERS)  # names of primitives
