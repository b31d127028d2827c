"""Checkpoints in orbax's format, for users who come from plain JAX or go back to it.

Writes folders of orbax's `CheckpointManager`, one per step; reads these and those of its
`StandardCheckpointer`. A step that is saved again is written beside the old one, and takes its name
when it is complete. Orbax saves the arrays of one `jax.distributed` group. Each mesh of a
cluster is a group of its own, so their arrays are saved in autopar's format only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import tree_flatten_with_path

from autopar import _jax
from autopar.errors import ArgumentError, CheckpointError
from autopar.runtime.checkpoints import files
from autopar.runtime.checkpoints.backends import (
    HostPlace,
    LocalBackend,
    ScalarPlace,
    as_wanted,
    backend_of,
)
from autopar.runtime.checkpoints.format import ARRAY, SCALARS, Leaf, Manifest
from autopar.runtime.checkpoints.leaves import is_number_type, is_saved, named_leaves, path_entry


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise CheckpointError(
            f"checkpoints of orbax need orbax, which cannot be imported ({error}). "
            "Install it: pip install 'autopar[checkpoint]'."
        ) from error
    return orbax.checkpoint


@contextlib.contextmanager
def _orbax_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{what}: orbax says: {error}") from error


def begin_orbax_save(
    directory: Path,
    state: Any,
    step: int,
    keep: int | None,
    background: bool,
    overwrite: bool,
    metadata: Mapping[str, Any] | None = None,
) -> tuple[Path, Callable[[], None]]:
    """(path of the checkpoint, function that completes it) after the arrays were copied."""
    ocp = _orbax()
    for named in named_leaves(state, "save_checkpoint"):
        if not isinstance(backend_of(named.leaf), LocalBackend):
            raise ArgumentError(
                f"save_checkpoint(format='orbax'): {named.key} is on the meshes of a cluster or "
                "in parts on several meshes, and orbax writes the arrays of a single group of "
                "processes. Use format='autopar'."
            )
    final = directory / str(step)
    if final.exists() and not overwrite:
        raise CheckpointError(f"{final}: is there already. Save with overwrite=True to replace it.")
    tree = jax.tree.map(lambda leaf: leaf if is_saved(leaf) else None, state)
    what = f"saving {final}"
    replaces = final.exists()
    root = directory / f".{step}.replacement" if replaces else directory
    options = ocp.CheckpointManagerOptions(
        max_to_keep=None if replaces else keep,
        enable_async_checkpointing=background,
        create=True,
    )
    with _orbax_errors(what):
        if replaces and jax.process_index() == 0:
            files.remove(root)  # of a save that crashed
        manager = ocp.CheckpointManager(root, options=options)
        try:
            extra = None if metadata is None else dict(metadata)
            manager.save(step, args=ocp.args.StandardSave(tree), force=True, custom_metadata=extra)
        except BaseException:
            manager.close()
            raise

    def complete() -> None:
        with _orbax_errors(what):
            try:
                manager.wait_until_finished()
            finally:
                manager.close()
            if replaces and jax.process_index() == 0:
                files.replace(root / str(step), final, root / "old")
                files.sync_folder(directory)
                files.remove(root)

    return final, complete


def orbax_metadata(folder: Path) -> dict[str, Any]:
    """The metadata that was saved with a checkpoint of `CheckpointManager`; `folder` is the one
    with its arrays, or the one around it."""
    ocp = _orbax()
    step = folder if folder.name.isdecimal() else folder.parent
    with _orbax_errors(f"reading {folder}"):
        found = ocp.CheckpointManager(step.parent).metadata(int(step.name))
    return dict(getattr(found, "custom_metadata", None) or {})


class OrbaxSource:
    """A checkpoint that orbax wrote. Leaves are named by the texts of their paths, since orbax does
    not distinguish attributes from keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ocp = _orbax()
        with _orbax_errors(f"reading {folder}"):
            metadata = self._ocp.PyTreeCheckpointer().metadata(folder)
            tree = getattr(metadata.item_metadata, "tree", None)
        if tree is None:
            raise CheckpointError(f"{folder}: is no checkpoint of a pytree that orbax can read.")
        flat, self._tree = tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
        self._types = [type_ for _, type_ in flat]
        leaves = tuple(self._leaf(path, type_) for path, type_ in flat)
        self.manifest = Manifest(0, leaves, (), "", "")

    def name(self, path: Sequence[Any]) -> str:
        return "/".join(str(path_entry(entry)[1]) for entry in path)

    def _leaf(self, path: Sequence[Any], type_: Any) -> Leaf:
        entries = tuple(map(path_entry, path))
        if self._is_number(type_):
            return Leaf(self.name(path), entries, _number_kind(type_))
        return Leaf(self.name(path), entries, ARRAY, tuple(type_.shape), np.dtype(type_.dtype).name)

    def values(self) -> list[Any]:
        return self._read([None] * len(self._types))

    def leaves(self, wanted: Sequence[tuple[str, Any]]) -> list[Any]:
        places = dict(wanted)
        values = self._read([places[leaf.key] for leaf in self.manifest.leaves])
        restored = {leaf.key: v for leaf, v in zip(self.manifest.leaves, values, strict=True)}
        return [_placed(restored[key], place) for key, place in wanted]

    def _read(self, places: Sequence[Any]) -> list[Any]:
        args = [self._restore_args(f, p) for f, p in zip(self._types, places, strict=True)]
        with _orbax_errors(f"reading {self.folder}"):
            tree = self._ocp.PyTreeCheckpointer().restore(
                self.folder, restore_args=self._tree.unflatten(args)
            )
        return self._tree.flatten_up_to(tree)

    def _restore_args(self, type_: Any, place: Any) -> Any:
        if self._is_number(type_):
            return self._ocp.RestoreArgs(restore_type=SCALARS[_number_kind(type_)])
        if getattr(place, "sharding", None) is None or _is_key(place):
            return self._ocp.RestoreArgs(restore_type=np.ndarray)
        return self._ocp.ArrayRestoreArgs(
            sharding=place.sharding, global_shape=place.shape, dtype=place.dtype
        )

    def _is_number(self, type_: Any) -> bool:
        return isinstance(type_, self._ocp.metadata.value.ScalarMetadata)


def _number_kind(type_: Any) -> str:
    return next(kind for kind in SCALARS if is_number_type(type_.dtype, kind))


def _is_key(place: Any) -> bool:
    return jax.dtypes.issubdtype(place.dtype, jax.dtypes.prng_key)


def _placed(value: Any, place: Any) -> Any:
    """A value that orbax read, at its place. A value for a cluster stays on the host: the step will
    move it."""
    if isinstance(place, (HostPlace, ScalarPlace)):
        return as_wanted(value, place)
    sharding = getattr(place, "sharding", None)
    if _is_key(place):
        impl = _jax.key_implementation(place.dtype)
        value = jax.random.wrap_key_data(jax.numpy.asarray(value), impl=impl)
        return value if sharding is None else jax.device_put(value, sharding)
    if not isinstance(value, jax.Array):
        value = jax.numpy.asarray(value, place.dtype)
        value = value if sharding is None else jax.device_put(value, sharding)
    return _jax.with_weak_type(value) if place.weak_type else value
