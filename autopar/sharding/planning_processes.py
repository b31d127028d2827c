"""Processes that share the jobs of a search: an object, a method and jobs → a result per job.

Planning is Python on small arrays, so threads would wait for each other. A planning process is a
fresh interpreter that imports autopar and nothing of the user's: it is not forked, since JAX has
threads, and uses no device. It is sent the object once, as a pickle through a private socket, then
job after job, and answers with plain results. This process does jobs too, and whoever is free takes
the next one, so results may come in any order: who uses them must not depend on it.

Nothing depends on a planning process either. What it cannot do, by an error, its end or silence, is
done here. It ends when its socket is closed, however its owner ends; an interrupt from the terminal
does not reach it.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any, Generic, TypeVar

from autopar.errors import ArgumentError
from autopar.progress import LOGGER, debugs

VARIABLE = "AUTOPAR_PLANNING_PROCESSES"
_MOST = 4  # processes that are chosen, this one included
_WORTH_S = 4.0  # of work for which a process is started: it takes about two to import JAX
_PATIENCE_S = 30.0  # to wait for a job at least, where there is no hurry
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_LENGTH = struct.Struct("!Q")
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from autopar.sharding.planning_processes import serve
serve(int(sys.argv[1]), sys.argv[3])
"""

Job = TypeVar("Job")


def num_processes() -> int:
    """How many processes may plan, this one included. It is one unless the user asks for more:
    where time is short, who is faster tries other plans, and not always better ones."""
    given = os.environ.get(VARIABLE, "") or "1"
    if given == "auto":
        return min(_MOST, _num_cores())
    if not given.isascii() or not given.isdigit() or int(given) < 1:
        raise ArgumentError(f"{VARIABLE}={given!r}: needs a number of processes ≥ 1, or 'auto'.")
    return int(given)


def _num_cores() -> int:
    """The cores that this process may use: those it is bound to, or what its container has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, _container_cores()))


def _container_cores() -> int:
    """The processor time that a container may use, in whole cores."""
    try:
        quota, period = _CPU_LIMIT.read_text().split()
        return _MOST if quota == "max" else int(quota) // int(period)
    except (OSError, ValueError):
        return _MOST


class ProcessLostError(Exception):
    """A planning process ended, or did not answer in time. Internal."""


# -- this side


class PlanningProcess:
    """A process beside this one, with a module of ours that it imports first. Its methods but `end`
    are for one thread at a time."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._subject: object = None
        self.is_ready = False
        paths = json.dumps([path for path in sys.path if isinstance(path, str)])
        try:
            self._process = subprocess.Popen(
                [os.fsdecode(get_executable()), "-c", _BOOT, f"{theirs.fileno()}", paths, module],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for its owner
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready_within(self, limit_s: float) -> bool:
        """Whether it has imported what it needs; waits for so long."""
        if not self.is_ready:
            self._socket.settimeout(limit_s)
            try:
                self.is_ready = bool(self._socket.recv(1))
            except TimeoutError:
                return False
            except OSError as error:
                raise ProcessLostError(str(error)) from error
            if not self.is_ready:
                raise ProcessLostError("it ended while it started")
        return True

    def call(self, subject: Subject, method: str, job: Any) -> tuple[bool, Any, float]:
        """(whether the method returned, what it returned or raised, the seconds it took)."""
        try:
            asked = pickle.dumps((method, job), pickle.HIGHEST_PROTOCOL)
            sent = None if self._subject is subject else subject.pickled
        except Exception as error:  # a pickle raises anything
            raise ProcessLostError(f"a job cannot be sent: {error}") from error
        try:
            self._socket.settimeout(None)
            if sent is not None:
                _send(self._socket, sent)
                self._subject = subject
            _send(self._socket, asked)
            answer = _receive(self._socket)
        except OSError as error:
            raise ProcessLostError(str(error)) from error
        if answer is None:
            raise ProcessLostError("it ended")
        return pickle.loads(answer)

    def end(self) -> None:
        """Ends it at once; who waits for it gets `ProcessLostError`."""
        self._process.kill()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._socket.close()


class Subject:
    """The object whose method does the jobs, pickled once for all processes."""

    def __init__(self, thing: object) -> None:
        self.thing = thing
        self._lock = threading.Lock()
        self._pickled: bytes | None = None

    @property
    def pickled(self) -> bytes:
        with self._lock:
            if self._pickled is None:
                self._pickled = pickle.dumps(self.thing, pickle.HIGHEST_PROTOCOL)
            return self._pickled


class PlanningProcesses:
    """The processes of one plan, started when there is work for them. A context: it ends them."""

    def __init__(self) -> None:
        num_processes()  # a wrong number is an error of every plan, large or small
        self.running: list[PlanningProcess] = []
        self._subject: Subject | None = None

    def start(self, module: str, expected_s: float) -> None:
        """Start as many as so many seconds of work pay for, in the background. `module`: what the
        work needs, imported at once."""
        can_start = not getattr(sys, "frozen", False) and bool(get_executable())
        if not can_start or debugs("solver"):  # whose text would be lost
            return
        wanted = min(num_processes() - 1, int(expected_s / _WORTH_S))
        while len(self.running) < wanted:
            try:
                self.running.append(PlanningProcess(module))
            except OSError as error:
                LOGGER.info("no further planning process: %s", error)
                return

    def subject(self, thing: object) -> Subject:
        """The last subject, if it is of this object."""
        if self._subject is None or self._subject.thing is not thing:
            self._subject = Subject(thing)
        return self._subject

    def drop(self, process: PlanningProcess) -> None:
        if process in self.running:
            self.running.remove(process)
            process.end()

    def __enter__(self) -> PlanningProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        while self.running:
            self.running.pop().end()


# -- jobs


@dataclass
class SharedJobs(Generic[Job]):
    """Jobs that this process and others do. Its functions are called by one thread at a time.

    jobs:         in the order in which they are begun.
    admits_again: whether a job that another process could not do is done here.
    done:         takes a job's result and the seconds that it took.
    failed:       takes a job and what this process raised.
    hurry:        whether time is up, so that a late answer is not worth much.
    """

    jobs: Iterator[Job]
    admits_again: Callable[[Job], bool]
    done: Callable[[Job, Any, float], None]
    failed: Callable[[Job, Exception], None]
    hurry: Callable[[], bool] = lambda: False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _away: dict[PlanningProcess, Job] = field(default_factory=dict)  # jobs at other processes
    _returned: list[Job] = field(default_factory=list)  # that others could not do
    _error: BaseException | None = None  # met by a thread
    _is_over: bool = False
    _longest_s: float = 0.0

    def run(self, processes: PlanningProcesses | None, thing: object, method: str) -> None:
        """Do all jobs by a method of a thing."""
        processes = processes or PlanningProcesses()
        subject = processes.subject(thing) if processes.running else Subject(thing)
        threads = [
            threading.Thread(
                target=self._pass_on, args=(processes, process, subject, method), daemon=True
            )
            for process in processes.running
        ]
        for thread in threads:
            thread.start()
        try:
            self._run_here(processes, getattr(thing, method))
        finally:
            self._is_over = True
            for process in list(self._away):  # after an error
                processes.drop(process)
            for thread in threads:
                thread.join(_PATIENCE_S)
        if self._error is not None:
            raise self._error

    def _run_here(self, processes: PlanningProcesses, do: Callable[[Job], Any]) -> None:
        while self._error is None:
            with self._changed:
                job = self._next()
            if job is not None:
                self._do(job, do)
            elif not self._waits_for_others(processes):
                return

    def _next(self) -> Job | None:
        while self._returned:
            job = self._returned.pop(0)
            if self.admits_again(job):
                return job
        return next(self.jobs, None)

    def _do(self, job: Job, do: Callable[[Job], Any]) -> None:
        started = time.monotonic()
        try:
            result = do(job)
        except Exception as error:
            with self._changed:
                self.failed(job, error)
        else:
            with self._changed:
                self._finish(job, result, time.monotonic() - started)

    def _finish(self, job: Job, result: Any, took_s: float) -> None:
        self._longest_s = max(self._longest_s, took_s)
        self.done(job, result, took_s)

    def _waits_for_others(self, processes: PlanningProcesses) -> bool:
        """Whether something is left to do here, once the others have ended or taken too long."""
        started = time.monotonic()
        with self._changed:
            while self._away and not self._returned and self._error is None:
                self._changed.wait(0.1)
                least_s, times = (1.0, 2) if self.hurry() else (_PATIENCE_S, 10)
                if time.monotonic() - started > max(least_s, times * self._longest_s):
                    break
            late = [] if self._returned else list(self._away)
        for process in late:
            LOGGER.info("planning process %d takes too long: it is ended", process.pid)
            processes.drop(process)  # its thread returns the job
        with self._changed:
            self._changed.wait_for(lambda: self._away.keys().isdisjoint(late), _PATIENCE_S)
        return bool(self._returned)

    def _pass_on(
        self, processes: PlanningProcesses, process: PlanningProcess, subject: Subject, method: str
    ) -> None:
        """A thread's work: hands job after job to a process."""
        try:
            while not process.is_ready_within(0.05):
                if self._is_over:
                    return
            while (job := self._send_away(process)) is not None:
                returned, result, took_s = process.call(subject, method, job)
                with self._changed:
                    del self._away[process]
                    if returned:
                        self._finish(job, result, took_s)
                    else:  # done once more here, where its error is of use
                        self._returned.append(job)
                    self._changed.notify_all()
        except ProcessLostError as error:
            LOGGER.info("planning process %d is done without: %s", process.pid, error)
            processes.drop(process)
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                if process in self._away:
                    self._returned.append(self._away.pop(process))
                self._changed.notify_all()

    def _send_away(self, process: PlanningProcess) -> Job | None:
        with self._changed:
            job = None if self._is_over else next(self.jobs, None)
            if job is not None:
                self._away[process] = job
            return job


# -- the other side


def serve(number: int, module: str) -> None:
    """A planning process: does the jobs that come by the socket of this number."""
    connection = socket.socket(fileno=number)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, frames), daemon=True).start()
    import_module(module)  # while its owner is still at other work
    connection.sendall(b"1")
    gc.disable()  # as in the passes of a plan
    subject: Any = None
    while True:
        received = pickle.loads(frames.get())
        if not isinstance(received, tuple):
            subject = received
            gc.collect()
            continue
        method, job = received
        started = time.monotonic()
        try:
            answer = True, getattr(subject, method)(job), time.monotonic() - started
            pickled = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            pickled = pickle.dumps((False, repr(error), time.monotonic() - started))
        _send(connection, pickled)


def _read(connection: socket.socket, frames: queue.SimpleQueue[bytes]) -> None:
    """Passes frames on, and ends the process with the connection, whatever it is doing."""
    with suppress(OSError):
        while (frame := _receive(connection)) is not None:
            frames.put(frame)
    os._exit(0)


def _send(connection: socket.socket, frame: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(frame)))
    connection.sendall(frame)


def _receive(connection: socket.socket) -> bytes | None:
    """A frame; None at the end of the connection."""
    head = _exactly(connection, _LENGTH.size)
    return None if head is None else _exactly(connection, _LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(min(1 << 20, count - len(received)))
        if not part:
            return None
        received += part
    return bytes(received)
