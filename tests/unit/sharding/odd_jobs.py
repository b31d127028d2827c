"""A subject whose jobs go wrong in other processes, for tests of planning processes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Squares:
    """`square` sleeps a little, so that all processes get jobs. In processes other than `here` it
    does what `fault` says."""

    here: int
    fault: str = ""
    seconds: float = 0.02

    def square(self, job: int) -> tuple[int, int]:
        """(the square, the process that computed it)."""
        time.sleep(self.seconds)
        if os.getpid() != self.here:
            if self.fault == "ends":
                os._exit(1)
            if self.fault == "hangs":
                time.sleep(600)
            if self.fault == "raises":
                raise ValueError("not here")
            if self.fault == "returns what cannot be sent":
                return lambda: None  # type: ignore[return-value]
        if job == 5 and self.fault == "raises everywhere":
            raise ValueError("five")
        return job**2, os.getpid()
