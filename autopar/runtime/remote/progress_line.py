"""How far something is, on a terminal; silent elsewhere."""

from __future__ import annotations

import sys
from typing import Any


class ProgressLine:
    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> ProgressLine:
        self._show()
        return self

    def step(self) -> None:
        self._done += 1
        self._show()

    def _show(self) -> None:
        if self._shown:
            line = f"\rautopar: {self._what}: {self._done} of {self._total} programs"
            print(line, end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: Any) -> None:
        if self._shown:
            print(file=sys.stderr)
