"""The folders of checkpoints: how they are committed atomically, listed and deleted.

    step_00000012             a complete checkpoint; one rename gives it this name
    .step_00000012.tmp-ID     being written or deleted, or left by a crash
    .step_00000012.lock-ID    a file that the writing process keeps locked while it lives
    .step_00000012.old-ID     set aside for its replacement

A checkpoint that replaces another one exchanges its name with it, in one operation of the file
system. Where there is none, the old one is set aside for a moment; after a crash in that moment,
whoever looks for checkpoints next gives it its name back.

Object stores have neither renames nor locks: `object_folders` does this there.

The lock tells a leftover from a save in progress: the kernel releases the lock of a process that
dies, on any host. On file systems without locks, leftovers are removed after a day.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autopar.errors import CheckpointError
from autopar.runtime.checkpoints import files, object_folders
from autopar.runtime.checkpoints.format import MANIFEST, step_name, step_of
from autopar.runtime.checkpoints.objects import Location, ObjectPath

_HIDDEN = re.compile(r"\.(step_\d{8,})\.(tmp|lock|old)-([0-9a-f]+)")
_STALE_S = 24 * 3600.0


class AnyDraft(Protocol):
    """A checkpoint that is being written, in a file system or an object store."""

    @property
    def path(self) -> Location: ...

    def written(self, name: str) -> Location: ...

    def commit(self, manifest: str) -> None: ...

    def abandon(self) -> None: ...


def step_folder(directory: Location, step: int) -> Location:
    return directory / step_name(step)


def is_taken(final: Location) -> bool:
    """Whether there is something that a new checkpoint of this name would replace."""
    return (final / MANIFEST).is_file() if isinstance(final, ObjectPath) else final.exists()


def own_steps(directory: Location) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order; empty without such a folder."""
    if isinstance(directory, ObjectPath):
        return object_folders.own_steps(directory)
    steps = []
    names = _names(directory)
    if any((match := _HIDDEN.fullmatch(name)) and match[2] == "old" for name in names):
        _restore_set_aside(directory)
        names = _names(directory)
    for name in names:
        step = step_of(name)
        if step is not None and (directory / name / MANIFEST).is_file():
            steps.append(step)
    return sorted(steps)


def unfinished(directory: Location, step: int) -> bool:
    """Whether a save of this step was begun and is not finished."""
    if isinstance(directory, ObjectPath):
        return object_folders.unfinished(directory, step)
    wanted = step_name(step)
    hidden = (_HIDDEN.fullmatch(name) for name in _names(directory))
    return (directory / wanted).is_dir() or any(m and m[1] == wanted for m in hidden)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error.strerror}.") from error


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written.

    path:  the folder to write into.
    final: its later name.
    replaces: whether it may replace another checkpoint of that name.
    """

    path: Path
    final: Path
    replaces: bool
    _lock_path: Path
    _lock: int

    def written(self, name: str) -> Path:
        """A data file by its name in the manifest."""
        return self.path / name

    def commit(self, manifest: str) -> None:
        """Write the manifest, after all data files are synced, and give the folder its name."""
        files.write_file(self.path / MANIFEST, manifest.encode())
        files.sync_folder(self.path)
        old = None
        if not self.final.exists():
            files.rename(self.path, self.final)  # fails if another one is there by now
        elif not self.replaces:
            raise FileExistsError(errno.EEXIST, "another process saved this step", str(self.final))
        else:
            old = files.replace(self.path, self.final, self._beside("old"))
        files.sync_folder(self.final.parent)
        if old is not None:
            files.remove(old)
        self._unlock()

    def abandon(self) -> None:
        """Remove what was written. Errors of the file system are not raised: this is what is done
        after one."""
        with contextlib.suppress(OSError):
            files.remove(self.path)
        self._unlock()

    def _beside(self, kind: str) -> Path:
        return self.path.with_name(self.path.name.replace(".tmp-", f".{kind}-"))

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):
            files.remove(self._lock_path)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def begin(directory: Location, step: int, replaces: bool = False) -> AnyDraft:
    """A new folder to write a checkpoint into; what crashed saves left is removed."""
    if isinstance(directory, ObjectPath):
        return object_folders.begin(directory, step, replaces)
    files.make_folders(directory)
    remove_leftovers(directory)
    final = directory / step_name(step)
    while True:
        identity = secrets.token_hex(6)
        lock_path = directory / f".{final.name}.lock-{identity}"
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Whoever cleans up may have taken the file for a leftover before it was locked.
            if lock_path.exists():
                path = directory / f".{final.name}.tmp-{identity}"
                files.make_folder(path)
                return Draft(path, final, replaces, lock_path, lock)
        except BaseException:
            os.close(lock)
            files.remove(lock_path)
            raise
        os.close(lock)


def remove_leftovers(directory: Path) -> None:
    """Remove leftovers of crashed saves, but nothing of running ones."""
    _restore_set_aside(directory)
    for name in _names(directory):
        match = _HIDDEN.fullmatch(name)
        if not match:
            continue
        with contextlib.suppress(OSError), _dead(directory, match[1], match[3]) as is_dead:
            if not is_dead:
                continue
            if match[2] != "lock":
                files.remove(directory / name)
    # Locks go last: without one, a folder counts as a leftover.
    for name in _names(directory):
        match = _HIDDEN.fullmatch(name)
        if match and match[2] == "lock":
            with contextlib.suppress(OSError), _dead(directory, match[1], match[3]) as is_dead:
                if is_dead:
                    files.remove(directory / name)


def _restore_set_aside(directory: Path) -> None:
    """Checkpoints that were set aside for a replacement that was never finished get their names
    back, if this process may write here."""
    for name in _names(directory):
        match = _HIDDEN.fullmatch(name)
        if match is None or match[2] != "old":
            continue
        path, final = directory / name, directory / match[1]
        with contextlib.suppress(OSError), _dead(directory, match[1], match[3]) as is_dead:
            if is_dead and (path / MANIFEST).is_file() and not final.exists():
                files.rename(path, final)


@contextlib.contextmanager
def _dead(directory: Path, final: str, identity: str) -> Iterator[bool]:
    """Whether no living process holds the lock of a save. Nobody can take it inside the block."""
    lock_path = directory / f".{final}.lock-{identity}"
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_dead = True
        except BlockingIOError:
            is_dead = False
        except OSError:
            is_dead = time.time() - os.fstat(lock).st_mtime > _STALE_S
        yield is_dead
    finally:
        os.close(lock)


def all_but_newest(steps: list[int], keep: int) -> list[int]:
    return steps[:-keep]


def delete(directory: Location, step: int) -> None:
    """Delete a checkpoint; it is never visible in part."""
    if isinstance(directory, ObjectPath):
        object_folders.delete(directory, step)
        return
    path = directory / step_name(step)
    aside = directory / f".{path.name}.tmp-{secrets.token_hex(6)}"
    files.rename(path, aside)
    files.remove(aside)


def set_aside(directory: Location, step: int, why: str) -> Location:
    """Give a checkpoint that nobody should use another name, for people to look at; returns it."""
    if isinstance(directory, ObjectPath):
        return object_folders.set_aside(directory, step, why)
    path = directory / step_name(step)
    aside = directory / f"{why}_{path.name}_{secrets.token_hex(3)}"
    files.rename(path, aside)
    return aside
