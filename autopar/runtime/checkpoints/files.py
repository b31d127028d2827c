"""How checkpoints change the file system; each change is durable once its function returns.

A checkpoint is a folder that gets its name by one rename when it is complete, and must survive a
power cut: files and folders are synced. Other files need neither (`ir.files.write_whole`).
"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autopar.errors import CheckpointError
from autopar.runtime.checkpoints.objects import Location, ObjectPath

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def create_file(path: Path) -> int:
    """A new file to write to."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """A single `os.write` may write less than it is given, and at most 2 GiB."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def close(descriptor: int) -> None:
    os.close(descriptor)


def close_synced(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class NewFile(Protocol):
    """A file or object that is being written; durable after `finish`."""

    def write(self, data: bytes | memoryview) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


@dataclass(frozen=True)
class LocalFile:
    """A new file of a file system."""

    descriptor: int

    def write(self, data: bytes | memoryview) -> None:
        write_all(self.descriptor, data)

    def finish(self) -> None:
        close_synced(self.descriptor)

    def abandon(self) -> None:
        """What is left is removed with its folder."""
        close(self.descriptor)


def new_file(path: Location) -> NewFile:
    return path.upload() if isinstance(path, ObjectPath) else LocalFile(create_file(path))


def write_file(path: Location, data: bytes) -> None:
    if isinstance(path, ObjectPath):
        path.write(data)
        return
    descriptor = create_file(path)
    try:
        write_all(descriptor, data)
    except BaseException:
        close(descriptor)
        raise
    close_synced(descriptor)


def make_folder(path: Path) -> None:
    os.mkdir(path)


def make_folders(path: Path) -> None:
    """A folder and those around it, as far as they are missing."""
    missing = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in reversed(missing):
        sync_folder(one.parent)


def sync_folder(path: Location) -> None:
    """Makes new and renamed entries of a folder durable; objects are so at once."""
    if isinstance(path, ObjectPath):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # not all file systems can
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def exchange(one: Path, other: Path) -> bool:
    """Give two paths each other's name at once; False if the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):  # not Linux, or an old C library
        return False
    if renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.ENOENT):
        return False
    raise OSError(code, os.strerror(code), str(one))


def replace(new: Path, old: Path, aside: Path) -> Path:
    """Give a folder the name of another one; returns the path of that one, which is `aside` on file
    systems where this takes two steps."""
    if exchange(new, old):
        return new
    rename(old, aside)
    try:
        rename(new, old)
    except OSError:
        rename(aside, old)
        raise
    return aside


def remove(path: Location) -> None:
    """Remove a file, an object, or a folder with its content; missing files are fine."""
    if isinstance(path, ObjectPath):
        path.remove()
        return
    try:
        if path.is_dir() and not path.is_symlink():
            for name in os.listdir(path):
                remove(path / name)
            os.rmdir(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        pass


def as_checkpoint_error(what: str, error: OSError) -> CheckpointError:
    """The error for the user, with advice for common errors of the file system."""
    advice = {
        errno.ENOSPC: "Free some space, or keep fewer checkpoints (keep=…).",
        errno.EDQUOT: "Free some space, or keep fewer checkpoints (keep=…).",
        errno.EACCES: "Give a folder that this process may write to.",
        errno.EPERM: "Give a folder that this process may write to.",
        errno.EROFS: "Give a folder on a file system that can be written to.",
        errno.ENOTDIR: "Give the path of a folder.",
    }.get(error.errno or 0, "")
    is_named = not error.filename or str(error.filename) in what
    place = "" if is_named else f" ({error.filename})"
    text = (
        f"{what}: {error.strerror or error}{place}. Nothing was left under the checkpoint's name."
    )
    return CheckpointError(f"{text} {advice}".strip())
