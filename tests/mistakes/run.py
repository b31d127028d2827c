"""Makes a mistake and returns the text that the user reads: from a `Mistake` to text."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shlex
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

from autopar import cli
from autopar.errors import AutoparError
from tests.mistakes.catalogue import PRELUDE, Mistake

ROOT = Path(__file__).parents[2]
_SIZE = re.compile(r"\d+(\.\d+)? ([KMG]iB)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def text_of(mistake: Mistake) -> str:
    """The error, with its class, or the warning; AssertionError if nothing is said."""
    with tempfile.TemporaryDirectory() as folder, _inside(folder), _logged() as records:
        if mistake.code.startswith("autopar "):
            text = _run_command(mistake.code)
        else:
            text = _run_python(mistake.code)
        said = [text] if text else [f"warning: {record}" for record in records]
    assert said, f"{mistake.title}: nothing was said"
    return _same_everywhere(said[0], folder)


def _run_python(code: str) -> str:
    scope: dict = {"__name__": "my_train"}
    exec(compile(PRELUDE, "my_train.py", "exec"), scope)
    try:
        exec(compile(code, "my_train.py", "exec"), scope)
    except (AutoparError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run_command(command: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = cli.main(shlex.split(command)[1:])
        except SystemExit as exit_:  # argparse
            code = exit_.code
    assert code in (1, 2), f"{command}: exit code {code}"
    lines = [line for line in said.getvalue().splitlines() if line]
    return lines[-1] if "error:" in lines[-1] else "\n".join(lines)


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """In an empty folder, so that files are not there, or only those of the mistake."""
    with contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = {name: os.environ.get(name) for name in ("AUTOPAR_CACHE_DIR", "COLUMNS")}
        os.environ.update({"AUTOPAR_CACHE_DIR": "", "COLUMNS": "100"})
        try:
            yield
        finally:
            for name, value in kept.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autopar")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def _same_everywhere(text: str, folder: str) -> str:
    """Without what differs between machines and runs, and without figures of the memory model."""
    if text.startswith("MemoryBudgetError"):
        text = _SIZE.sub(r"… \2", text.split("\n")[0]) + "\n…"
    for path in (os.path.realpath(folder), folder):
        text = text.replace(path + os.sep, "")
    return _ADDRESS.sub("", text.replace(str(ROOT) + os.sep, ""))
