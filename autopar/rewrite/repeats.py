"""Repeated stretches of a sequence: from keys and a period to the longest stretch with it."""

from __future__ import annotations

import numpy as np


def longest_repeat(
    keys: np.ndarray, period: int, free: np.ndarray | None = None
) -> tuple[int, int]:
    """(start, length) of the longest stretch in which keys repeat with a period, the first of equal
    ones; (0, 0) if nothing repeats. `free`: positions that the stretch may use."""
    same = keys[:-period] == keys[period:]
    if free is not None:
        same &= free[:-period] & free[period:]
    steps = np.flatnonzero(np.diff(np.concatenate(([0], same.astype(np.int8), [0]))))
    starts, ends = steps[::2], steps[1::2]
    if not len(starts):
        return 0, 0
    longest = int(np.argmax(ends - starts))
    return int(starts[longest]), int(ends[longest] - starts[longest]) + period
