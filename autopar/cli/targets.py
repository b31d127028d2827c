"""Files that a command is asked to write: checked before it works."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import ArgumentError


def check_target(path: str | None, flag: str) -> None:
    """Raise if a file cannot be written, before minutes of planning."""
    if path is None:
        return
    folder = Path(path).parent
    if not folder.is_dir():
        raise ArgumentError(f"{flag} {path}: the folder {str(folder)!r} does not exist.")
    if Path(path).is_dir():
        raise ArgumentError(f"{flag} {path}: this is a folder; give the path of a file.")
