"""Files that are written whole or not at all, and files of others that are read."""

from __future__ import annotations

import errno
import os
import stat
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


def open_to_read(path: Path) -> tuple[int, int]:
    """(descriptor, size) of a plain file; `OSError` for links, and for what a reader would wait
    for, such as a FIFO."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode):
        return descriptor, about.st_size
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a plain file", str(path))


def read_limited(path: Path, max_bytes: int) -> bytes:
    """The content of a plain file; `OSError` if it is larger."""
    descriptor, size = open_to_read(path)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(max_bytes + 1) if size <= max_bytes else b""
        if size > max_bytes or len(content) > max_bytes:
            raise OSError(errno.EFBIG, f"has {size} bytes, at most {max_bytes} are read", str(path))
    return content
