"""Requests to end training: Ctrl-C, and the signals by which schedulers announce the end.

A signal sets a flag, which the loop sees between two steps. Then the loop saves a checkpoint within
the grace time and leaves by `Preempted`, or `KeyboardInterrupt` after Ctrl-C. A second Ctrl-C, or
the end of the grace time, interrupts whatever the main thread does.

Where several processes run one program, a signal may reach only some of them, and their loops are
at different steps. A thread in each notices the request, stops its loop for a moment, and all
exchange how many steps they had done when they last looked. Each may have begun one more, so all
end after the largest number plus one.

    SIGTERM   Kubernetes, SLURM (before SIGKILL), cloud machines that are taken back
    SIGUSR1   under SLURM: sbatch --signal=USR1@120
    SIGINT    Ctrl-C
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import jax

from autopar import _jax
from autopar.errors import ArgumentError, ClusterError
from autopar.progress import LOGGER
from autopar.runtime.checkpoints.controllers import num_processes

_POLL_S = 0.5
_JOIN_S = 5.0
_LATE_S = 2.0  # after the grace time, for what ends by itself with it
_runs = itertools.count()


class Preempted(SystemExit):
    """Training was asked to end, and has. Unless it is caught, the process ends with the exit code
    of the signal, 128 + its number.

    step:          of the newest checkpoint, where the next start goes on; None if there is none.
    signal_number: the signal that asked for it.
    """

    def __init__(self, step: int | None, signal_number: int) -> None:
        super().__init__(128 + signal_number)
        self.step = step
        self.signal_number = signal_number

    def __str__(self) -> str:
        return _text(self.step, self.signal_number)


def _text(step: int | None, number: int) -> str:
    name = signal.Signals(number).name if number else "a request of another process"
    where = "no checkpoint was written" if step is None else f"the checkpoint of step {step} is"
    return f"training ended after {name}; {where}" + ("" if step is None else " complete")


class StopRequests:
    """Requests to end, while the context is open. Signals can be had in the main thread only;
    elsewhere, those of other processes count."""

    def __init__(self, grace_s: float) -> None:
        is_number = isinstance(grace_s, (int, float)) and not isinstance(grace_s, bool)
        if not is_number or not grace_s > 0:
            raise ArgumentError(
                f"run_training(grace_s={grace_s!r}): needs a number of seconds > 0."
            )
        self.grace_s = grace_s
        self._signal = 0
        self._asked = threading.Event()
        self._asked_s = 0.0
        self._is_over = False  # the grace time
        self._newest: int | None = None
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._together: _Together | None = None

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in _signals()}
        self.take_signals()
        if num_processes() > 1:
            self._together = _Together(self._asked, self.grace_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._together is not None:
            self._together.close()

    def take_signals(self) -> None:
        """Signals come here. Again after a cluster was started: Ray takes SIGTERM for itself."""
        for number in self._before:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_over or (self._asked.is_set() and number == signal.SIGINT):
            raise self.error(self._newest)
        if not self._asked.is_set():
            self._signal, self._asked_s = number, time.monotonic()
            self._asked.set()
            self._timer = threading.Timer(self.grace_s + _LATE_S, self._end)
            self._timer.daemon = True
            self._timer.start()

    def _end(self) -> None:
        """Interrupts the main thread, even in a wait."""
        self._is_over = True
        signal.pthread_kill(threading.main_thread().ident or 0, self._signal)

    def wanted_after(self, num_steps: int, newest: int | None) -> bool:
        """Whether training should end now, after so many steps. `newest`: the newest checkpoint."""
        self._newest = newest
        if self._together is None:
            return self._asked.is_set()
        return self._together.wanted_after(num_steps)

    @property
    def is_asked(self) -> bool:
        """Whether there was a request."""
        return self._asked.is_set()

    @property
    def left_s(self) -> float:
        """What is left of the grace time."""
        asked_s = self._asked_s or time.monotonic()
        return max(0.0, asked_s + self.grace_s - time.monotonic())

    def sleep(self, seconds: float) -> None:
        """Wait; raises if training should end."""
        if self._asked.wait(seconds):
            raise self.error(self._newest)

    def error(self, newest: int | None) -> BaseException:
        """What to leave training with."""
        LOGGER.warning("%s", _text(newest, self._signal).capitalize())
        if self._signal == signal.SIGINT:
            return KeyboardInterrupt(_text(newest, self._signal))
        return Preempted(newest, self._signal or signal.SIGTERM)


def _signals() -> list[int]:
    numbers: list[int] = [signal.SIGTERM, signal.SIGINT]
    if "SLURM_JOB_ID" in os.environ:
        numbers.append(signal.SIGUSR1)
    return [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]


class _Together:
    """The agreement of all processes on the step after which they end."""

    def __init__(self, asked: threading.Event, limit_s: float) -> None:
        self._name = f"autopar/stop/{next(_runs)}"
        self._asked, self._limit_s = asked, limit_s
        self._lock = threading.Lock()
        self._num_steps = 0
        self._last: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="autopar-stop", daemon=True)
        self._thread.start()

    def wanted_after(self, num_steps: int) -> bool:
        with self._lock:  # while processes agree, none begins a step
            self._num_steps = num_steps
            return self._last is not None and num_steps >= self._last

    def close(self) -> None:
        self._ended.set()
        self._thread.join(_JOIN_S)

    def _work(self) -> None:
        try:
            while not self._ended.is_set():
                if self._asked.wait(_POLL_S):
                    _jax.store_set_new(f"{self._name}/asked", b"")
                elif _jax.store_get_now(f"{self._name}/asked") is None:
                    continue
                with self._lock:
                    self._last = self._agree()
                self._asked.set()
                return
        except ClusterError as error:  # training itself will notice
            LOGGER.warning("A request to end cannot be exchanged: %s", error)

    def _agree(self) -> int:
        """The largest number of steps that a process may have begun."""
        me, count = jax.process_index(), jax.process_count()
        _jax.store_set(f"{self._name}/{me}", str(self._num_steps).encode())
        until_s = time.monotonic() + self._limit_s
        largest = self._num_steps
        for process in range(count):
            left_s = max(0.1, until_s - time.monotonic())
            said = _jax.store_get(f"{self._name}/{process}", left_s)
            if said is None:
                LOGGER.warning("Process %d did not say where it is within the grace time.", process)
                continue
            largest = max(largest, int(said))
        return largest + 1
