"""Runs the code blocks of a page in a separate folder; errors name the page and line."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.docs.blocks import ROOT, Block

BASH_LIMIT_S = 540


def run_blocks(blocks: list[Block], folder: Path, slow: bool) -> int:
    """Runs the blocks, with `slow` also those marked slow; returns how many ran."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    _furnish(folder)
    num_run = 0
    with _working_in(folder):
        for block in blocks:
            if "not run" in block.notes or ("slow" in block.notes and not slow):
                continue
            num_run += _run(block, namespace, folder)
    return num_run


def _run(block: Block, namespace: dict[str, Any], folder: Path) -> int:
    if "setup" in block.notes:
        _run_python(textwrap.dedent(block.notes["setup"]), f"setup of {block.where}", namespace)
    if "file" in block.notes:
        (folder / block.notes["file"].strip()).write_text(block.code)
        return 0
    if block.language == "python":
        wanted = block.notes.get("raises", "").strip()
        if wanted:
            _run_to_error(block, namespace, wanted)
        else:
            _run_python(block.code, block.where, namespace, block.line)
        return 1
    if block.language == "bash":
        _run_bash(block, folder)
        return 1
    return 0


def _run_python(code: str, where: str, namespace: dict[str, Any], line: int = 0) -> None:
    source = compile("\n" * line + code, where, "exec")
    try:
        exec(source, namespace)
    except BaseException as error:
        error.add_note(f"in the code block {where}")
        raise


def _run_to_error(block: Block, namespace: dict[str, Any], wanted: str) -> None:
    try:
        _run_python(block.code, block.where, namespace, block.line)
    except Exception as error:
        names = {cls.__name__ for cls in type(error).__mro__}
        assert wanted in names, f"{block.where}: {wanted} expected, got {error!r}"
        print(error)
    else:
        raise AssertionError(f"{block.where}: {wanted} expected, nothing raised")


def _run_bash(block: Block, folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PATH"] = f"{folder / '.bin'}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{ROOT}"
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=BASH_LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # also processes that it left behind
                os.killpg(process.pid, signal.SIGKILL)
    print(out)
    assert process.returncode == 0, f"{block.where}: exit {process.returncode}\n{errors[-3000:]}"


def _furnish(folder: Path) -> None:
    """Adds the folders of a clone that pages name, and commands that run this tree's code."""
    for name in ("examples", "benchmarks", "docs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".bin").mkdir()
    for name, command in {
        "autopar": f"{sys.executable} -m autopar",
        "python": sys.executable,
        "python3": sys.executable,
    }.items():
        script = folder / ".bin" / name
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before, path, modules = Path.cwd(), list(sys.path), set(sys.modules)
    variables = dict(os.environ)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        for name in set(os.environ) - set(variables):
            del os.environ[name]
        os.environ.update(variables)
        for name in set(sys.modules) - modules:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(folder):
                del sys.modules[name]
