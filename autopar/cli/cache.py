"""`autopar cache`: the plans that are kept on disk, as text; `--clear` removes them."""

from __future__ import annotations

import re
import time
from argparse import Namespace
from pathlib import Path

from autopar.ir.text import format_bytes, table
from autopar.plan_cache.folder import VARIABLE, plan_folder

_HEAD_BYTES = 4096
_NAME = re.compile(r'"plan":\{"name":"(?P<name>[^"\\]*)","method":"(?P<method>[^"\\]*)')
_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"))


def run_cache(arguments: Namespace) -> int:
    folder = plan_folder()
    if folder is None:
        print(f"plans are not kept ({VARIABLE} is empty, or there is no home folder)")
        return 0
    if arguments.clear:
        num_removed = folder.clear()
        print(f"{folder.path}: {_counted(num_removed, 'plan')} removed")
        return 0
    files = folder.files()
    total = sum(file.num_bytes for file in files)
    print(
        f"{folder.path}: {_counted(len(files), 'plan')}, {format_bytes(total)} of at most "
        f"{format_bytes(folder.max_bytes)}"
    )
    if files:
        rows = [
            (*_step_of(file.path), format_bytes(file.num_bytes), _age(file.used_s), file.path.name)
            for file in reversed(files)
        ]
        print("\n".join(table(("step", "method", "size", "last used", "file"), rows)))
    return 0


def _step_of(path: Path) -> tuple[str, str]:
    """(step, method) of a plan, from the beginning of its file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = _NAME.search(file.read(_HEAD_BYTES))
    except OSError:
        found = None
    return (found["name"], found["method"]) if found else ("?", "?")


def _age(then_s: float) -> str:
    seconds = max(0.0, time.time() - then_s)
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{_counted(int(seconds // size), unit)} ago"
    return "now"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
