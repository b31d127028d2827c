"""Objects in a store (S3, Google Cloud Storage) as files of checkpoints, through fsspec.

    "s3://bucket/run" → ObjectPath: list, read ranges, write whole or as an upload in parts, remove

An object appears whole, when its upload ends, or not at all; there is no rename. Requests have the
limits of fsspec's driver, and each call here has `LIMIT_S` for all of its requests and repetitions.
Credentials and endpoints are those of the driver: its environment variables and files.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from autopar.errors import ArgumentError, CheckpointError, DependencyError
from autopar.ir import files as local_files

LIMIT_S = 600.0  # a call moves 64 MiB at most, or copies an object within the store
PART_BYTES = 64 * 2**20  # of an upload; S3 allows 10,000 parts

_EXTRAS = {"s3": "s3", "gs": "gcs", "memory": "s3"}
_URL = re.compile(r"([a-z0-9]+)://([^?#]+)(?:#([0-9a-f]{12}))?")

Result = TypeVar("Result")


class UnreachableStoreError(CheckpointError):
    """An object store that did not do what it was asked. Its checkpoints may be in order."""


@dataclass(frozen=True)
class ObjectPath:
    """An object, or the objects below a path.

    save_id: of the save whose objects `/` names; they differ from those of other saves.
    """

    protocol: str
    key: str
    save_id: str = ""

    def __str__(self) -> str:
        return f"{self.protocol}://{self.key}" + (f"#{self.save_id}" if self.save_id else "")

    def __truediv__(self, name: str) -> ObjectPath:
        prefix = f"{self.save_id}." if self.save_id else ""
        return ObjectPath(self.protocol, f"{self.key}/{prefix}{name}")

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        return ObjectPath(self.protocol, self.key.rpartition("/")[0])

    def is_file(self) -> bool:
        return self._size() is not None

    def is_dir(self) -> bool:
        return bool(self.below())

    def size(self) -> int:
        """In bytes; `FileNotFoundError` if there is no such object."""
        size = self._size()
        if size is None:
            raise FileNotFoundError(2, "there is no such object", str(self))
        return size

    def _size(self) -> int | None:
        try:
            about = self._asked(lambda: self._store.info(self.key))
        except FileNotFoundError:
            return None
        return int(about["size"]) if about.get("type") == "file" else None

    def below(self) -> list[str]:
        """The names of the objects below this path, with their slashes."""
        try:
            found = self._asked(lambda: self._store.find(self.key))
        except FileNotFoundError:
            return []
        start = f"{self.key}/"
        names = (name.lstrip("/") for name in found)
        return sorted(name.removeprefix(start) for name in names if name.startswith(start))

    def modified(self) -> datetime:
        """When the object was written."""
        return self._asked(lambda: self._store.modified(self.key))

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A range of the object, shorter where the object ends."""
        return self._asked(
            lambda: self._store.cat_file(self.key, start=offset, end=offset + num_bytes)
        )

    def read_limited(self, max_bytes: int) -> bytes:
        """The content; `OSError` if it is longer."""
        size = self.size()
        if size > max_bytes:
            raise OSError(27, f"has {size} bytes, at most {max_bytes} are read", str(self))
        return self.read(0, size) if size else b""

    def write(self, content: bytes, replaces: bool = True) -> None:
        """Make the object; `FileExistsError` if it is there and must not be replaced."""
        mode = "overwrite" if replaces else "create"
        try:
            self._written(lambda: self._store.pipe_file(self.key, content, mode=mode))
        except FileExistsError:
            # A driver that repeats a request whose answer was lost finds its own object.
            if self.read_limited(len(content)) != content:
                raise

    def upload(self) -> Upload:
        """A new object, written block by block."""
        return Upload(
            self, self._written(lambda: self._store.open(self.key, "wb", block_size=PART_BYTES))
        )

    def copy_to(self, other: ObjectPath) -> None:
        """Within the store."""
        self._written(lambda: self._store.cp_file(self.key, other.key))

    def remove(self) -> None:
        """A missing object is fine."""
        with contextlib.suppress(FileNotFoundError):
            self._asked(lambda: self._store.rm_file(self.key))

    @property
    def _store(self) -> Any:
        """fsspec's file system, which fsspec keeps; nothing is remembered of what it listed."""
        try:
            import fsspec

            return fsspec.filesystem(self.protocol, use_listings_cache=False)
        except ImportError as error:
            raise DependencyError(
                f"{self}: checkpoints in this store need a package that cannot be imported "
                f"({error}). Install it: pip install 'autopar[{_EXTRAS[self.protocol]}]'."
            ) from error

    def _written(self, work: Callable[[], Result]) -> Result:
        try:
            return self._asked(work)
        except FileNotFoundError as error:
            raise UnreachableStoreError(
                f"{self}: cannot be written: {error}. Create the bucket, or give another one."
            ) from error

    def _asked(self, work: Callable[[], Result]) -> Result:
        """What the store answers. `FileNotFoundError` and `FileExistsError` are answers."""
        try:
            return _within_limit(work)
        except (FileNotFoundError, FileExistsError, DependencyError):
            raise
        except Exception as error:  # every driver has its own classes
            raise UnreachableStoreError(
                f"{self}: the store says {type(error).__name__}: {error or 'nothing'}. "
                f"{_advice(error)}"
            ) from error


def _advice(error: Exception) -> str:
    name = type(error).__name__
    if isinstance(error, PermissionError) or "Credential" in name or "Auth" in name:
        return (
            "Give this process, and every worker, credentials that may list, read, write and "
            "delete there, as the store's own tools take them (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE; GOOGLE_APPLICATION_CREDENTIALS)."
        )
    return "Check the network, the bucket and the endpoint (AWS_ENDPOINT_URL), and try again."


def _within_limit(work: Callable[[], Result]) -> Result:
    """The result of `work`, or what it raises; `TimeoutError` if it takes too long. It is then left
    to itself."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="object store", daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"it did not answer within {LIMIT_S:g} s")
    return results[0]


class Upload:
    """An object that is being written. It is there after `finish`; `abandon` drops it."""

    def __init__(self, path: ObjectPath, file: Any) -> None:
        self._path, self._file = path, file

    def write(self, data: bytes | memoryview) -> None:
        self._path._written(lambda: self._file.write(data))

    def finish(self) -> None:
        self._path._written(self._file.close)

    def abandon(self) -> None:
        """Errors of the store are not raised: this is what is done after one."""
        with contextlib.suppress(UnreachableStoreError, FileNotFoundError):
            self._path._asked(self._file.discard)
        with contextlib.suppress(AttributeError):  # one in memory
            self._file.closed = True  # else its destructor would finish it
        with contextlib.suppress(UnreachableStoreError):
            self._path.remove()


Location = Path | ObjectPath


def location(text: str | Location) -> Location:
    """The path that `str` made a text of."""
    if not isinstance(text, str):
        return text
    found = _URL.fullmatch(text)
    return ObjectPath(found[1], found[2], found[3] or "") if found else Path(text)


def object_path(function: str, url: str) -> ObjectPath:
    """The path of a URL that a user gave."""
    found = _URL.fullmatch(url)
    key = found[2].strip("/") if found else ""
    if not found or found[1] not in _EXTRAS or found[3] or not key:
        known = ", ".join(f"{protocol}://" for protocol in _EXTRAS)
        raise ArgumentError(
            f"{function}({url!r}): needs the path of a folder in a mounted file system, or a URL "
            f"as in 's3://bucket/run'; of object stores, {known} are known."
        )
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise ArgumentError(f"{function}({url!r}): needs a URL without empty parts, '.' and '..'.")
    return ObjectPath(found[1], key)


def write_whole(path: Location, content: str) -> None:
    """A small file or object that readers find as it was, or with this content."""
    if isinstance(path, ObjectPath):
        path.write(content.encode())
    else:
        local_files.write_whole(path, content)


def read_limited(path: Location, max_bytes: int) -> bytes:
    """The content of a plain file, or of an object; `OSError` if it is larger."""
    if isinstance(path, ObjectPath):
        return path.read_limited(max_bytes)
    return local_files.read_limited(path, max_bytes)
