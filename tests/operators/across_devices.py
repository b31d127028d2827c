"""Cases of shard_map and the collectives in it, and of constraints on where arrays are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.operators.cases import bound, floats, operator

A = floats(8, 16)
FAMILY = "shard_map"
ROWS = P("i")


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]), ("i",))


def mapped(function: Any, out: Any = ROWS, check: bool = True) -> Any:
    """The function on rows of its argument, one per device."""
    return lambda *args: jax.shard_map(
        function, mesh=mesh(), in_specs=P("i"), out_specs=out, check_vma=check
    )(*args)


def _inspected(a: Any) -> Any:
    jax.debug.inspect_array_sharding(a, callback=lambda sharding: None)
    return a * 2


operator("shard_map", FAMILY, mapped(lambda a: jnp.sin(a)), A)
operator("axis_index", FAMILY, mapped(lambda a: a * lax.axis_index("i")), A)
operator("psum", FAMILY, mapped(lambda a: lax.psum(a, "i"), P(), False), A)
operator("psum_invariant", FAMILY, mapped(lambda a: lax.psum(a, "i"), P()), A)
operator("pmax", FAMILY, mapped(lambda a: lax.pmax(a, "i"), P()), A, gradient=False)
operator("pmin", FAMILY, mapped(lambda a: lax.pmin(a, "i"), P()), A, gradient=False)
operator("pvary", FAMILY, mapped(lambda a: a * lax.psum(a, "i")), A)
operator(
    "ppermute",
    FAMILY,
    mapped(lambda a: lax.ppermute(a, "i", [(i, (i + 1) % 8) for i in range(8)])),
    A,
)
operator("all_gather", FAMILY, mapped(lambda a: lax.all_gather(a, "i", tiled=True)), A)
operator(
    "reduce_scatter",
    FAMILY,
    mapped(lambda a: lax.psum_scatter(a, "i", scatter_dimension=1, tiled=True)),
    A,
)
operator("all_to_all", FAMILY, mapped(lambda a: lax.all_to_all(a, "i", 1, 0, tiled=True)), A)

operator(
    "sharding_constraint",
    "placements",
    lambda a: lax.with_sharding_constraint(jnp.sin(a), NamedSharding(mesh(), P("i"))),
    A,
)
operator("device_put", "placements", lambda a: jax.device_put(jnp.sin(a)), A)

operator(
    "all_gather_invariant",
    FAMILY,
    mapped(
        lambda a: bound(
            "all_gather_invariant",
            all_gather_dimension=0,
            axis_name=("i",),
            axis_size=8,
            tiled=True,
        )(a),
        P(),
    ),
    A,
)
operator("inspect_sharding", "effects", _inspected, A)


@custom_partitioning
def doubled(a: Any) -> Any:
    return a * 2


doubled.def_partition(
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    partition=lambda mesh, args, result: (
        mesh,
        lambda a: a * 2,
        args[0].sharding,
        (args[0].sharding,),
    ),
    sharding_rule="i j -> i j",
)
operator("custom_partitioning", "partitioning", doubled, A, gradient=False)
operator(
    "layout_constraint",
    "placements",
    lambda a: with_layout_constraint(jnp.sin(a), Layout(major_to_minor=(1, 0))),
    A,
)
