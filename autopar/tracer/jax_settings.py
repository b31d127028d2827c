"""JAX's settings around a call → what its trace depends on, and contexts that autopar works in.

`jax.jit` traces again when a setting changes that traced code reads, such as the precision of
products; so does a parallelized step. It may be called inside of `jax.set_mesh`, whose mesh gives
`shard_map` and constraints without a mesh of their own theirs. Axes of that mesh are `Explicit`
unless its maker says otherwise, and then JAX refuses any array on another mesh, as the plan's are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from autopar import _jax

_READ_BY_TRACES = attrgetter(
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
_MESH_ASIDE: ContextVar[AbstractMesh | None] = ContextVar("autopar_mesh_aside", default=None)


def trace_settings() -> tuple[Any, ...]:
    """The settings that make a step another program, as hashable values."""
    return _READ_BY_TRACES(jax.config)


@contextmanager
def outside_of_mesh() -> Iterator[None]:
    """For planning, compiling and running, on meshes of the plan's own: JAX's mesh is put aside."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or _jax.is_tracing():
        yield
        return
    token = _MESH_ASIDE.set(mesh)
    try:
        with jax.set_mesh(None):
            yield
    finally:
        _MESH_ASIDE.reset(token)


@contextmanager
def within_users_mesh() -> Iterator[None]:
    """For tracing the user's function: the mesh that was put aside, its axes the partitioner's."""
    mesh = _MESH_ASIDE.get()
    if mesh is None:
        yield
        return
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    free = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)
    with jax.sharding.use_abstract_mesh(free):
        yield
