"""Saves that are cut short anywhere leave the last good checkpoint, and nothing that stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.errors import CheckpointError
from autopar.runtime.checkpoints import files, folders
from autopar.runtime.checkpoints.save import _Save
from tests.unit.runtime.checkpoints.mortal import Died, mortal

SCRIPT = Path(__file__).with_name("killed_saves.py")


def state_of(step: int) -> dict[str, Any]:
    return {
        "w": np.full((7, 5), step, np.float32),
        "list": [np.arange(40) * step, np.full(3, step, np.int16)],
        "step": step,
    }


def assert_whole(directory: Path) -> int:
    """Every checkpoint that is there is whole; the newest one's step."""
    steps = autopar.checkpoint_steps(directory)
    for step in steps:
        want = state_of(step)
        back = autopar.restore_checkpoint(directory, want, step=step)
        np.testing.assert_array_equal(back["w"], want["w"])
        np.testing.assert_array_equal(back["list"][0], want["list"][0])
        np.testing.assert_array_equal(back["list"][1], want["list"][1])
        assert back["step"] == step
    return steps[-1]


def cost_of(directory: Path, **options: Any) -> int:
    """Bytes and changes of a save that nothing happens to."""
    autopar.save_checkpoint(directory, state_of(1), 1)
    with mortal(float("inf")) as counted:
        autopar.save_checkpoint(directory, state_of(2), 2, **options)
    return counted.used


def test_a_crash_at_any_point_leaves_the_last_good_checkpoint(tmp_path: Path):
    total = cost_of(tmp_path / "counted", keep=1)
    assert total > 1000
    rng = np.random.default_rng(0)
    # The end has most of the changes: manifest, renames, deletion of the old one.
    points = {*range(6), *range(total - 40, total), *rng.integers(6, total - 40, 60).tolist()}
    newest = []
    for point in sorted(points):
        directory = tmp_path / str(point)
        autopar.save_checkpoint(directory, state_of(1), 1)
        with mortal(point), pytest.raises(Died):
            autopar.save_checkpoint(directory, state_of(2), 2, keep=1)
        newest.append(assert_whole(directory))
        # The next save removes what the crash left.
        autopar.save_checkpoint(directory, state_of(3), 3, keep=1)
        assert assert_whole(directory) == 3
        assert os.listdir(directory) == ["step_00000003"]
    assert newest == sorted(newest) and set(newest) == {1, 2}, "first the old one, then the new"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_crash_while_one_is_replaced_loses_nothing(tmp_path: Path, exchanges: bool):
    """At no moment do readers find fewer checkpoints, nor does the next save have to mend it."""
    autopar.save_checkpoint(tmp_path / "counted", state_of(2), 2)
    total = cost_of(tmp_path / "counted", overwrite=True)
    for point in range(total - 30, total):
        directory = tmp_path / str(point)
        autopar.save_checkpoint(directory, state_of(2), 2)
        with mortal(point, exchanges=exchanges), pytest.raises(Died):
            autopar.save_checkpoint(directory, state_of(2), 2, overwrite=True)
        assert autopar.latest_step(directory) == 2
        assert_whole(directory)
        autopar.save_checkpoint(directory, state_of(3), 3)
        assert autopar.checkpoint_steps(directory) == [2, 3]
        assert_whole(directory)
        assert sorted(os.listdir(directory)) == ["step_00000002", "step_00000003"]


def test_readers_that_may_not_write_leave_a_checkpoint_aside(tmp_path: Path, monkeypatch: Any):
    autopar.save_checkpoint(tmp_path, state_of(1), 1)
    (tmp_path / "step_00000001").rename(tmp_path / ".step_00000001.old-abc")

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(files, "rename", refuse)
        assert autopar.latest_step(tmp_path) is None
    assert autopar.latest_step(tmp_path) == 1


def test_a_step_that_another_process_saved_meanwhile_is_not_replaced(tmp_path: Path):
    save = _Save(tmp_path, state_of(1), 1, None, False, overwrite=False)
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001" / "theirs").write_text("")
    with pytest.raises(CheckpointError, match="another process saved this step"):
        save.complete()
    assert os.listdir(tmp_path) == ["step_00000001"]
    assert os.listdir(tmp_path / "step_00000001") == ["theirs"]


def test_old_ones_that_cannot_be_deleted_do_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    autopar.save_checkpoint(tmp_path, state_of(1), 1)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folders, "delete", refuse)
    with pytest.warns(UserWarning, match=r"step_00000002: is saved, but older ones could not"):
        autopar.save_checkpoint(tmp_path, state_of(2), 2, keep=1)
    assert assert_whole(tmp_path) == 2


def test_new_folders_are_synced_up_to_the_first_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    autopar.save_checkpoint(tmp_path / "a" / "b", state_of(1), 1)
    assert synced[:2] == [tmp_path, tmp_path / "a"]
    assert tmp_path / "a" / "b" in synced


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path):
    total = cost_of(tmp_path / "counted")
    autopar.save_checkpoint(tmp_path / "x", state_of(1), 1)
    for point in np.linspace(0, total - 40, 25).astype(int).tolist():
        with mortal(point, "full"), pytest.raises(CheckpointError, match="No space left on device"):
            autopar.save_checkpoint(tmp_path / "x", state_of(2), 2)
        assert os.listdir(tmp_path / "x") == ["step_00000001"]
    with mortal(100, "full"), pytest.raises(CheckpointError, match=r"step_00000002.*Free some"):
        autopar.save_checkpoint(tmp_path / "x", state_of(2), 2)
    assert assert_whole(tmp_path / "x") == 1


def test_folders_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        autopar.save_checkpoint(tmp_path / "file" / "x", state_of(1), 1)
    with pytest.raises(CheckpointError, match="File exists"):
        autopar.save_checkpoint(tmp_path / "file", state_of(1), 1)


def test_a_save_in_progress_is_no_leftover(tmp_path: Path):
    draft = folders.begin(tmp_path, 5)
    (draft.path / "data").write_text("half")
    autopar.save_checkpoint(tmp_path, state_of(1), 1)
    assert (draft.path / "data").read_text() == "half"
    assert autopar.checkpoint_steps(tmp_path) == [1]
    with pytest.raises(CheckpointError, match="its save was begun and not finished"):
        autopar.restore_checkpoint(tmp_path, step=5)
    draft.abandon()
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_without_locks_only_old_leftovers_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with mortal(300), pytest.raises(Died):
        autopar.save_checkpoint(tmp_path, state_of(1), 1)
    autopar.save_checkpoint(tmp_path, state_of(2), 2)
    names = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    assert len(names) == 2, "a folder and its lock, which may be alive"
    (lock,) = [name for name in names if ".lock-" in name]
    long_ago = time.time() - 2 * 24 * 3600
    os.utime(tmp_path / lock, (long_ago, long_ago))
    autopar.save_checkpoint(tmp_path, state_of(3), 3)
    assert sorted(os.listdir(tmp_path)) == ["step_00000002", "step_00000003"]


# -- processes that are killed


def run_script(*args: str, timeout_s: float) -> str:
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *args],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_processes(tmp_path: Path):
    out = run_script("kill", str(tmp_path), "8", timeout_s=120)
    assert "8 killed at a byte, 8 at a moment" in out


@pytest.mark.slow
def test_many_killed_processes(tmp_path: Path):
    out = run_script("kill", str(tmp_path), "100", timeout_s=500)
    assert "100 killed at a byte, 100 at a moment" in out


@pytest.mark.ci
def test_the_end_of_a_process_waits_for_the_save(tmp_path: Path):
    run_script("exit", str(tmp_path), timeout_s=120)
    assert assert_whole(tmp_path) == 1


# -- in the background


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from autopar.runtime.checkpoints import write

    may_go_on, order = threading.Event(), []
    real = write.files.create_file

    def slow(path: Path) -> int:
        if path.name.endswith(".data"):
            order.append(path.parent.name[:14])
            assert may_go_on.wait(20)
        return real(path)

    monkeypatch.setattr(write.files, "create_file", slow)
    first = autopar.save_checkpoint(tmp_path, state_of(1), 1, asynchronous=True)
    assert isinstance(first, autopar.CheckpointSave) and not first.done
    assert "in progress" in repr(first)
    with pytest.raises(CheckpointError, match=r"still being written .*=0\.01") as late:
        first.wait(timeout_s=0.01)
    assert isinstance(late.value, TimeoutError)
    assert autopar.checkpoint_steps(tmp_path) == []
    threading.Timer(0.1, may_go_on.set).start()
    second = autopar.save_checkpoint(tmp_path, state_of(2), 2, asynchronous=True)
    assert first.done
    assert isinstance(second, autopar.CheckpointSave)
    assert second.wait() == tmp_path / "step_00000002"
    assert order == [".step_00000001", ".step_00000002"]
    assert assert_whole(tmp_path) == 2


def test_an_error_in_the_background_is_raised_or_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from autopar.runtime.checkpoints import write

    def fail(path: Path) -> int:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(write.files, "create_file", fail)
        save = autopar.save_checkpoint(tmp_path, state_of(1), 1, asynchronous=True)
        assert isinstance(save, autopar.CheckpointSave)
        with pytest.raises(CheckpointError, match="No space left"):
            save.wait()
        save = autopar.save_checkpoint(tmp_path, state_of(2), 2, asynchronous=True)
        assert isinstance(save, autopar.CheckpointSave)
        while not save.done:
            time.sleep(0.01)
    with pytest.warns(UserWarning, match=r"A checkpoint was not saved: .*step_00000002"):
        autopar.save_checkpoint(tmp_path, state_of(3), 3)
    assert autopar.checkpoint_steps(tmp_path) == [3]
    assert os.listdir(tmp_path) == ["step_00000003"]


def test_a_save_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither the next save nor the end of the process waits for it for ever."""
    from autopar.runtime.checkpoints import save

    monkeypatch.setattr(save, "SETTLE_LIMIT_S", 0.05)
    go_on = threading.Event()
    stuck = save.CheckpointSave(tmp_path / "step_00000001", lambda: go_on.wait(60) and None)
    try:
        with pytest.warns(UserWarning, match="still being written after 0 s; gave it up"):
            stuck.settle()
        with pytest.raises(save.UnfinishedSaveError, match=r"wait\(timeout_s=0.05\)"):
            stuck.wait(0.05)
    finally:
        go_on.set()
    assert stuck.wait(10) == tmp_path / "step_00000001"
