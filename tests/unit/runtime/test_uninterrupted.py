"""Ctrl-C does not cut work in two, and is not lost."""

from __future__ import annotations

import signal
import threading

import pytest

from autopar.runtime.uninterrupted import uninterrupted


@pytest.mark.parametrize("depth", [1, 3])
def test_an_interrupt_comes_at_the_end(depth: int) -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)

    def nested(left: int) -> None:
        with uninterrupted():
            if left > 1:
                nested(left - 1)
            else:
                signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        nested(depth)
    assert done == ["all of it"] * depth
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_does_not_wait() -> None:
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(1)
        signal.raise_signal(signal.SIGINT)
        done.append(2)
    assert done == [1]


def test_errors_pass_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="of its own"), uninterrupted():
        raise ValueError("of its own")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_are_left_alone() -> None:
    handlers = []

    def look() -> None:
        with uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
