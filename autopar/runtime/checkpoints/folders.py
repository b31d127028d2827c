"""The folders of checkpoints: how they are committed atomically, listed and deleted.

    step_00000012             a complete checkpoint; one rename gives it this name
    .step_00000012.tmp-ID     being written, or left by a crash
    .step_00000012.lock-ID    a file that the writing process keeps locked while it lives
    .step_00000012.old-ID     replaced, or being deleted

The lock tells a leftover from a save in progress: the kernel releases the lock of a process that
dies, on any host. On file systems without locks, leftovers are removed after a day.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import CheckpointError
from autopar.runtime.checkpoints import files
from autopar.runtime.checkpoints.format import MANIFEST

_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,})\.(tmp|lock|old)-([0-9a-f]+)")
_STALE_S = 24 * 3600.0


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def own_steps(directory: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order; empty without such a folder."""
    steps = []
    for name in _names(directory):
        match = _STEP.fullmatch(name)
        if not match or not (directory / name / MANIFEST).is_file():
            continue
        if step_folder(directory, int(match[1])).name == name:
            steps.append(int(match[1]))
    return sorted(steps)


def unfinished(directory: Path, step: int) -> bool:
    """Whether a save of this step was begun and is not finished."""
    wanted = step_folder(directory, step).name
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
    """

    path: Path
    final: Path
    _lock_path: Path
    _lock: int

    def commit(self, manifest: str) -> None:
        """Write the manifest, after all data files are synced, and give the folder its name."""
        files.write_file(self.path / MANIFEST, manifest.encode())
        files.sync_folder(self.path)
        old = self._beside("old")
        with contextlib.suppress(FileNotFoundError):
            files.rename(self.final, old)
        try:
            files.rename(self.path, self.final)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                files.rename(old, self.final)
            raise
        files.sync_folder(self.final.parent)
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


def begin(directory: Path, step: int) -> Draft:
    """A new folder to write a checkpoint into; what crashed saves left is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    final = step_folder(directory, step)
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
                return Draft(path, final, lock_path, lock)
        except BaseException:
            os.close(lock)
            files.remove(lock_path)
            raise
        os.close(lock)


def remove_leftovers(directory: Path) -> None:
    """Remove leftovers of crashed saves, but nothing of running ones. A checkpoint that was set
    aside for a replacement that was never finished gets its name back."""
    for name in _names(directory):
        match = _HIDDEN.fullmatch(name)
        if not match:
            continue
        with contextlib.suppress(OSError), _dead(directory, match[1], match[3]) as is_dead:
            if not is_dead:
                continue
            path, final = directory / name, directory / match[1]
            if match[2] == "old" and (path / MANIFEST).is_file() and not final.exists():
                files.rename(path, final)
            elif match[2] != "lock":
                files.remove(path)
    # Locks go last: without one, a folder counts as a leftover.
    for name in _names(directory):
        match = _HIDDEN.fullmatch(name)
        if match and match[2] == "lock":
            with contextlib.suppress(OSError), _dead(directory, match[1], match[3]) as is_dead:
                if is_dead:
                    files.remove(directory / name)


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


def keep_newest(directory: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` of the checkpoints up to `step`. Later ones stay."""
    before = [s for s in own_steps(directory) if s <= step]
    for old in before[:-keep]:
        path = step_folder(directory, old)
        aside = directory / f".{path.name}.old-{secrets.token_hex(6)}"
        files.rename(path, aside)  # a checkpoint is never visible in part
        files.remove(aside / MANIFEST)  # `remove_leftovers` must not restore it
        files.remove(aside)
