"""What is in memory for a while: `Holding`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Holding:
    """Bytes of a value, or of a copy of it, in memory from `start` to `end` inclusive."""

    value: int
    start: int
    end: int
    num_bytes: float
    is_copy: bool
