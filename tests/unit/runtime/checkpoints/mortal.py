"""A stand-in for the module `os` in which a process dies, or a disk is full, at a chosen point.

Points are counted in bytes written and in changes of the file system, so that every moment of a
save can be hit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHANGES = ("fsync", "rename", "mkdir", "unlink", "rmdir")


class Died(BaseException):
    """The process is dead: nothing that it does any more has an effect."""


class Mortal:
    """`os`, until `left` bytes and changes are used up.

    how: "died" raises `Died` then and ever after; "killed" ends this process by SIGKILL; "full"
         fails writes, and only these, as a full disk does.
    """

    def __init__(self, left: float, how: str = "died") -> None:
        self._left = left
        self._how = how
        self.used = 0
        self._opened: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CHANGES or self._how == "full":
            return real

        def change(*args: Any, **kwargs: Any) -> Any:
            self._spend(1)
            return real(*args, **kwargs)

        return change

    def _spend(self, amount: int) -> int:
        """How much of it is there; dies if that is nothing."""
        spent = int(min(amount, self._left))
        self._left -= spent
        self.used += spent
        if not spent:
            if self._how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._how == "full":
                raise OSError(errno.ENOSPC, "No space left on device")
            raise Died
        return spent

    def write(self, descriptor: int, data: Any) -> int:
        return os.write(descriptor, data[: self._spend(len(data))])

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT and self._how != "full":
            self._spend(1)
        descriptor = os.open(path, flags, mode)
        self._opened.add(descriptor)
        return descriptor

    def close(self, descriptor: int) -> None:
        self._opened.discard(descriptor)
        os.close(descriptor)

    def bury(self) -> None:
        """What the kernel does for a dead process: close its files, and give up its locks."""
        for descriptor in self._opened:
            os.close(descriptor)
        self._opened.clear()


@contextlib.contextmanager
def mortal(left: float, how: str = "died", exchanges: bool = True) -> Iterator[Mortal]:
    """Saves in this block are made by a process that dies at a chosen point; on a file system that
    cannot exchange names, if that is wanted."""
    from autopar.runtime.checkpoints import files, folders

    stand_in = Mortal(left, how)
    exchange = files.exchange

    def counted(one: Path, other: Path) -> bool:
        if how != "full":
            stand_in._spend(1)
        return exchanges and exchange(one, other)

    try:
        files.os = folders.os = stand_in  # type: ignore[assignment]
        files.exchange = counted
        yield stand_in
    finally:
        files.os = folders.os = os
        files.exchange = exchange
        stand_in.bury()
