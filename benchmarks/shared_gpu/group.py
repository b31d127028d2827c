"""What the ranks of a measurement tell each other, and a watchdog for each.

`Group` passes small values through the store of JAX's coordination service: collectives would
disturb the timings, and hang where a rank has failed. `Watchdog` ends this process if what it does
takes too long, so that the launcher ends the others. It also notes what the process is at in a
file, by which the driver knows which program to leave out next time.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from autopar import _jax
from autopar.errors import ClusterError
from autopar.ir.files import write_whole

HANG_CODE = 17  # of a process that its watchdog ended
FINISHED = "finished: "  # rank 0 prints it, with the name of a case


class Group:
    """All ranks call the same methods in the same order."""

    def __init__(self, rank: int, size: int, limit_s: float = 300.0) -> None:
        self.rank, self.size = rank, size
        self._limit_s = limit_s
        self._numbers = itertools.count()

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        number = next(self._numbers)
        _jax.store_set(self._key(number, self.rank), json.dumps(value).encode())
        return [self._read(number, rank) for rank in range(self.size)]

    def slowest(self, seconds: float) -> float:
        return max(self.gather(seconds))

    def from_first(self, value: Any) -> Any:
        """The value of rank 0."""
        number = next(self._numbers)
        if self.rank == 0:
            _jax.store_set(self._key(number, 0), json.dumps(value).encode())
            return value
        return self._read(number, 0)

    def _read(self, number: int, rank: int) -> Any:
        text = _jax.store_get(self._key(number, rank), self._limit_s)
        if text is None:
            raise ClusterError(
                f"rank {self.rank}: no word from rank {rank} within {self._limit_s:g} s. Its own "
                "output says why."
            )
        return json.loads(text)

    def _key(self, number: int, rank: int) -> str:
        return f"shared_gpu/{number}/{rank}"


class Watchdog:
    """`watch(…)` says what begins now and how long it may take."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = progress_file(folder, rank)
        self._what: dict[str, Any] = {}
        self._began_s = time.monotonic()
        self._ends_s = float("inf")
        threading.Thread(target=self._run, daemon=True).start()

    def watch(self, limit_s: float, **what: Any) -> None:
        self._ends_s = time.monotonic() + limit_s
        if what != self._what:
            self._what = what
            write_whole(self._file, json.dumps(what))
            print(f"{time.monotonic() - self._began_s:6.1f} s: {what}", flush=True)

    def failed(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        write_whole(self._file, json.dumps({**self._what, "error": text[:2000]}))

    def _run(self) -> None:
        while time.monotonic() < self._ends_s:
            time.sleep(0.2)
        print(f"rank: no progress in time: {self._what}", file=sys.stderr, flush=True)
        os._exit(HANG_CODE)


def progress_file(folder: Path, rank: int) -> Path:
    return folder / f"progress.{rank}.json"
