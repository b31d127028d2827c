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

from autopar.ir.rows import Rows, first_row, rows_shape
from autopar.runtime.checkpoints.format import SCALARS, Entry, Manifest, RowsFrom
from autopar.runtime.checkpoints.objects import Location
from autopar.runtime.checkpoints.read import read_arrays, read_numpy
from autopar.runtime.checkpoints.write import own_parts, snapshot, write_parts
from autopar.runtime.stacks import RowShardings, StackedArray


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


@dataclass(frozen=True)
class StackPlace:
    """A stack over layers in parts on meshes of this process."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: RowShardings
    weak_type: bool = False


Place = jax.ShapeDtypeStruct | HostPlace | ScalarPlace | StackPlace | Any


def place_at(shape: Sequence[int], dtype: Any, sharding: Any, weak_type: bool) -> Place:
    """The place of an array with this sharding."""
    if isinstance(sharding, RowShardings):
        return StackPlace(tuple(shape), dtype, sharding, weak_type)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=weak_type)


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


class StackBackend:
    """Stacks over layers in parts on meshes of this process."""

    def save_leaves(
        self, folder: Location, leaves: Sequence[tuple[str, Any]], background: bool
    ) -> Callable[[], list[Entry]]:
        arrays = [
            (key, RowsFrom(first_row(rows), part))
            for key, leaf in leaves
            for rows, part in zip(leaf.sharding.rows, leaf.parts, strict=True)
        ]
        parts = snapshot(arrays) if background else own_parts(arrays)
        return lambda: write_parts(folder, "stacks", parts)

    def restore_leaves(
        self, folder: Location, manifest: Manifest, wanted: Sequence[tuple[str, Any]]
    ) -> list[Any]:
        types = [
            (key, RowsFrom(first_row(rows), _rows_at(place, rows, part)))
            for key, place in wanted
            for rows, part in zip(place.sharding.rows, place.sharding.parts, strict=True)
        ]
        parts = iter(read_arrays(folder, manifest, types))
        return [
            StackedArray([next(parts) for _ in place.sharding.parts], place.sharding)
            for _, place in wanted
        ]

    def place_of(self, leaf: Any) -> StackPlace:
        if isinstance(leaf, StackPlace):
            return leaf
        return StackPlace(leaf.shape, leaf.dtype, leaf.sharding, leaf.weak_type)


def _rows_at(place: StackPlace, rows: Rows, sharding: Any) -> jax.ShapeDtypeStruct:
    shape = rows_shape(place.shape, rows)
    return jax.ShapeDtypeStruct(shape, place.dtype, sharding=sharding, weak_type=place.weak_type)


_stacks = StackBackend()
_registered: dict[type, Backend] = {StackedArray: _stacks, StackPlace: _stacks}
_local = LocalBackend()


def register_backend(type_: type, backend: Backend) -> None:
    """From now on, this backend writes and reads leaves and places of this type."""
    _registered[type_] = backend


def backend_of(leaf_or_place: object) -> Backend:
    types = (type_ for type_ in type(leaf_or_place).__mro__ if type_ in _registered)
    return _registered.get(next(types, object), _local)


def by_backend(values: Sequence[Any]) -> list[tuple[Backend, list[int]]]:
    """Backends, each with the positions of its values."""
    groups: dict[int, tuple[Backend, list[int]]] = {}
    for i, value in enumerate(values):
        backend = backend_of(value)
        groups.setdefault(id(backend), (backend, []))[1].append(i)
    return list(groups.values())
