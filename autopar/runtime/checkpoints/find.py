"""The checkpoints in a folder, autopar's and orbax's: folder, step → where one is, and whose."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError, CheckpointError
from autopar.runtime.checkpoints import folders
from autopar.runtime.checkpoints.format import MANIFEST, read_manifest
from autopar.runtime.checkpoints.objects import Location, ObjectPath
from autopar.runtime.checkpoints.orbax import orbax_metadata
from autopar.runtime.checkpoints.save import checked_directory

_ORBAX_MARKS = ("_METADATA", "_CHECKPOINT_METADATA")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint in autopar's format."""

    path: Location


@dataclass(frozen=True)
class FoundOrbax:
    """Orbax's folder with the arrays' metadata."""

    path: Path


def checkpoint_steps(directory: str | Location) -> list[int]:
    """The steps of the checkpoints in the folder `directory`, in order; empty if there is no such
    folder. Unfinished checkpoints do not count. `ArgumentError` if it is not a path."""
    path = checked_directory("checkpoint_steps", directory)
    return sorted({*folders.own_steps(path), *_orbax_steps(path)})


def latest_step(directory: str | Location) -> int | None:
    """The step of the newest checkpoint in the folder `directory`; None if there is none.
    `ArgumentError` if it is not a path."""
    return max(checkpoint_steps(directory), default=None)


def checkpoint_metadata(directory: str | Location, step: int | None = None) -> dict[str, Any]:
    """What `save_checkpoint(metadata=…)` saved with the checkpoint of `step`, or the newest, in the
    folder `directory`; empty if nothing. `CheckpointError` if there is no such checkpoint, or if it
    cannot be read."""
    found = find_checkpoint(directory, step)
    if isinstance(found, FoundOrbax):
        return orbax_metadata(found.path)
    text = read_manifest(found.path).metadata
    if text is None:
        return {}
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{found.path}: its metadata is no JSON: {error}") from error
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{found.path}: its metadata is {type(metadata).__name__}, no dict.")
    return metadata


def find_checkpoint(directory: Any, step: Any) -> FoundCheckpoint | FoundOrbax:
    """The checkpoint of a step, or the newest; `directory` may also be a single checkpoint."""
    path = checked_directory("restore_checkpoint", directory)
    if step is None:
        if (path / MANIFEST).is_file():
            return FoundCheckpoint(path)
        if isinstance(path, Path) and (path / "_METADATA").is_file():
            return FoundOrbax(path)
        step = latest_step(path)
        if step is None:
            what = "has no checkpoint" if path.is_dir() else "there is no such folder"
            raise CheckpointError(
                f"restore_checkpoint({str(directory)!r}): {what}. Give the folder that "
                "save_checkpoint was given."
            )
    if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
        raise ArgumentError(f"restore_checkpoint(step={step!r}): needs a whole number, or None.")
    folder = folders.step_folder(path, step)
    if (folder / MANIFEST).is_file():
        return FoundCheckpoint(folder)
    if isinstance(path, Path) and step in _orbax_steps(path):
        return FoundOrbax(_orbax_item(path / str(step)))
    there = checkpoint_steps(path)
    begun = folders.unfinished(path, step)
    why = "its save was begun and not finished" if begun else "there is none of this step"
    raise CheckpointError(
        f"restore_checkpoint({str(directory)!r}, step={step}): {why}. "
        + (f"There are those of the steps {_some(there)}." if there else "There is no other.")
    )


def _some(steps: list[int]) -> str:
    shown = ", ".join(str(step) for step in steps[-8:])
    return shown if len(steps) <= 8 else f"…, {shown}"


def _orbax_steps(directory: Location) -> list[int]:
    """Orbax's checkpoints are read from file systems only."""
    if isinstance(directory, ObjectPath) or not directory.is_dir():
        return []
    names = [entry.name for entry in directory.iterdir() if entry.name.isdecimal()]
    return [int(n) for n in names if str(int(n)) == n and _is_orbax(directory / n)]


def _is_orbax(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in _ORBAX_MARKS)


def _orbax_item(folder: Path) -> Path:
    return folder if (folder / "_METADATA").is_file() else folder / "default"
