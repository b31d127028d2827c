"""Backends of checkpoints: this process, or the workers of a cluster, write and read leaves.

A backend is registered for the types of its arrays and of its places, where arrays are restored to.
This process handles all other leaves. A pytree may have leaves of several backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from autopar.runtime.checkpoints.format import SCALARS, Entry, Manifest
from autopar.runtime.checkpoints.objects import Location
from autopar.runtime.checkpoints.read import read_arrays, read_numpy
from autopar.runtime.checkpoints.write import own_parts, snapshot, write_parts


class Backend(Protocol):
    def save_leaves(
        self, folder: Location, leaves: Sequence[tuple[str, Any]], background: bool
    ) -> Callable[[], list[Entry]]:
        """A function that writes these leaves into the folder and returns their entries. It is
        called once, now or in the background. In the background, the leaves may be donated or
        deleted as soon as `save_leaves` has returned."""
        ...

    def restore_leaves(
        self, folder: Location, manifest: Manifest, wanted: Sequence[tuple[str, Any]]
    ) -> list[Any]:
        """The named leaves at the wanted places, whose shapes and types are those of the
        manifest."""
        ...

    def place_of(self, leaf: Any) -> Any:
        """The place to restore a leaf to: where it is now. It has `shape`, `dtype` and
        `weak_type`."""
        ...


@dataclass(frozen=True)
class HostPlace:
    """An array of numpy."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False


@dataclass(frozen=True)
class ScalarPlace:
    """A Python number; `kind` is the name of its type."""

    kind: str


Place = jax.ShapeDtypeStruct | HostPlace | ScalarPlace | Any


class LocalBackend:
    """Arrays of JAX and numpy, and Python numbers, of this process."""

    def save_leaves(
        self, folder: Location, leaves: Sequence[tuple[str, Any]], background: bool
    ) -> Callable[[], list[Entry]]:
        process = jax.process_index() if jax.distributed.is_initialized() else 0
        # Leaves that are not JAX arrays should be the same in every process; the first writes them.
        to_write = [leaf for leaf in leaves if isinstance(leaf[1], jax.Array) or process == 0]
        parts = snapshot(to_write) if background else own_parts(to_write)
        return lambda: write_parts(folder, f"process_{process:05d}", parts)

    def restore_leaves(
        self, folder: Location, manifest: Manifest, wanted: Sequence[tuple[str, Any]]
    ) -> list[Any]:
        on_devices = [pair for pair in wanted if isinstance(pair[1], jax.ShapeDtypeStruct)]
        arrays = iter(read_arrays(folder, manifest, on_devices))
        on_host = [key for key, place in wanted if not isinstance(place, jax.ShapeDtypeStruct)]
        values = iter(read_numpy(folder, manifest, on_host))
        return [
            next(arrays)
            if isinstance(place, jax.ShapeDtypeStruct)
            else as_wanted(next(values), place)
            for _, place in wanted
        ]

    def place_of(self, leaf: Any) -> Place:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if isinstance(leaf, jax.Array):
            sharding = leaf.sharding if leaf.committed else None
            is_weak = getattr(leaf, "weak_type", False)  # keys have none
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=sharding, weak_type=is_weak
            )
        if isinstance(leaf, tuple(SCALARS.values())) and not isinstance(leaf, np.generic):
            return ScalarPlace(next(k for k, of in SCALARS.items() if isinstance(leaf, of)))
        return HostPlace(tuple(leaf.shape), leaf.dtype)


def as_wanted(value: Any, place: HostPlace | ScalarPlace) -> Any:
    if isinstance(place, ScalarPlace):
        return SCALARS[place.kind](value.item() if hasattr(value, "item") else value)
    return np.asarray(value, place.dtype)


_registered: list[tuple[type, Backend]] = []
_local = LocalBackend()


def register_backend(type_: type, backend: Backend) -> None:
    """From now on, this backend writes and reads leaves and places of this type."""
    _registered[:] = [(type_, backend), *(pair for pair in _registered if pair[0] is not type_)]


def backend_of(leaf_or_place: object) -> Backend:
    backends = (backend for type_, backend in _registered if isinstance(leaf_or_place, type_))
    return next(backends, _local)


def by_backend(values: Sequence[Any]) -> list[tuple[Backend, list[int]]]:
    """Backends, each with the positions of its values."""
    groups: dict[int, tuple[Backend, list[int]]] = {}
    for i, value in enumerate(values):
        backend = backend_of(value)
        groups.setdefault(id(backend), (backend, []))[1].append(i)
    return list(groups.values())
