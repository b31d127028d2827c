"""Files of the plan cache: whole or absent, limited in size, shared by processes, never fatal."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.plan_cache import folder as folders
from autopar.plan_cache.folder import PlanFolder, plan_folder


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(folders, "_told", set())


def test_what_is_written_is_read(tmp_path):
    folder = PlanFolder(tmp_path / "new" / "plans")
    assert folder.read("a") is None
    folder.write("a", "text é")
    assert folder.read("a") == "text é"
    folder.write("a", "other")
    assert folder.read("a") == "other"
    assert [file.path.name for file in folder.files()] == ["a.json"]
    assert not list(folder.path.glob(".*"))


def test_the_least_recently_used_go_first(tmp_path):
    folder = PlanFolder(tmp_path, max_bytes=30)
    for age, key in enumerate(("c", "b", "a")):
        folder.write(key, key * 10)
        then = time.time() - 100 * (age + 1)
        os.utime(folder.file(key), (then, then))
    assert folder.read("a") is not None  # the oldest, but used now
    folder.write("d", "d" * 10)
    assert {file.path.stem for file in folder.files()} == {"a", "c", "d"}
    folder.write("e", "e" * 31)  # more than the limit by itself
    assert folder.read("e") is None
    assert len(folder.files()) == 3


def test_files_of_crashed_writers_are_removed(tmp_path):
    folder = PlanFolder(tmp_path)
    old, new = tmp_path / ".old.1.tmp", tmp_path / ".new.1.tmp"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (time.time() - 7200,) * 2)
    folder.write("a", "text")
    assert not old.exists() and new.exists()
    assert folder.clear() == 1
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from autopar.plan_cache.folder import PlanFolder
folder, me = PlanFolder(Path(sys.argv[1]), max_bytes=4_000_000), sys.argv[2]
for turn in range(40):
    key = f"k{turn % 4}"
    folder.write(key, f"{key}:" + (me * 300_000) + ":end")
    text = folder.read(key)
    assert text is None or (text.startswith(f"{key}:") and text.endswith(":end")), text[:20]
    assert text is None or len(set(text[3:-4])) == 1
"""


def test_processes_that_write_at_once_leave_whole_files(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, me], stderr=subprocess.PIPE) for me in "abc"]
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors.decode()
    folder = PlanFolder(tmp_path)
    assert {file.path.stem for file in folder.files()} == {"k0", "k1", "k2", "k3"}
    assert not list(tmp_path.glob(".*"))


def test_a_killed_writer_leaves_the_old_file(tmp_path):
    folder = PlanFolder(tmp_path)
    folder.write("k", "old")
    code = (
        "import os, sys, pathlib\n"
        "from autopar.plan_cache import folder as f\n"
        "os.fsync = lambda _: os._exit(9)\n"
        "f.PlanFolder(pathlib.Path(sys.argv[1])).write('k', 'new' * 1000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == 9
    assert folder.read("k") == "old"


def test_a_folder_that_cannot_be_made_is_one_log_line(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    folder = PlanFolder(tmp_path / "file" / "plans")
    with caplog.at_level(logging.WARNING, "autopar"):
        for _ in range(2):
            folder.write("a", "text")
            assert folder.read("a") is None
    assert folder.files() == [] and folder.clear() == 0
    (record,) = caplog.records
    assert "AUTOPAR_CACHE_DIR" in record.getMessage()


def test_where_plans_are_kept(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", "")
    assert plan_folder() is None
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    assert plan_folder() == PlanFolder(tmp_path / "plans")
    monkeypatch.delenv("AUTOPAR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert plan_folder() == PlanFolder(tmp_path / "xdg" / "autopar" / "plans")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification tells to ignore
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert plan_folder() == PlanFolder(tmp_path / "home" / ".cache" / "autopar" / "plans")

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert plan_folder() is None and plan_folder() is None
    (record,) = caplog.records
    assert "no home folder" in record.getMessage()


@pytest.mark.parametrize("kind", ["pipe", "link", "too large"])
def test_what_is_no_file_of_ours_is_neither_read_nor_waited_for(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(folders, "_told", set())
    folder = PlanFolder(tmp_path / "plans", max_bytes=1000)
    folder.path.mkdir()
    path = folder.file("key")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "elsewhere").write_text("{}")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_text("x" * 1001)
    assert folder.read("key") is None
    folder.write("key", "a plan")  # replaces it
    assert folder.read("key") == "a plan"
