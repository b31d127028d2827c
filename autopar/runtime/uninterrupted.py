"""Work that Ctrl-C must not cut in two, such as sending a step to several meshes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_is_inside = False  # the main thread, in a block


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Handlers of SIGINT and SIGTERM, which may raise, run at the end of the block. A second signal
    does not wait: then the block is cut, and must leave nothing that others rely on. Only the main
    thread runs handlers, so others need no protection. A block inside another ends with it."""
    global _is_inside
    if _is_inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers: dict[int, Any] = {n: signal.getsignal(n) for n in _SIGNALS}
    handlers = {n: handler for n, handler in handlers.items() if callable(handler)}
    caught: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        if len(caught) > 1:
            handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, note)
    _is_inside = True
    try:
        yield
    finally:
        _is_inside = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in caught[:1]:
            handlers[number](number, frame)
