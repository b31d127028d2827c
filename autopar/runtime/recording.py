"""Measured times: what ran when, on every mesh, while steps run under `autopar.trace`.

A dispatched program runs later. So the time at which an instruction is given to JAX is noted, and a
thread waits for its results and notes when they are ready; the step itself waits for nothing. If a
later program uses these results up, the thread must be waiting before that program is dispatched;
if it comes too late, the end is unknown and counted as missed (`num_missed`). `runtime.timestamps`
makes a `Timeline` of these two times per instruction.

Workers keep the same marks by their own clocks; `runtime.remote.recording` collects them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax

from autopar.ir.pipeline import Free, MeshProgram, Run
from autopar.runtime.remote.mesh import RemoteMesh
from autopar.runtime.timestamps import InstructionMark, StepDescription

clock = time.perf_counter

NUM_WAITERS = 128
_BEGIN_LIMIT_S = 1.0  # for a thread to start waiting before its arrays are used up


class Waiters:
    """Threads that note when arrays are ready."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_WAITERS, thread_name_prefix="autopar-watch")
        self._waiting: deque[Future[None]] = deque()
        self.num_missed = 0

    def note(self, arrays: Sequence[Any], done: Callable[[float], None], may_vanish: bool) -> None:
        """Call `done` with the time at which the arrays are ready. `may_vanish`: a program that is
        dispatched later may use them up."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        gone = [array for array in arrays if array.is_deleted()]
        if gone:
            self.num_missed += 1
            return
        if all(array.is_ready() for array in arrays):
            done(clock())
            return
        begun = threading.Lock()
        begun.acquire()
        self._waiting.append(self._threads.submit(self._wait, arrays, done, begun))
        if may_vanish:
            begun.acquire(timeout=_BEGIN_LIMIT_S)

    def _wait(
        self, arrays: Sequence[jax.Array], done: Callable[[float], None], begun: threading.Lock
    ) -> None:
        if len(arrays) == 1:
            wait_for, release = arrays[0].block_until_ready, begun.release
        else:
            wait_for, release = partial(jax.block_until_ready, list(arrays)), begun.release
        try:
            release()  # from now on, a later program may use the arrays up
            wait_for()
        except RuntimeError:  # used up after all, or its program failed
            self.num_missed += 1
            return
        done(clock())

    def finish(self, limit_s: float) -> bool:
        """Whether all arrays were ready within the limit."""
        left = wait(list(self._waiting), limit_s).not_done
        self._waiting.clear()
        return not left

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class MeshLog:
    """Collects the marks of one mesh in one step."""

    def __init__(self, waiters: Waiters) -> None:
        self._waiters = waiters
        self._began: dict[int, float] = {}
        self._ended: dict[int, float] = {}

    def began(self, place: int, at_s: float) -> None:
        self._began[place] = at_s

    def ends_with(self, place: int, arrays: Sequence[jax.Array], may_vanish: bool) -> None:
        def done(at_s: float) -> None:
            self._ended[place] = at_s

        self._waiters.note(arrays, done, may_vanish)

    def ended(self, place: int, at_s: float) -> None:
        self._ended[place] = at_s

    def __len__(self) -> int:
        return len(self._began)

    def marks(self) -> list[InstructionMark]:
        return [InstructionMark(p, self._began[p], self._ended.get(p)) for p in sorted(self._began)]


def may_be_used_up(
    program: MeshProgram, donated: Sequence[Sequence[int]] | Mapping[int, Sequence[int]]
) -> frozenset[int]:
    """Buffers of a mesh that a program may use up, in this step or in a later one. `donated`: per
    stage program, positions in its reads."""
    buffers = {buffer for _, buffer in program.outputs}
    for run in program.instructions:
        if isinstance(run, Run):
            buffers.update(run.reads[position] for position in donated[run.stage_program])
    return frozenset(buffers)


def one_to_watch(
    writes: Sequence[int], size_of: Callable[[int], float], used_up: frozenset[int]
) -> tuple[int, bool]:
    """Which buffer of a run to wait for, and whether it may vanish. All are ready at the same time,
    so choose one that stays, and a small one."""
    best = min(writes, key=lambda buffer: (buffer in used_up, size_of(buffer)))
    return best, best in used_up


# -- the recorder of a process that calls steps


class ClockOffset(NamedTuple):
    """A worker's clock minus the driver's, and by how much that may be wrong."""

    offset_s: float
    uncertainty_s: float


class StepCollector(Protocol):
    """Fetches the marks of the steps of one cluster; says what is missing. `offsets`: by worker."""

    num_missed: int
    offsets: dict[int, ClockOffset]

    def collect(self, limit_s: float) -> list[str]: ...


class RemoteStep(NamedTuple):
    """How workers know a step: by its meshes and its first tag."""

    collector: StepCollector
    meshes: tuple[RemoteMesh, ...]
    first_tag: int


@dataclass
class RecordedStep:
    """`marks`: by mesh, filled in at the end of the trace."""

    described: StepDescription
    called_s: float
    logs: dict[int, MeshLog] = field(default_factory=dict)
    marks: dict[int, list[InstructionMark]] = field(default_factory=dict)
    remote: RemoteStep | None = None
    num_events: int = 0


class Recorder:
    """The steps of this process while a trace is active. Drops the oldest if there are too many."""

    def __init__(self, max_events: int) -> None:
        self.waiters = Waiters()
        self.steps: deque[RecordedStep] = deque()
        self.num_dropped = 0
        self.num_missed = 0  # unknown ends, here and on workers
        self.collectors: dict[int, StepCollector] = {}  # by the id of a cluster's session
        self.profile_dir: str | None = None
        self._max_events = max_events
        self._num_events = 0
        self._lock = threading.Lock()

    def begin(self, described: StepDescription, remote: RemoteStep | None = None) -> RecordedStep:
        num_events = sum(
            not isinstance(i, Free)
            for program in described.programs.meshes
            for i in program.instructions
        )
        step = RecordedStep(described, clock(), remote=remote, num_events=num_events)
        if remote is None:
            for mesh in range(len(described.programs.meshes)):
                step.logs[mesh] = MeshLog(self.waiters)
        with self._lock:
            self.steps.append(step)
            self._num_events += num_events
            while self._num_events > self._max_events and len(self.steps) > 1:
                self._num_events -= self.steps.popleft().num_events
                self.num_dropped += 1
        return step

    def finish(self, limit_s: float) -> list[str]:
        """Wait for unfinished steps and fetch the marks of workers; says what is missing."""
        notes = []
        deadline = clock() + limit_s
        if not self.waiters.finish(limit_s):
            notes.append(f"some results were not ready {limit_s:g} s after the trace ended")
        for collector in self.collectors.values():
            notes += collector.collect(max(1.0, deadline - clock()))
            self.num_missed += collector.num_missed
        self.num_missed += self.waiters.num_missed
        self.waiters.close()
        for step in self.steps:
            step.marks |= {mesh: log.marks() for mesh, log in step.logs.items()}
        return notes


current: Recorder | None = None


def start(recorder: Recorder) -> None:
    global current
    current = recorder


def stop() -> None:
    global current
    current = None
