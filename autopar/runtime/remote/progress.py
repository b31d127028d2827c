"""Where a worker is: a small file, mapped into its memory, that outlives it.

The executor writes (program, instruction, micro-batch) before every instruction; the command's
number and the time are written with them. A write is one `struct.pack_into` into one of two places
that take turns, each framed by the same count, so that a reader finds a whole one even if the
writer was killed halfway.
"""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass

_RECORD = struct.Struct("<QqqqqdQ")
_SIZE = 2 * _RECORD.size
NOWHERE = -1


@dataclass(frozen=True)
class State:
    """The last thing that a worker began.

    count:       how often it has said where it is; 0 if never.
    command:     number of the command; `NOWHERE` between commands.
    program, instruction, micro_batch: as the executor numbers them; `NOWHERE` where there is none.
                 Between commands, those of the last one.
    time_s:      when, by the clock of its host (`time.time()`).
    """

    count: int = 0
    command: int = NOWHERE
    program: int = NOWHERE
    instruction: int = NOWHERE
    micro_batch: int = NOWHERE
    time_s: float = 0.0


class WorkerProgress:
    """The writing side: one thread writes, anybody reads."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "w+b") as file:
            file.write(bytes(_SIZE))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._count = 0
        self._command = NOWHERE
        self._last = (NOWHERE, NOWHERE, NOWHERE)

    def begin(self, command: int) -> None:
        """The command of this number is carried out from now on."""
        self._command = command
        self.at(NOWHERE, NOWHERE, NOWHERE)

    def end(self) -> None:
        """No command is being carried out."""
        self._command = NOWHERE
        self.at(*self._last)

    def at(self, program: int, instruction: int, micro_batch: int = NOWHERE) -> None:
        """The instruction that is begun now."""
        self._last = program, instruction, micro_batch
        count = self._count = self._count + 1
        where = (count & 1) * _RECORD.size
        now = time.time()
        _RECORD.pack_into(
            self._map, where, count, self._command, program, instruction, micro_batch, now, count
        )

    def state(self) -> State:
        return decode(self._map[:])

    def close(self) -> None:
        self._map.close()

    @staticmethod
    def read(path: str) -> State:
        """What the file of another process says, which may have ended."""
        with open(path, "rb") as file:
            return decode(file.read(_SIZE))


def decode(data: bytes) -> State:
    """The newest whole record of a progress file."""
    newest = State()
    for where in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
        count, *fields, again = _RECORD.unpack_from(data, where)
        if count == again and count > newest.count:
            newest = State(count, *fields)
    return newest
