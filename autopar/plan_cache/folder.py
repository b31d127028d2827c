"""The files of the plan cache: key ↔ text, in a folder that many processes share.

One file per plan, `plans/KEY.json` in the cache folder. A file appears by a rename once all of it
is on the disk, so a reader finds all of it or nothing, whoever crashes when. Reading a file sets
its time; when files together exceed the limit, those go first that were read longest ago.

Nothing here raises: a cache that cannot be used costs time, not a step. Each trouble is logged once
per process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from autopar.ir.files import read_limited
from autopar.progress import LOGGER

VARIABLE = "AUTOPAR_CACHE_DIR"
MAX_BYTES = 512 * 2**20
_STALE_S = 3600.0  # a temporary file of this age has no writer any more
_told: set[str] = set()  # troubles that were logged


@dataclass(frozen=True)
class CachedFile:
    """A file of the cache, and when it was last used, in seconds since 1970."""

    path: Path
    num_bytes: int
    used_s: float


@dataclass(frozen=True)
class PlanFolder:
    """A folder of plans, made when the first is written. `max_bytes`: of all files together."""

    path: Path
    max_bytes: int = MAX_BYTES

    def file(self, key: str) -> Path:
        return self.path / f"{key}.json"

    def read(self, key: str) -> str | None:
        """The text of a plan, which counts as used now; None if there is none."""
        path = self.file(key)
        try:
            text = read_limited(path, self.max_bytes).decode()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            self.ignore(key, error)
            return None
        with suppress(OSError):  # a folder of others: it is read, and keeps its times
            os.utime(path)
        return text

    def ignore(self, key: str, problem: object) -> None:
        """Log that a file cannot be used; the plan that is made instead replaces it."""
        text, path = str(problem), str(self.file(key))
        _tell(
            f"planned again, since a file is ignored: {text if path in text else f'{path}: {text}'}"
        )

    def write(self, key: str, text: str) -> None:
        """Keep a plan, and drop the least recently used ones if they are too many."""
        content = text.encode()
        if len(content) > self.max_bytes:
            return
        temporary = self.path / f".{key[:16]}.{os.getpid()}.{uuid4().hex[:8]}.tmp"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                with open(temporary, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self.file(key))
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            _tell(
                f"{self.path}: plans cannot be kept ({error}), so every start plans again. Set "
                f"{VARIABLE} to a folder that can be written, or to an empty text for no cache."
            )
            return
        self._trim(self.file(key))

    def files(self) -> list[CachedFile]:
        """All plans, the least recently used first."""
        return sorted(self._found(".json"), key=lambda file: (file.used_s, file.path.name))

    def clear(self) -> int:
        """Remove all plans; returns how many."""
        num_removed = 0
        for file in [*self._found(".json"), *self._found(".tmp")]:
            with suppress(OSError):
                file.path.unlink()
                num_removed += file.path.suffix == ".json"
        return num_removed

    def _trim(self, newest: Path) -> None:
        """Stay within the limit. Other processes may do the same at the same time."""
        files = self.files()
        total = sum(file.num_bytes for file in files)
        too_many = []
        for file in files:
            if total > self.max_bytes and file.path != newest:
                too_many.append(file)
                total -= file.num_bytes
        oldest_s = time.time() - _STALE_S
        too_many += [file for file in self._found(".tmp") if file.used_s < oldest_s]
        for file in too_many:
            with suppress(OSError):
                file.path.unlink()

    def _found(self, suffix: str) -> Iterator[CachedFile]:
        try:
            paths = [path for path in self.path.iterdir() if path.suffix == suffix]
        except OSError:
            return
        for path in paths:
            with suppress(OSError):  # removed meanwhile
                status = path.stat()
                yield CachedFile(path, status.st_size, status.st_mtime)


def plan_folder() -> PlanFolder | None:
    """Where plans are kept: AUTOPAR_CACHE_DIR, or `autopar` in the user's cache folder. None if the
    variable is empty, or there is no such folder."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return PlanFolder(Path(given).expanduser() / "plans") if given else None
    cache = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    except RuntimeError:
        _tell(
            f"plans cannot be kept, since this user has no home folder. Set {VARIABLE} to a folder "
            "that can be written, or to an empty text for no cache."
        )
        return None
    return PlanFolder(root / "autopar" / "plans")


def _tell(trouble: str) -> None:
    if trouble not in _told:
        _told.add(trouble)
        LOGGER.warning("plan cache: %s", trouble)
