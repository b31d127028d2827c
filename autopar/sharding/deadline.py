"""The seconds that a plan may take: one `Deadline` that all of its searches share.

A search asks before each candidate whether it may go on (`allows`), and how long a solve may take
(`seconds`). Both know what is left of the whole. What a search leaves out it names (`cut`), and the
plan says so. Three rules keep the shares fair:

- before there is a plan, a search goes on with short solves, past the deadline if it must; but
  then it tries only what needs the least memory;
- a search gets a share of what is left, not all of it, as long as others are still to come, and a
  candidate that would take longer than that, by what the last one took, is not begun;
- what must come after a second search, like solving the stages that it finds, has its seconds set
  aside first (`before`), by what such work, or reading the program, took in this plan.

Without a limit, or with time to spare, no answer depends on a clock.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

_LEAST_S = 2.0  # that a solve may take, however late it is


class Deadline:
    """Counts from its creation on. `whole`: the deadline of which it is a part."""

    def __init__(self, limit_s: float | None = None, whole: Deadline | None = None) -> None:
        self.started = time.monotonic()
        self.limit_s = inf if limit_s is None else limit_s
        self.whole = whole
        self.interrupted_s: float | None = None
        self.left_out: dict[str, None] = {}  # in the order in which they were left out

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        if self.interrupted_s is not None:
            return 0.0
        left = max(0.0, self.limit_s - self.elapsed_s)
        return left if self.whole is None else min(left, self.whole.left_s)

    def part(self, share: float) -> Deadline:
        """A share of what is left, for one search."""
        return Deadline(share * self.left_s, self)

    def before(self, reserved_s: float) -> Deadline:
        """What is left but for so many seconds, which work that must come later will take."""
        return Deadline(max(0.0, self.left_s - reserved_s), self)

    def allows(self, expected_s: float = 0.0, share: float = 1.0) -> bool:
        """Whether work of about so many seconds may begin that has a share of what is left."""
        left = self.left_s
        return left > 0 and expected_s <= share * left

    @property
    def is_over(self) -> bool:
        """Whether no time is left: what has no plan yet has one more try, that which needs the
        least memory."""
        return self.left_s <= 0

    @property
    def is_short(self) -> bool:
        """Whether less time is left than was spent: then not every candidate can be tried, and what
        promises most comes first."""
        return not self.allows(self.elapsed_s)

    def seconds(self, wanted_s: float, share: float = 0.5, least_s: float = _LEAST_S) -> float:
        """How long a solve may take that wants so many seconds."""
        return min(wanted_s, max(share * self.left_s, least_s))

    def cut(self, what: str) -> None:
        """Note what is left out for want of time."""
        if self.whole is not None:
            self.whole.cut(what)
        self.left_out[what] = None

    def interrupt(self) -> None:
        """Time is up now."""
        if self.interrupted_s is None:
            self.interrupted_s = self.elapsed_s

    def text(self) -> str | None:
        """What was left out, and why; None if nothing was."""
        if not self.left_out:
            return None
        if self.interrupted_s is not None:
            why = f"stopped by an interrupt after {self.interrupted_s:.0f} s"
        else:
            why = f"stopped by planning_time_s={self.limit_s:g} after {self.elapsed_s:.0f} s"
        return f"{why}: {'; '.join(self.left_out)}"


@contextmanager
def interrupts_end(deadline: Deadline) -> Iterator[None]:
    """Lets the first Ctrl-C end the deadline instead of the process; the second raises
    `KeyboardInterrupt` as usual. Signals reach the main thread alone: elsewhere it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def end(number: int, frame: Any) -> None:
        deadline.interrupt()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
