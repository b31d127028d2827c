"""From a pytree to a checkpoint: `save_checkpoint`.

    leaves ──backends──▶ data files, entries ──▶ manifest ──rename──▶ step_00000012

A save writes to a hidden folder, which gets its name when it is complete. A save in the background
copies the leaves to the host first; a thread does the rest. Where several processes run the same
program, each writes its own shards, and the first writes the manifest.
"""

from __future__ import annotations

import atexit
import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autopar.errors import ArgumentError, CheckpointError
from autopar.ir.codec import decode, encode
from autopar.ir.objects.nnx import split_objects
from autopar.runtime.checkpoints import files, folders
from autopar.runtime.checkpoints.backends import by_backend
from autopar.runtime.checkpoints.controllers import Controllers
from autopar.runtime.checkpoints.format import (
    MANIFEST_LIMIT_BYTES,
    SCALARS,
    Entry,
    Leaf,
    Manifest,
    Shard,
    check_manifest,
    manifest_text,
    with_shards,
)
from autopar.runtime.checkpoints.leaves import described, named_leaves
from autopar.runtime.checkpoints.objects import (
    Location,
    ObjectPath,
    UnreachableStoreError,
    location,
    object_path,
    read_limited,
)

FORMATS = ("autopar", "orbax")
METADATA_LIMIT_BYTES = 2**20
SETTLE_LIMIT_S = 3600.0  # for a save before the next one, or before the process ends


class UnfinishedSaveError(CheckpointError, TimeoutError):
    """`CheckpointSave.wait` timed out; the save goes on."""


class CheckpointSave:
    """A checkpoint that is being written in the background.

    path: its later folder; in an object store, its URL.
    """

    def __init__(self, path: Path | str, complete: Callable[[], None]) -> None:
        self.path = path
        self._complete = complete
        self._error: BaseException | None = None
        self._was_raised = False
        # A daemon: the end of the process waits for it, but not for ever (`finish_saves`).
        self._thread = threading.Thread(target=self._run, name=f"save {path}", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<saving {self.path}: {'done' if self.done else 'in progress'}>"

    def _run(self) -> None:
        try:
            self._complete()
        except BaseException as error:
            self._error = error
        finally:
            del self._complete

    @property
    def done(self) -> bool:
        """Whether it is written, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path | str:
        """The path of the checkpoint, once it is there; raises what went wrong, and
        `CheckpointError`, which is also a `TimeoutError`, if it is not there in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise UnfinishedSaveError(
                f"{self.path}: is still being written after wait(timeout_s={timeout_s:g}). Wait "
                "again, for longer: the save goes on."
            )
        if self._error is not None:
            self._was_raised = True
            raise self._error
        return self.path

    def settle(self) -> None:
        """Wait, within a limit; an error that was not raised becomes a warning."""
        self._thread.join(SETTLE_LIMIT_S)
        if self._thread.is_alive():
            text = f"{self.path}: is still being written after {SETTLE_LIMIT_S:.0f} s; gave it up."
            warnings.warn(text, stacklevel=3)
        elif self._error is not None and not self._was_raised:
            self._was_raised = True
            warnings.warn(f"A checkpoint was not saved: {self._error}", stacklevel=3)


_latest: CheckpointSave | None = None


@atexit.register
def finish_saves() -> None:
    """Wait for the save in the background, if there is one."""
    global _latest
    save, _latest = _latest, None
    if save is not None:
        save.settle()


def forget_saves() -> None:
    """Do not wait for the save in the background when the process ends."""
    global _latest
    _latest = None


def save_checkpoint(
    directory: str | Location,
    state: Any,
    step: int,
    *,
    keep: int | None = None,
    asynchronous: bool = False,
    overwrite: bool = False,
    format: str = "autopar",
    metadata: Mapping[str, Any] | None = None,
) -> Path | str | CheckpointSave:
    """Save a pytree as the checkpoint of `step` in a folder of checkpoints, and return its path.

    directory:    the folder of checkpoints, created if it does not exist; or a URL in an object
                  store (docs/checkpoints.md), and the URL of the checkpoint is returned.
    state:        a pytree of arrays, of this process or of a cluster, PRNG keys and numbers. It may
                  contain nnx objects, such as `(model, optimizer)`.
    keep:         delete older checkpoints, so that this many are left; None deletes none.
    asynchronous: return as soon as the arrays are copied to host memory (the state may then be
                  donated or changed) and write in the background. The returned object's `wait()`
                  returns the path or raises the error. The next save, and the end of the process,
                  wait for it.
    overwrite:    replace the checkpoint of this step, if there is one.
    format:       "autopar", or "orbax" for a checkpoint that orbax can read.
    metadata:     what else to save: a dict of texts, numbers, lists and dicts, as JSON has them, of
                  1 MiB at most. `checkpoint_metadata` reads it.

    Every process of a cluster writes its own shards, so all must see the folder. A crash leaves the
    earlier checkpoints, and no partial one.

    Raises `CheckpointError` if the folder cannot be written, or has a checkpoint of this step and
    `overwrite` is not set.
    """
    path = _checked(directory, step, keep, format)
    text = metadata_text(metadata)
    if format != "orbax":
        superfluous = None if keep is None else partial(folders.all_but_newest, keep=keep)
        return start_save(path, state, step, superfluous, asynchronous, overwrite, text)
    from autopar.runtime.checkpoints.orbax import begin_orbax_save

    (state,) = split_objects((state,), {}).args
    if isinstance(path, ObjectPath):
        raise ArgumentError(
            f"save_checkpoint({str(path)!r}, format='orbax'): orbax's format is written to file "
            "systems only. Use format='autopar'."
        )
    finish_saves()
    final, complete = begin_orbax_save(path, state, step, keep, asynchronous, overwrite, metadata)
    return _started(final, complete, asynchronous)


def start_save(
    directory: Location,
    state: Any,
    step: int,
    superfluous: Callable[[list[int]], Iterable[int]] | None,
    asynchronous: bool,
    overwrite: bool,
    metadata: str | None,
) -> Path | str | CheckpointSave:
    """Save in autopar's format. `superfluous`: which of the steps that are there up to this one to
    delete once it is complete."""
    (state,) = split_objects((state,), {}).args
    finish_saves()
    save = _Save(directory, state, step.__index__(), superfluous, asynchronous, overwrite, metadata)
    return _started(save.final, save.complete, asynchronous)


def _started(
    final: Location, complete: Callable[[], None], asynchronous: bool
) -> Path | str | CheckpointSave:
    global _latest
    path = str(final) if isinstance(final, ObjectPath) else final
    if asynchronous:
        _latest = CheckpointSave(path, complete)
        return _latest
    complete()
    return path


def metadata_text(metadata: Any) -> str | None:
    """Metadata as JSON, checked."""
    if metadata is None:
        return None
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"save_checkpoint(metadata=…): is no dict of texts, finite numbers, lists and dicts "
            f"({error}). Save arrays as part of the state."
        ) from error
    if len(text) > METADATA_LIMIT_BYTES:
        raise ArgumentError(
            f"save_checkpoint(metadata=…): has {len(text)} bytes as JSON, and at most "
            f"{METADATA_LIMIT_BYTES} are saved. Save arrays as part of the state."
        )
    return text


def _checked(directory: Any, step: Any, keep: Any, format: Any) -> Location:
    if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
        raise ArgumentError(f"save_checkpoint(step={step!r}): needs a whole number ≥ 0.")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ArgumentError(f"save_checkpoint(keep={keep!r}): needs a whole number ≥ 1, or None.")
    if format not in FORMATS:
        raise ArgumentError(f"save_checkpoint(format={format!r}): needs one of {FORMATS}.")
    return checked_directory("save_checkpoint", directory)


def checked_directory(function: str, directory: object) -> Location:
    """The place that a user named, a path or a URL."""
    if isinstance(directory, ObjectPath):
        return directory
    if not isinstance(directory, (str, Path)) or not str(directory):
        raise ArgumentError(
            f"{function}({directory!r}): needs the path of a folder in a mounted file system, or "
            "the URL of an object store."
        )
    if "://" in str(directory):
        return object_path(function, str(directory))
    return Path(directory).expanduser().absolute()


class _Save:
    """One save: the constructor copies or registers the leaves, `complete` writes them."""

    def __init__(
        self,
        directory: Location,
        state: Any,
        step: int,
        superfluous: Callable[[list[int]], Iterable[int]] | None,
        background: bool,
        overwrite: bool,
        metadata: str | None = None,
    ) -> None:
        self.final = folders.step_folder(directory, step)
        self._directory, self._step, self._superfluous = directory, step, superfluous
        self._overwrite, self._metadata = overwrite, metadata
        named = named_leaves(state, "save_checkpoint")
        self._leaves = [described(leaf, "save_checkpoint") for leaf in named]
        if not self._leaves:
            raise ArgumentError("save_checkpoint(state=…): has no arrays; nothing can be saved.")
        self._controllers = Controllers()
        self._draft: folders.AnyDraft | None = None
        with _file_errors(self.final):
            self._folder = location(self._controllers.from_first("folder", self._begin))
        self._writes: list[Callable[[], list[Entry]]] = []
        values = [leaf.leaf for leaf in named]
        try:
            for backend, positions in by_backend(values):
                arrays = [(named[i].key, values[i]) for i in positions if not _is_number(values[i])]
                self._writes.append(backend.save_leaves(self._folder, arrays, background))
        except BaseException as error:
            failed = error

            def fail() -> list[Entry]:
                raise failed

            self._writes = [fail]
            self.complete()  # tells other processes, and raises

    def _begin(self) -> str:
        if folders.is_taken(self.final) and not self._overwrite:
            raise CheckpointError(
                f"{self.final}: is there already. Save with overwrite=True to replace it."
            )
        self._draft = folders.begin(self._directory, self._step, self._overwrite)
        return str(self._draft.path)

    def complete(self) -> None:
        """Write everything and give the checkpoint its name; if that fails, nothing is left."""
        try:
            with _file_errors(self.final):
                try:
                    if not self._controllers.is_first:
                        self._controllers.to_first("written", self._write_for_first)
                finally:  # if a process fails, the first sends the reason to all
                    self._controllers.from_first("done", self._commit)
        except BaseException:
            if self._draft is not None:
                self._draft.abandon()
            raise
        if self._superfluous is not None and self._draft is not None:
            self._delete_old(self._superfluous)

    def _write(self) -> list[Entry]:
        writes, self._writes = self._writes, []
        return [entry for write in writes for entry in write()]

    def _write_for_first(self) -> str:
        """This process's entries as a file, since they may be long; returns its name."""
        name = f"entries_{self._controllers.process:05d}.json"
        text = json.dumps([(key, encode(shard)) for key, shard in self._write()])
        path = self._folder / name
        files.write_file(path, text.encode())
        files.sync_folder(self._folder)
        return path.name

    def _commit(self) -> None:
        assert self._draft is not None
        entries = self._write()
        for name in self._controllers.heard_by_first("written"):
            path = self._draft.written(name)
            body = json.loads(read_limited(path, MANIFEST_LIMIT_BYTES))
            entries += [(key, decode(Shard, shard)) for key, shard in body]
            files.remove(path)
        manifest = _manifest(self._step, self._leaves, entries, self._metadata)
        _check_files(self._draft, [shard for _, shard in entries])
        self._draft.commit(manifest_text(manifest))

    def _delete_old(self, superfluous: Callable[[list[int]], Iterable[int]]) -> None:
        """The checkpoint is safe, so training goes on if this fails."""
        try:
            there = [step for step in folders.own_steps(self._directory) if step <= self._step]
            for step in superfluous(there):
                folders.delete(self._directory, step)
        except (OSError, UnreachableStoreError) as error:
            text = f"{self.final}: is saved, but older ones could not be deleted: {error}"
            warnings.warn(text, stacklevel=2)


def _is_number(leaf: object) -> bool:
    return isinstance(leaf, tuple(SCALARS.values())) and not isinstance(leaf, np.generic)


def _manifest(
    step: int, leaves: Sequence[Leaf], entries: Sequence[Entry], extra: str | None
) -> Manifest:
    written = with_shards(leaves, entries)
    manifest = Manifest(
        step=step,
        leaves=written,
        writers=tuple(
            sorted({s.file.removesuffix(".data") for leaf in written for s in leaf.shards})
        ),
        autopar_version=_own_version(),
        jax_version=jax.__version__,
        metadata=extra,
    )
    try:
        check_manifest(manifest)
    except ValueError as error:
        raise CheckpointError(
            f"saving step {step}: {error}. Not all of the state was written; every process that "
            "holds a part of it must save."
        ) from error
    return manifest


def _own_version() -> str:
    try:
        return metadata.version("autopar")
    except metadata.PackageNotFoundError:  # used from its sources
        return ""


def _check_files(draft: folders.AnyDraft, shards: Sequence[Shard]) -> None:
    """The files that other hosts wrote are visible here."""
    sizes: dict[str, int] = {}
    for shard in shards:
        sizes[shard.file] = max(sizes.get(shard.file, 0), shard.offset + shard.num_bytes)
    for name, size in sizes.items():
        path = draft.written(name)
        if _size(path) < size:
            raise CheckpointError(
                f"{path}: was written by {name.removesuffix('.data')} and is not there for the "
                "process that collects the checkpoint. Save to a folder on a file system that all "
                "hosts share."
            )


def _size(path: Location) -> int:
    """In bytes; -1 if there is no such file."""
    if not path.is_file():
        return -1
    return path.size() if isinstance(path, ObjectPath) else path.stat().st_size


@contextmanager
def _file_errors(final: Location) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise files.as_checkpoint_error(f"saving {final}", error) from error
