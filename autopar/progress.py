"""Shows what autopar is doing: log records, a line on the terminal, text on demand.

passes      `logging` under "autopar": DEBUG when a pass begins, INFO with its seconds
terminal    one line on stderr for work of more than a second, if stderr is a terminal;
            AUTOPAR_PROGRESS=0 turns it off
elsewhere   the same as an INFO record every ten seconds
on demand   AUTOPAR_DEBUG=plan,strategies,solver prints these to stderr

The line is our own, not `tqdm`'s: a thread redraws it while HiGHS blocks for a minute, and `tqdm`
redraws only when stepped. It would also be one more package on every GPU host.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

LOGGER = logging.getLogger("autopar")

DEBUG_WORDS = ("plan", "strategies", "solver")
_FIRST_S = 1.0  # shorter work is not shown
_EVERY_S = 0.2
_LOG_EVERY_S = 10.0  # where there is no terminal
_BAR = 20
_warned: set[str] = set()  # values of AUTOPAR_DEBUG whose unknown words were reported


# -- on demand


def debugs(word: str) -> bool:
    """Whether AUTOPAR_DEBUG asks for this."""
    given = os.environ.get("AUTOPAR_DEBUG", "")
    words = {part.strip() for part in given.split(",")} - {""}
    unknown = sorted(words - set(DEBUG_WORDS))
    if unknown and given not in _warned:
        _warned.add(given)
        LOGGER.warning(
            "AUTOPAR_DEBUG=%s: %s unknown. Choose from %s, separated by commas.",
            given,
            ", ".join(map(repr, unknown)) + (" is" if len(unknown) == 1 else " are"),
            ", ".join(DEBUG_WORDS),
        )
    return word in words


def tell(word: str, text: str) -> None:
    """Print text to stderr if AUTOPAR_DEBUG asks for it."""
    if text and debugs(word) and sys.stderr is not None:
        with _SCREEN.wiped():
            print(text, file=sys.stderr, flush=True)


# -- passes


@contextmanager
def logged(name: str) -> Iterator[None]:
    LOGGER.debug("%s begins", name)
    started = time.perf_counter()
    yield
    LOGGER.info("%s: %.3f s", name, time.perf_counter() - started)


# -- the line on a terminal


class Progress:
    """A context in which work is shown on the terminal. With a total, `step` counts its parts."""

    def __init__(self, what: str, total: int = 0) -> None:
        self.what, self.total, self.done = what, total, 0
        self.started = time.monotonic()

    def __enter__(self) -> Progress:
        self.started = time.monotonic()
        _SCREEN.enter(self)
        return self

    def step(self) -> None:
        self.done += 1

    def __exit__(self, *_: Any) -> None:
        _SCREEN.leave(self)

    def text(self) -> str:
        if self.total < 2:
            return self.what
        filled = _BAR * min(self.done, self.total) // self.total
        bar = "#" * filled + "." * (_BAR - filled)
        return f"{self.what} [{bar}] {self.done} of {self.total}"


class Best:
    """The best plan so far: predicted seconds of its step, its proven gap, and the time left."""

    def __init__(self, left_s: Callable[[], float]) -> None:
        self.left_s = left_s
        self.step_s, self.gap = inf, 0.0

    def take(self, step_s: float, gap: float) -> None:
        if step_s < self.step_s:
            self.step_s, self.gap = step_s, gap

    def text(self) -> str:
        parts = []
        if self.step_s < inf:
            parts.append(f"best step {self.step_s:.4g} s (gap {self.gap:.1%})")
        left = self.left_s()
        if left < inf:
            parts.append(f"{left:.0f} s left" if left > 0 else "time is up")
        return ", ".join(parts)


@contextmanager
def showing(best: Best) -> Iterator[None]:
    """Shows the best plan so far beside the work under way."""
    before, _SCREEN.best = _SCREEN.best, best
    try:
        yield
    finally:
        _SCREEN.best = before


class _Screen:
    """The line on the terminal, or the records elsewhere, and the thread that writes them while any
    work is under way."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._under_way: list[Progress] = []
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._is_drawn = False
        self.best: Best | None = None

    def enter(self, work: Progress) -> None:
        with self._lock:
            self._under_way.append(work)
            on_terminal = _on_terminal()
            if self._thread is None and (on_terminal or LOGGER.isEnabledFor(logging.INFO)):
                self._over = threading.Event()
                self._thread = threading.Thread(
                    target=self._draw_until if on_terminal else self._log_until,
                    args=(self._over,),
                    name="autopar-progress",
                    daemon=True,
                )
                self._thread.start()

    def leave(self, work: Progress) -> None:
        with self._lock:
            if work in self._under_way:
                self._under_way.remove(work)
            thread = None
            if not self._under_way:
                thread, self._thread = self._thread, None
                self._over.set()
                self._wipe()
        if thread is not None:
            thread.join()

    @contextmanager
    def wiped(self) -> Iterator[None]:
        """Removes the line while something else is printed."""
        with self._lock:
            self._wipe()
            yield

    def _draw_until(self, over: threading.Event) -> None:
        while not over.wait(_EVERY_S):
            with self._lock:
                if over.is_set() or not self._under_way:
                    continue
                now = time.monotonic()
                if now - self._under_way[0].started >= _FIRST_S:
                    self._draw(now)

    def _log_until(self, over: threading.Event) -> None:
        while not over.wait(_LOG_EVERY_S):
            with self._lock:
                line = self._line(time.monotonic()) if self._under_way else None
            if line is not None and not over.is_set():
                LOGGER.info("%s", line)

    def _line(self, now: float) -> str:
        first = self._under_way[0]
        shown = [first] if len(self._under_way) == 1 else [first, self._under_way[-1]]
        parts = [": ".join(work.text() for work in shown)]
        if self.best is not None:
            parts.append(self.best.text())
        parts.append(f"{now - first.started:.0f} s")
        return ", ".join(part for part in parts if part)

    def _draw(self, now: float) -> None:
        line = f"autopar: {self._line(now)}"
        self._is_drawn = _write("\r\x1b[K" + line[: _columns() - 1]) or self._is_drawn

    def _wipe(self) -> None:
        if self._is_drawn:
            _write("\r\x1b[K")
            self._is_drawn = False


def _on_terminal() -> bool:
    if os.environ.get("AUTOPAR_PROGRESS") == "0":
        return False
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except (AttributeError, ValueError):  # replaced, or closed
        return False


def _write(text: str) -> bool:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return 80


_SCREEN = _Screen()
