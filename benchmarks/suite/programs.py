"""XLA's text of a compiled program ↔ a file, so that it can be judged again without compiling.

The first line of the file is JSON with the host of every device, in the program's order.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path

SUFFIX = ".hlo.xz"
_PRESET = 3  # a larger one saves a tenth and takes three times as long


def write_program(path: Path, text: str, hosts: Sequence[int] | None) -> None:
    head = json.dumps({"hosts": None if hosts is None else list(hosts)})
    partial = path.with_name(f"{path.name}.partial")
    with lzma.open(partial, "wt", encoding="utf-8", preset=_PRESET) as file:
        file.write(f"{head}\n{text}")
    partial.rename(path)


def read_program(path: Path) -> tuple[str, list[int] | None]:
    """(text, hosts)"""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        head = json.loads(file.readline())
        return file.read(), head["hosts"]
