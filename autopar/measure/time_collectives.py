"""Collectives of compiled programs, run by themselves: from a `CollectiveOp` to seconds.

A collective is repeated in a loop inside one program, with the devices, groups and bytes of the
original; the time of one more trip is its time. Each trip reads one element of the previous result,
so XLA can neither drop nor hoist it. Several arrays of one instruction are one array here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autopar._jax import fresh_mesh
from autopar.runtime.hlo import CollectiveOp
from autopar.runtime.timing import time_calls

Key = tuple[str, int, str, tuple[tuple[int, ...], ...]]

_LEAST_S = 10e-3  # by which the longer run exceeds the shorter
_MOST_TRIPS = 2000
_FEW_TRIPS = 2
_FLOATS = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
_SIZES = {"bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}


class CollectiveTimes:
    """Seconds of collectives on some devices; each kind, size and grouping is timed once."""

    def __init__(self, devices: Sequence[Any], limit_s: float = 0.5) -> None:
        self.devices = tuple(devices)
        self.limit_s = limit_s
        self.known: dict[Key, float] = {}

    def of_program(self, ops: Iterable[CollectiveOp]) -> float:
        """The sum over all collectives of a step, with their trip counts."""
        return sum(op.trips * self.of(op) for op in ops)

    def of(self, op: CollectiveOp) -> float:
        if op.group_size <= 1 or not op.num_bytes:
            return 0.0
        key = (op.kind, op.num_bytes, op.dtype, op.groups)
        if key not in self.known:
            self.known[key] = self._timed(op)
        return self.known[key]

    def _timed(self, op: CollectiveOp) -> float:
        program, data = self.program(op)

        def seconds(trips: int, limit_s: float) -> float:
            number = jnp.int32(trips)
            return time_calls(
                lambda: program(number, data), limit_s=limit_s, min_samples=3, max_samples=15
            ).seconds

        few_s = seconds(_FEW_TRIPS, self.limit_s / 10)
        trip_s = (seconds(4 * _FEW_TRIPS, self.limit_s / 10) - few_s) / (3 * _FEW_TRIPS)
        more = int(min(_MOST_TRIPS, max(4 * _FEW_TRIPS, _LEAST_S / max(trip_s, 1e-7))))
        many_s = seconds(_FEW_TRIPS + more, self.limit_s / 2)
        return max(0.0, (many_s - few_s) / more)

    def program(self, op: CollectiveOp) -> tuple[Callable[..., jax.Array], jax.Array]:
        """(program, data); the program takes a number of trips and the data."""
        dtype = _dtype_for(op)
        is_permutation = op.kind == "collective-permute"
        groups = (tuple(range(len(self.devices))),) if is_permutation else op.groups
        grid = np.array([[self.devices[d] for d in group] for group in groups], dtype=object)
        mesh = fresh_mesh(grid, ("groups", "ranks"))
        count = max(1, op.num_bytes // dtype.itemsize)
        moved, num_local = _collective(op.kind, count, grid.shape[1], op.groups)
        every = PartitionSpec(("groups", "ranks"))

        def repeated(trips: jax.Array, part: jax.Array) -> jax.Array:
            def trip(_: jax.Array, carry: jax.Array) -> jax.Array:
                return lax.dynamic_update_slice(carry, moved(carry)[:1], (0,))

            return lax.fori_loop(0, trips, trip, part)

        on_ranks = jax.shard_map(
            repeated,
            mesh=mesh,
            in_specs=(PartitionSpec(), every),
            out_specs=every,
            check_vma=False,
        )
        place = NamedSharding(mesh, every)
        data = jax.jit(lambda: jnp.zeros(num_local * grid.size, dtype), out_shardings=place)()
        return jax.jit(on_ranks), data


def _dtype_for(op: CollectiveOp) -> np.dtype:
    """A type of the same size. Reductions need the original; for moves, integers are safe on every
    platform."""
    size = _SIZES.get(op.dtype, 1)
    if op.kind in ("all-reduce", "reduce-scatter") and op.dtype in _FLOATS:
        return np.dtype(_FLOATS[op.dtype])
    return np.dtype(f"uint{8 * size}")


def _collective(
    kind: str, count: int, ranks: int, pairs: Sequence[Sequence[int]]
) -> tuple[Callable[[jax.Array], jax.Array], int]:
    """(collective, elements per device of its input), for `count` elements per device of its
    result."""
    if kind == "all-reduce":
        return lambda x: lax.psum(x, "ranks"), count
    if kind == "all-gather":
        return lambda x: lax.all_gather(x, "ranks", tiled=True), max(1, count // ranks)
    if kind == "reduce-scatter":
        return lambda x: lax.psum_scatter(x, "ranks", tiled=True), count * ranks
    if kind == "all-to-all":
        rows = max(1, count // ranks)

        def exchange(x: jax.Array) -> jax.Array:
            return lax.all_to_all(x.reshape(ranks, rows), "ranks", 0, 0).reshape(-1)

        return exchange, ranks * rows
    return lambda x: lax.ppermute(x, "ranks", [(s, t) for s, t in pairs]), count
