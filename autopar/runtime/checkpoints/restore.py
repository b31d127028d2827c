"""From a checkpoint to leaves at their places, after comparing the checkpoint with the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from autopar import _jax
from autopar.errors import CheckpointError
from autopar.ir.objects.nnx import merge_objects, split_objects
from autopar.runtime.checkpoints.backends import HostPlace, ScalarPlace, backend_of, by_backend
from autopar.runtime.checkpoints.format import (
    ARRAY,
    KEY,
    SCALARS,
    Leaf,
    Manifest,
    dtype_named,
    read_manifest,
)
from autopar.runtime.checkpoints.leaves import (
    canonical,
    is_number_type,
    is_saved,
    key_data_type,
    nested,
)
from autopar.runtime.checkpoints.objects import Location
from autopar.runtime.checkpoints.read import read_numpy

_MOST_SHOWN = 10


class OtherModelError(CheckpointError):
    """A checkpoint whose leaves are not those of the target; it may be in order."""


class CheckpointSource(Protocol):
    """A checkpoint to read from. `manifest` has its leaves, named as `name` names paths in
    pytrees."""

    @property
    def folder(self) -> Location: ...

    manifest: Manifest

    def name(self, path: Sequence[Any]) -> str: ...

    def values(self) -> list[Any]:
        """All leaves, as numpy arrays, Python numbers and keys."""
        ...

    def leaves(self, wanted: Sequence[tuple[str, Any]]) -> list[Any]:
        """The named leaves at their places, which agree with the manifest."""
        ...


class OwnSource:
    """A checkpoint in autopar's own format."""

    def __init__(self, folder: Location) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)

    def name(self, path: Sequence[Any]) -> str:
        return keystr(tuple(path))

    def values(self) -> list[Any]:
        keys = [leaf.key for leaf in self.manifest.leaves]
        return read_numpy(self.folder, self.manifest, keys)

    def leaves(self, wanted: Sequence[tuple[str, Any]]) -> list[Any]:
        restored: list[Any] = [None] * len(wanted)
        for backend, positions in by_backend([place for _, place in wanted]):
            pairs = [wanted[i] for i in positions]
            leaves = backend.restore_leaves(self.folder, self.manifest, pairs)
            for i, leaf in zip(positions, leaves, strict=True):
                restored[i] = leaf
        return restored


def restore_nested(source: CheckpointSource) -> Any:
    """The saved pytree as dicts and lists of numpy arrays."""
    leaves = zip(source.manifest.leaves, source.values(), strict=True)
    return nested([(leaf.path, value) for leaf, value in leaves])


def restore_tree(source: CheckpointSource, target: Any) -> Any:
    """The saved pytree in the structure of the target, each leaf placed like the target's."""
    apart = split_objects((target,), {})
    flat, tree = tree_flatten_with_path(apart.args[0])
    saved = [i for i, (_, leaf) in enumerate(flat) if is_saved(leaf)]
    wanted = [(source.name(flat[i][0]), backend_of(flat[i][1]).place_of(flat[i][1])) for i in saved]
    restored = restore_leaves(source, wanted)
    leaves = [leaf for _, leaf in flat]
    for i, leaf in zip(saved, restored, strict=True):
        leaves[i] = leaf
    return merge_objects(tree_unflatten(tree, leaves))


def restore_leaves(source: CheckpointSource, wanted: Sequence[tuple[str, Any]]) -> list[Any]:
    """The named leaves, each at its place; these must be all that the checkpoint has."""
    differences = differing(source.manifest, wanted)
    if differences:
        raise OtherModelError(difference_text(source.folder, differences))
    return source.leaves(wanted)


def differing(manifest: Manifest, wanted: Sequence[tuple[str, Any]]) -> list[str]:
    """The differences between a checkpoint and the wanted leaves, a line for each leaf."""
    saved = {leaf.key: leaf for leaf in manifest.leaves}
    missing, other = [], []
    for key, place in wanted:
        leaf = saved.pop(key, None)
        if leaf is None:
            missing.append(f"{_name(key)}: wanted {_place_text(place)}, not in the checkpoint")
        elif not _agrees(leaf, place):
            other.append(
                f"{_name(key)}: wanted {_place_text(place)}, the checkpoint has {_leaf_text(leaf)}"
            )
    extra = [f"{_name(key)}: only in the checkpoint, {_leaf_text(s)}" for key, s in saved.items()]
    return [*other, *missing, *extra]


def difference_text(folder: Location, differences: Sequence[str]) -> str:
    shown = "".join(f"\n  {line}" for line in differences[:_MOST_SHOWN])
    more = len(differences) - _MOST_SHOWN
    rest = f"\n  and {more} more" if more > 0 else ""
    return (
        f"{folder}: is of another model; {len(differences)} leaves differ:{shown}{rest}"
        "\nGive a target with the structure that was saved, or None for dicts of numpy arrays."
    )


def _name(key: str) -> str:
    return key or "(the state itself)"


def _agrees(leaf: Leaf, place: Any) -> bool:
    if isinstance(place, ScalarPlace):
        if leaf.kind in SCALARS:
            return leaf.kind == place.kind
        is_scalar = leaf.kind != KEY and leaf.shape == ()
        return is_scalar and is_number_type(dtype_named(leaf.dtype), place.kind)
    if jax.dtypes.issubdtype(place.dtype, jax.dtypes.prng_key):
        data = key_data_type(place)
        is_data = leaf.kind == ARRAY and leaf.dtype == data.dtype.name  # keys in the old style
        is_same = leaf.kind == KEY and leaf.impl == _jax.key_implementation(place.dtype)
        return (is_same or is_data) and leaf.shape == data.shape
    if leaf.kind in SCALARS:
        return tuple(place.shape) == () and is_number_type(place.dtype, leaf.kind)
    same_type = leaf.dtype == np.dtype(place.dtype).name
    if not isinstance(place, HostPlace):  # what JAX makes of the type of a numpy array
        same_type = same_type or canonical(dtype_named(leaf.dtype)) == canonical(place.dtype)
    return leaf.kind != KEY and same_type and leaf.shape == tuple(place.shape)


def _place_text(place: Any) -> str:
    if isinstance(place, ScalarPlace):
        return f"a Python {place.kind}"
    return f"{place.dtype}{list(place.shape)}"


def _leaf_text(leaf: Leaf) -> str:
    if leaf.kind in SCALARS:
        return f"a Python {leaf.kind}"
    if leaf.kind == KEY:
        return f"keys ({leaf.impl}){list(leaf.shape[:-1])}"
    return f"{leaf.dtype}{list(leaf.shape)}"
