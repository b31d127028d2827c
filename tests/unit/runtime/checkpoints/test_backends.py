"""Leaves that somebody else writes and reads, in one pytree with this process's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import CheckpointError, WorkerError
from autopar.runtime.checkpoints.backends import _registered, register_backend
from autopar.runtime.checkpoints.format import Entry, Manifest
from autopar.runtime.checkpoints.read import read_arrays
from autopar.runtime.checkpoints.write import write_shards


@dataclass
class Elsewhere:
    """An array of two workers, each of which has half of the rows."""

    values: np.ndarray
    fails: bool = False
    weak_type = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.values.dtype


@dataclass(frozen=True)
class ElsewherePlace:
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = False


class TwoWorkers:
    def save_leaves(
        self, folder: Path, leaves: Sequence[tuple[str, Any]], background: bool
    ) -> Callable[[], list[Entry]]:
        def write() -> list[Entry]:
            entries = []
            for worker in range(2):
                halves = [(key, np.split(leaf.values, 2)[worker]) for key, leaf in leaves]
                for key, shard in write_shards(folder, f"worker_{worker}", halves):
                    (start, stop), *rest = shard.box
                    moved = (start + worker * stop, stop + worker * stop)
                    entries.append((key, replace(shard, box=(moved, *rest))))
                if any(leaf.fails for _, leaf in leaves):
                    raise WorkerError("worker 1 died")
            return entries

        return write

    def restore_leaves(
        self, folder: Path, manifest: Manifest, wanted: Sequence[tuple[str, Any]]
    ) -> list[Any]:
        types = [(key, jax.ShapeDtypeStruct(p.shape, p.dtype)) for key, p in wanted]
        return [Elsewhere(np.asarray(a)) for a in read_arrays(folder, manifest, types)]

    def place_of(self, leaf: Any) -> ElsewherePlace:
        return ElsewherePlace(leaf.shape, leaf.dtype)


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    before = dict(_registered)
    two = TwoWorkers()
    register_backend(Elsewhere, two)
    register_backend(ElsewherePlace, two)
    yield
    _registered.clear()
    _registered.update(before)


def state(**options: Any) -> dict[str, Any]:
    there = np.arange(24.0, dtype=np.float32).reshape(6, 4)
    return {"there": Elsewhere(there, **options), "here": jnp.arange(5), "number": 2}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_mixed_tree_goes_there_and_back(tmp_path: Path, asynchronous: bool):
    saved = autopar.save_checkpoint(tmp_path, state(), 1, asynchronous=asynchronous)
    path = saved.wait() if isinstance(saved, autopar.CheckpointSave) else saved
    assert {f.name for f in path.iterdir()} == {
        "manifest.json",
        "process_00000.data",
        "worker_0.data",
        "worker_1.data",
    }
    back = autopar.restore_checkpoint(tmp_path, state())
    assert isinstance(back["there"], Elsewhere)
    np.testing.assert_array_equal(back["there"].values, state()["there"].values)
    assert back["here"].tolist() == [0, 1, 2, 3, 4] and back["number"] == 2
    # And to this process alone.
    plain = autopar.restore_checkpoint(tmp_path)
    np.testing.assert_array_equal(plain["there"], state()["there"].values)
    other = {**state(), "there": Elsewhere(np.zeros((6, 5), np.float32))}
    with pytest.raises(CheckpointError, match=r"\['there'\]: wanted float32\[6, 5\]"):
        autopar.restore_checkpoint(tmp_path, other)


def test_what_a_backend_raises_is_raised_and_nothing_is_left(tmp_path: Path):
    with pytest.raises(WorkerError, match="worker 1 died"):
        autopar.save_checkpoint(tmp_path, state(fails=True), 1)
    save = autopar.save_checkpoint(tmp_path, state(fails=True), 1, asynchronous=True)
    assert isinstance(save, autopar.CheckpointSave)
    with pytest.raises(WorkerError, match="worker 1 died"):
        save.wait()
    assert list(tmp_path.iterdir()) == []


def test_files_that_this_host_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Workers whose folder is another than the driver's."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    real = TwoWorkers.save_leaves

    def there(self: Any, folder: Path, leaves: Any, background: bool) -> Any:
        return real(self, elsewhere, leaves, background)

    monkeypatch.setattr(TwoWorkers, "save_leaves", there)
    with pytest.raises(CheckpointError, match=r"was written by worker_0.*that all hosts share"):
        autopar.save_checkpoint(tmp_path / "here", state(), 1)
    assert list((tmp_path / "here").iterdir()) == []


def test_a_part_that_nobody_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = TwoWorkers.save_leaves

    def half(self: Any, folder: Path, leaves: Any, background: bool) -> Any:
        write = real(self, folder, leaves, background)
        return lambda: write()[:1]

    monkeypatch.setattr(TwoWorkers, "save_leaves", half)
    with pytest.raises(CheckpointError, match=r"\['there'\]: shards do not make up the array"):
        autopar.save_checkpoint(tmp_path, state(), 1)
    assert list(tmp_path.iterdir()) == []
