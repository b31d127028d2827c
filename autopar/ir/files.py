"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file by a rename, so that a reader, or a run after a crash, finds the old content or
    the new. Text is UTF-8. It is not synced to the disk: after a power cut a file may be empty.
    Checkpoints, which must outlive that, sync files and folders (`runtime.checkpoints.files`)."""
    path = Path(path)
    temporary = temporary_path(path)
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Where `write_whole` writes first: a hidden file in the same folder, one per process."""
    return path.with_name(f".{path.name[:100]}.{os.getpid()}.tmp")
