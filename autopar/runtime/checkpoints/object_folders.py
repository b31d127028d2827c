"""Checkpoints in an object store: how they are committed, listed and deleted.

    run/step_00000012/manifest.json               written last: with it, the checkpoint is there
    run/step_00000012/3fa9c107be42.worker_00000.data   data; every save has names of its own

A store has no rename, but an object appears at once. So the manifest commits a checkpoint, or
replaces the one that was there, and a checkpoint that is deleted loses its manifest first. Readers
ignore what has no manifest. What crashed saves left is removed after a day, since nobody can tell
it from a save in progress.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from autopar.errors import CheckpointError
from autopar.runtime.checkpoints.format import MANIFEST, read_manifest, step_name, step_of
from autopar.runtime.checkpoints.objects import ObjectPath

_STALE = timedelta(days=1)


def own_steps(directory: ObjectPath) -> list[int]:
    """Steps of the complete checkpoints below a path, in order."""
    parts = [name.split("/") for name in directory.below()]
    steps = [step_of(p[0]) for p in parts if len(p) == 2 and p[1] == MANIFEST]
    return sorted(step for step in steps if step is not None)


def unfinished(directory: ObjectPath, step: int) -> bool:
    """Whether a save of this step was begun and is not finished."""
    folder = directory / step_name(step)
    return folder.is_dir() and not (folder / MANIFEST).is_file()


@dataclass(frozen=True)
class ObjectDraft:
    """A checkpoint that is being written; its objects are named by the save.

    path:     what to write below.
    final:    the checkpoint.
    replaces: whether it may replace another one.
    """

    path: ObjectPath
    final: ObjectPath
    replaces: bool

    def written(self, name: str) -> ObjectPath:
        """A data object by its name in the manifest."""
        return self.final / name

    def commit(self, manifest: str) -> None:
        """Write the manifest, after all data."""
        old = _data_names(self.final) if self.replaces else ()
        try:
            (self.final / MANIFEST).write(manifest.encode(), self.replaces)
        except FileExistsError:
            raise FileExistsError(
                errno.EEXIST, "another process saved this step", str(self.final)
            ) from None
        with contextlib.suppress(CheckpointError):  # the new one is safe
            _remove(self.final, old)

    def abandon(self) -> None:
        """Remove what was written. Errors are not raised: this is what is done after one."""
        with contextlib.suppress(CheckpointError):
            own = f"{self.path.save_id}."
            _remove(self.final, [n for n in self.final.below() if n.startswith(own)])


def _data_names(folder: ObjectPath) -> tuple[str, ...]:
    """Data objects of a checkpoint, if there is one that can be read."""
    if not (folder / MANIFEST).is_file():
        return ()
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return ()
    return tuple(sorted({shard.file for leaf in manifest.leaves for shard in leaf.shards}))


def _remove(folder: ObjectPath, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).remove()


def begin(directory: ObjectPath, step: int, replaces: bool = False) -> ObjectDraft:
    """A new checkpoint to write; old leftovers of crashed saves are removed."""
    remove_leftovers(directory)
    final = directory / step_name(step)
    return ObjectDraft(ObjectPath(final.protocol, final.key, secrets.token_hex(6)), final, replaces)


def remove_leftovers(directory: ObjectPath) -> None:
    """Remove objects of steps without a manifest that nobody has added to for a day."""
    by_folder: dict[str, list[str]] = {}
    for name in directory.below():
        folder, _, rest = name.partition("/")
        if step_of(folder) is not None and rest:
            by_folder.setdefault(folder, []).append(rest)
    for folder, names in by_folder.items():
        if MANIFEST in names:
            continue
        path = directory / folder
        with contextlib.suppress(FileNotFoundError):  # somebody else removes it
            newest = max((path / name).modified() for name in names)
            if datetime.now(UTC) - newest.astimezone(UTC) > _STALE:
                _remove(path, names)


def delete(directory: ObjectPath, step: int) -> None:
    """Delete a checkpoint; it is never visible in part."""
    _remove_checkpoint(directory / step_name(step))


def _remove_checkpoint(path: ObjectPath) -> None:
    (path / MANIFEST).remove()
    _remove(path, path.below())


def set_aside(directory: ObjectPath, step: int, why: str) -> ObjectPath:
    """Copy a checkpoint to another name, for people to look at, and delete it; returns its name."""
    path = directory / step_name(step)
    aside = directory / f"{why}_{path.name}_{secrets.token_hex(3)}"
    for name in path.below():
        (path / name).copy_to(aside / name)
    _remove_checkpoint(path)
    return aside
