"""The progress of a worker: a small memory-mapped file, which outlives the process.

Before every instruction the executor writes (program, instruction, micro-batch), with the command's
number and the time. A write is one `struct.pack_into` into one of two alternating records. Each
begins and ends with the same count, so a reader finds a whole record even if the writer was killed
halfway.
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
    """The last instruction that a worker began.

    count:       number of records written so far.
    command:     number of the command; `NOWHERE` between commands.
    program, instruction, micro_batch: as the executor numbers them, or `NOWHERE`. Between commands,
                 those of the last command.
    time_s:      when, by the clock of its host (`time.time()`).
    """

    count: int = 0
    command: int = NOWHERE
    program: int = NOWHERE
    instruction: int = NOWHERE
    micro_batch: int = NOWHERE
    time_s: float = 0.0


class WorkerProgress:
    """The writer: one thread writes, and any process may read.

    moved_s: when it wrote last, by `time.monotonic()`: the clock of a host may jump.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "w+b") as file:
            file.write(bytes(_SIZE))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._count = 0
        self.moved_s = time.monotonic()
        self._command = NOWHERE
        self._last = (NOWHERE, NOWHERE, NOWHERE)

    def begin(self, command: int) -> None:
        """The command of this number begins."""
        self._command = command
        self.at(NOWHERE, NOWHERE, NOWHERE)

    def end(self) -> None:
        """The command is done."""
        self._command = NOWHERE
        self.at(*self._last)

    def at(self, program: int, instruction: int, micro_batch: int = NOWHERE) -> None:
        """An instruction begins."""
        self._last = program, instruction, micro_batch
        count = self._count = self._count + 1
        where = (count & 1) * _RECORD.size
        now = time.time()
        self.moved_s = time.monotonic()
        _RECORD.pack_into(
            self._map, where, count, self._command, program, instruction, micro_batch, now, count
        )

    def state(self) -> State:
        return decode(self._map[:])

    def close(self) -> None:
        self._map.close()

    @staticmethod
    def read(path: str) -> State:
        """The state of another process, which may have ended."""
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
