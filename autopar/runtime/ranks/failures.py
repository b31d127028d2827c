"""A step that fails in one of several processes: from its error to the end of all of them.

If a process cannot run its part of a step, because it is out of memory, say, the others wait for it
in the step's collectives, where no Python code runs. JAX alone would not notice while that process
lives, and at its exit waits 300 s for the others before it aborts all.

So the process stores what failed with JAX's coordination service, and a thread in every process
looks there once a second and prints it. The next call of a step raises `WorkerError`. A process
that stays inside a step is ended after `GRACE_S`, since it will never leave it. At its exit, a
process waits for the others to end or to come that far, at most `LAST_S`: if all come, JAX ends
them as ever; if not, this process ends without JAX. The one that failed waits `FIRST_S`, to be the
first, for launchers that tell of the first; process 0, which runs the service, is the last.

A failure is an error of the runtime that calling a step raises, or that the results of the last
step hold (accelerators run steps after Python has called them), or any error that ends the program.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from autopar import _jax
from autopar.errors import ClusterError, WorkerError

GRACE_S = 10.0
FIRST_S = 5.0
LAST_S = GRACE_S + 5.0
_LINGER_S = 2.0
_KEY = "autopar/failure"
_AT_EXIT, _ENDED = b"at exit", b"ended"  # how processes leave
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
_REMEDY = (
    "The step needs more memory than was free on this device. Free what else is there, or plan for "
    "less: ShardingOptions(memory_budget_bytes=…), more micro-batches, remat or devices."
)
_START_AGAIN = (
    "The others cannot go on without it. Start the job again, from the last checkpoint; it may "
    "have fewer or more processes."
)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and _OUT_OF_MEMORY in str(error)


def add_remedy(error: BaseException) -> None:
    """Adds to an error about memory what to do about it."""
    if _REMEDY not in getattr(error, "__notes__", ()):
        error.add_note(_REMEDY)


class FailureWatch:
    """Of this process and its steps. `failure`: what failed, here or elsewhere; "" if nothing."""

    def __init__(self) -> None:
        self.failure = ""
        self._me = jax.process_index()
        self._count = jax.process_count()
        self._has_failed = False
        self._is_inside = False
        self.is_waiting_elsewhere: Callable[[], bool] | None = None  # in a pipeline's step
        self._name = ""  # of the last step
        self._latest: Any = None  # a result of the last step, which is ready when the step is done
        self._checked: Any = None  # the last one that was found to be right
        self._poll_s = max(1.0, self._count / 256)  # the service has them all to answer
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="autopar-failures", daemon=True)
        self._thread.start()

    def run(self, name: str, step: Callable[[], list[Any]], sentinel: int) -> list[Any]:
        """Run a step that all processes run; `sentinel` is the position of a small result. Raises
        `WorkerError` if another process has failed."""
        if self.failure:
            raise WorkerError(self.failure)
        self._is_inside, self._name = True, name
        try:
            results = step()
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("INVALID_ARGUMENT"):  # an argument, not the runtime
                self.report(name, error)
                if self.failure:
                    raise WorkerError(self.failure) from error
            raise
        finally:
            self._is_inside = False
        self._latest = results[sentinel] if results else None
        return results

    def report(self, name: str, error: BaseException) -> None:
        """Tell the others, unless another process was first: then `failure` says what it said."""
        text = f"{type(error).__name__}: {error}"
        told = json.dumps({"process": self._me, "step": name, "error": text[:4000]})
        with contextlib.suppress(ClusterError):  # process 0 is gone: JAX is about to end this one
            if not _jax.store_set_new(_KEY, told.encode()):
                self._look()
        self._has_failed = True

    def tell_lost(self, process: int, what: str) -> None:
        """Another process is lost: tell the others. Process 0 runs the service that tells them, so
        its loss each must notice."""
        if process != 0:
            told = json.dumps({"process": process, "lost": what[:4000]})
            with contextlib.suppress(ClusterError):
                _jax.store_set_new(_KEY, told.encode())
                self._look()
        elif not self.failure:
            self._set_failure(f"{what} {_START_AGAIN}")

    def _set_failure(self, text: str) -> None:
        self.failure = text
        print(f"autopar: {text}", file=sys.stderr, flush=True)

    def _report_and_print(self, name: str, error: BaseException) -> None:
        self.report(name, error)
        if not self.failure and _OUT_OF_MEMORY in str(error):
            print(f"autopar: {name} failed here, in process {self._me}. {_REMEDY}", file=sys.stderr)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(2 * self._poll_s)

    def leave(self, uncaught: BaseException | None) -> None:
        """At the end of the program. After a failure, returns only if all have come this far: JAX
        lets them wait for each other."""
        self.stop()
        has_failed = bool(self.failure) or self._has_failed
        if uncaught is not None and not has_failed:
            self._report_and_print("the program", uncaught)
            has_failed = True
        if not has_failed:
            self._tell_leaving(_AT_EXIT)
        elif not self._all_leave(_AT_EXIT):
            self._tell_leaving(_ENDED)
            self._end()

    def _watch(self) -> None:
        failed_s: float | None = None
        while not self._stopped.wait(self._poll_s):
            try:
                self._check_latest()
                self._look()
            except ClusterError:
                return  # process 0 is gone, and JAX is about to end this one
            if failed_s is None and (self.failure or self._has_failed):
                failed_s = time.monotonic()
            is_over = failed_s is not None and time.monotonic() - failed_s > GRACE_S
            if is_over and self._is_waiting():
                print(f"autopar: process {self._me} is inside a step and ends.", file=sys.stderr)
                self._tell_leaving(_ENDED)
                if self._me == 0:  # which runs the service
                    self._all_leave(_ENDED)
                self._end()

    def _look(self) -> None:
        """Whether another process has failed."""
        if self.failure:
            return
        told = _jax.store_get_now(_KEY)
        if told is None:
            return
        found = json.loads(told)
        if found["process"] == self._me:
            return
        if "lost" in found:
            self._set_failure(f"{found['lost']} {_START_AGAIN}")
            return
        remedy = f" {_REMEDY}" if _OUT_OF_MEMORY in found["error"] else ""
        self._set_failure(
            f"{found['step']}: process {found['process']} failed, and the others cannot go on "
            f"without it. It raised {found['error']}{remedy}"
        )

    def _check_latest(self) -> None:
        """Reports an error that the results of a step hold."""
        latest = self._latest
        if latest is None or latest is self._checked or self.failure or self._has_failed:
            return
        try:
            if not latest.is_ready():
                return
            latest.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            if not latest.is_deleted():
                self._report_and_print(self._name, error)
        except RuntimeError:
            pass  # the next step has taken its buffer
        self._checked = latest

    def _is_waiting(self) -> bool:
        """Whether a step is running."""
        latest = self._latest
        if self.is_waiting_elsewhere is not None and self.is_waiting_elsewhere():
            return True
        try:
            return self._is_inside or (latest is not None and not latest.is_ready())
        except RuntimeError:
            return False  # deleted

    def _tell_leaving(self, how: bytes) -> None:
        with contextlib.suppress(ClusterError):
            _jax.store_put(f"{_KEY}/leaving/{self._me}", how)

    def _all_leave(self, how: bytes) -> bool:
        """Tells how this process ends, and waits for the others. Whether all are at their exit."""
        self._tell_leaving(how)
        is_first = self._has_failed and not self.failure and self._me != 0
        until_s = time.monotonic() + (FIRST_S if is_first else LAST_S)
        try:
            hows = [
                _jax.store_get(f"{_KEY}/leaving/{process}", until_s - time.monotonic())
                for process in range(self._count)
            ]
        except ClusterError:
            return False
        return all(other == _AT_EXIT for other in hows)

    def _end(self) -> NoReturn:
        if self._me == 0:
            time.sleep(_LINGER_S)  # JAX aborts processes that still ask the service for something
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


_watch: FailureWatch | None = None


def failure_watch() -> FailureWatch:
    """That of this process, which is started when it is first needed."""
    global _watch
    if _watch is None:
        _watch = FailureWatch()
    return _watch


@atexit.register  # as early as possible, to run late: right before that of JAX
def _leave() -> None:
    if _watch is not None:
        _watch.leave(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
