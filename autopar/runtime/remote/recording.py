"""Measured times of steps on workers: what each worker notes, and how the driver puts it together.

Workers note times by their own clocks. The driver asks each for its clock a few times; the answer
with the shortest round trip gives the offset of the clocks, up to half of that trip. It asks before
the first step and after the last one, and counts the difference of the two as uncertainty too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np

from autopar.errors import AutoparError
from autopar.runtime.recording import (
    ClockOffset,
    MeshLog,
    RecordedStep,
    Recorder,
    RemoteStep,
    StepCollector,
    Waiters,
    clock,
)
from autopar.runtime.remote.mesh import RemoteMesh
from autopar.runtime.remote.session import RemoteSession
from autopar.runtime.timestamps import InstructionMark, StepDescription

NUM_PINGS = 5
_PING_LIMIT_S = 60.0  # earlier steps may take long
_WORKER_MAX_EVENTS = 1_000_000

# -- in the worker


@dataclass(frozen=True)
class WorkerMarks:
    """What a worker recorded. `steps`: the first tag of a step -> the marks of its mesh's list."""

    steps: dict[int, list[InstructionMark]]
    num_dropped: int
    num_missed: int
    is_complete: bool


def marks_to_arrays(marks: WorkerMarks) -> list[np.ndarray]:
    """For a way on which only arrays go."""
    rows = [(tag, mark) for tag, in_step in marks.steps.items() for mark in in_step]
    ends_s = [mark.ended_s for _, mark in rows]
    return [
        np.array([marks.num_dropped, marks.num_missed, marks.is_complete], np.int64),
        np.array(list(marks.steps), np.int64),
        np.array([(tag, mark.place) for tag, mark in rows], np.int64).reshape(-1, 2),
        np.array([mark.began_s for _, mark in rows], np.float64),
        np.array([np.nan if end_s is None else end_s for end_s in ends_s], np.float64),
    ]


def marks_from_arrays(arrays: Sequence[np.ndarray]) -> WorkerMarks:
    (num_dropped, num_missed, is_complete), tags, rows, began_s, ended_s = (
        array.tolist() for array in arrays
    )
    steps: dict[int, list[InstructionMark]] = {tag: [] for tag in tags}
    for (tag, place), start_s, end_s in zip(rows, began_s, ended_s, strict=True):
        steps[tag].append(InstructionMark(place, start_s, None if isnan(end_s) else end_s))
    return WorkerMarks(steps, num_dropped, num_missed, bool(is_complete))


class WorkerRecord:
    """Records the steps of a worker. Drops the oldest if there are too many."""

    def __init__(self, max_events: int) -> None:
        self._waiters = Waiters()
        self._steps: deque[tuple[int, MeshLog]] = deque()
        self._max_events = max_events
        self._num_events = 0
        self._num_dropped = 0

    def begin(self, first_tag: int) -> MeshLog:
        self._num_events += len(self._steps[-1][1]) if self._steps else 0
        while self._num_events > self._max_events and self._steps:
            self._num_events -= len(self._steps.popleft()[1])
            self._num_dropped += 1
        log = MeshLog(self._waiters)
        self._steps.append((first_tag, log))
        return log

    def finished(self, limit_s: float) -> WorkerMarks:
        is_complete = self._waiters.finish(limit_s)
        self._waiters.close()
        steps = {tag: log.marks() for tag, log in self._steps}
        return WorkerMarks(steps, self._num_dropped, self._waiters.num_missed, is_complete)


# -- in the driver


def offset_of(pings: Sequence[tuple[float, float, float]]) -> ClockOffset:
    """From pings (asked, the worker's clock, answered). The quickest answer is the most precise."""
    asked, other, answered = min(pings, key=lambda ping: ping[2] - ping[0])
    return ClockOffset(other - (asked + answered) / 2, (answered - asked) / 2)


def combined(before: ClockOffset, after: ClockOffset) -> ClockOffset:
    """The better of two offsets, at least as uncertain as they differ."""
    best = min(before, after, key=lambda one: one.uncertainty_s)
    drift_s = abs(before.offset_s - after.offset_s)
    return ClockOffset(best.offset_s, max(best.uncertainty_s, drift_s))


class Collector(StepCollector):
    """Records the steps of one cluster: starts the workers' records and fetches their marks."""

    def __init__(self, recorder: Recorder, session: RemoteSession) -> None:
        self.offsets: dict[int, ClockOffset] = {}  # by worker
        self.num_missed = 0
        self._recorder = recorder
        self._session = session
        self._meshes: dict[int, RemoteMesh] = {}
        self._seen: set[int] = set()
        self._notes = session.recording_notes()
        self._is_open = True
        session.before_close = self._before_close

    def step(
        self, described: StepDescription, meshes: Sequence[RemoteMesh], first_tag: int
    ) -> None:
        """Called before a step is sent to these meshes."""
        for mesh in meshes:
            if id(mesh) not in self._seen:
                self._seen.add(id(mesh))
                try:
                    self._begin(mesh)
                except TimeoutError as error:
                    self._notes.append(f"a mesh was not recorded: {error}")
        self._recorder.begin(described, remote=RemoteStep(self, tuple(meshes), first_tag))

    def _begin(self, mesh: RemoteMesh) -> None:
        for worker, place in enumerate(mesh.places):
            self.offsets[place.worker] = _pinged(mesh, worker)
        mesh.submit("record", _WORKER_MAX_EVENTS)
        if self._recorder.profile_dir is not None:
            folders = [
                (f"{self._recorder.profile_dir}/worker_{place.worker:05d}",)
                for place in mesh.places
            ]
            for reply in mesh.group.submit("start_profile", folders):
                reply.result(_PING_LIMIT_S)
        self._meshes[id(mesh)] = mesh

    def _before_close(self) -> None:
        self.collect(_PING_LIMIT_S)

    def collect(self, limit_s: float) -> list[str]:
        """Fetch the marks of workers, shifted to the driver's clock; says what is missing."""
        notes = self._notes
        if not self._is_open:
            return notes
        self._is_open = False
        self._session.before_close = None
        marks: dict[int, list[WorkerMarks]] = {}
        try:
            for key, mesh in self._meshes.items():
                replies = mesh.submit("recorded", limit_s)
                marks[key] = [reply.result(limit_s + _PING_LIMIT_S) for reply in replies]
                for worker, place in enumerate(mesh.places):
                    now = _pinged(mesh, worker)
                    self.offsets[place.worker] = combined(self.offsets[place.worker], now)
                if self._recorder.profile_dir is not None:
                    for reply in mesh.submit("stop_profile"):
                        reply.result(limit_s + _PING_LIMIT_S)
        except (AutoparError, TimeoutError) as error:
            notes.append(f"some marks of workers are lost: {error}")
        for key, worker_marks in marks.items():
            for worker, recorded in zip(self._meshes[key].places, worker_marks, strict=True):
                self.num_missed += recorded.num_missed
                if recorded.num_dropped:
                    notes.append(f"worker {worker.worker} dropped {recorded.num_dropped} steps")
                if not recorded.is_complete:
                    notes.append(f"worker {worker.worker} had results that were not ready in time")
        for step in self._recorder.steps:
            if step.remote is not None and step.remote.collector is self:
                self._fill(step, marks)
        return notes

    def _fill(self, step: RecordedStep, marks: dict[int, list[WorkerMarks]]) -> None:
        assert step.remote is not None
        _, meshes, first_tag = step.remote
        for number, mesh in enumerate(meshes):
            shifted = [
                [
                    _shifted(mark, self.offsets[place.worker].offset_s)
                    for mark in recorded.steps[first_tag]
                ]
                for place, recorded in zip(mesh.places, marks.get(id(mesh), ()), strict=False)
                if first_tag in recorded.steps
            ]
            if shifted:
                step.marks[number] = _joined_marks(shifted)


def collector_of(recorder: Recorder, session: RemoteSession) -> Collector:
    """The recorder's collector for a cluster, created when first needed."""
    collector = recorder.collectors.get(id(session))
    if not isinstance(collector, Collector):
        collector = recorder.collectors[id(session)] = Collector(recorder, session)
    return collector


def _pinged(mesh: RemoteMesh, worker: int) -> ClockOffset:
    only: list[tuple[Any, ...] | None] = [None] * len(mesh.places)
    only[worker] = ()
    pings = []
    for _ in range(NUM_PINGS):
        asked_s = clock()
        (reply,) = mesh.group.submit("clock", only)
        other_s = reply.result(_PING_LIMIT_S)
        pings.append((asked_s, other_s, clock()))
    return offset_of(pings)


def _shifted(mark: InstructionMark, offset_s: float) -> InstructionMark:
    ended_s = None if mark.ended_s is None else mark.ended_s - offset_s
    return InstructionMark(mark.place, mark.began_s - offset_s, ended_s)


def _joined_marks(workers: Sequence[Sequence[InstructionMark]]) -> list[InstructionMark]:
    """Joins the marks of a mesh's processes: from the first begin to the last end."""
    joined: dict[int, InstructionMark] = {}
    for marks in workers:
        for mark in marks:
            known = joined.setdefault(mark.place, mark)
            ends_s = [one.ended_s for one in (known, mark) if one.ended_s is not None]
            began_s = min(known.began_s, mark.began_s)
            joined[mark.place] = InstructionMark(mark.place, began_s, max(ends_s, default=None))
    return [joined[place] for place in sorted(joined)]
