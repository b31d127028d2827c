"""`autopar.trace`: what ran when, measured, beside what was predicted, as a file for Perfetto."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from autopar.errors import ArgumentError, TraceFileError
from autopar.inspect.perfetto import ShownStep, TraceContent, read_timelines, trace_json
from autopar.ir.files import temporary_path, write_whole
from autopar.ir.plan import ParallelPlan
from autopar.ir.timeline import Timeline
from autopar.runtime import recording
from autopar.runtime.timestamps import measured_timeline
from autopar.stages.simulate import predicted_timeline

MAX_EVENTS = 1_000_000
_FINISH_LIMIT_S = 60.0


class Trace:
    """A context manager that records; afterwards it has the timelines of all steps that ran in it.
    `notes`: what is missing from them."""

    def __init__(self, path: str | Path, profile_dir: str | Path | None, max_events: int) -> None:
        self.path = Path(path)
        self.timelines: list[Timeline] = []
        self.notes: list[str] = []
        self._profile_dir = None if profile_dir is None else Path(profile_dir).absolute()
        self._max_events = max_events
        self._recorder: recording.Recorder | None = None
        self._began_s = 0.0

    def __enter__(self) -> Trace:
        if recording.current is not None:
            raise ArgumentError(
                f"trace({str(self.path)!r}): another trace is active. Leave that one first."
            )
        _check_target(self.path)
        recorder = recording.Recorder(self._max_events)
        if self._profile_dir is not None:
            recorder.profile_dir = str(self._profile_dir)
            _start_profile(self._profile_dir)
        self._recorder = recorder
        self._began_s = recording.clock()
        recording.start(recorder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        assert recorder is not None
        recording.stop()
        self.notes += recorder.finish(_FINISH_LIMIT_S)
        if self._profile_dir is not None:
            jax.profiler.stop_trace()
        content = self._content(recorder)
        self.timelines = [step.timeline for step in content.steps]
        if not self.timelines:
            self.notes.append("no step ran in this trace")
        for note in self.notes:
            warnings.warn(f"trace({str(self.path)!r}): {note}.", stacklevel=2)
        try:
            write_whole(self.path, trace_json(content))
        except OSError as problem:
            raise TraceFileError(
                f"trace({str(self.path)!r}): cannot write the file ({problem}). The timelines are "
                "in the Trace object."
            ) from problem

    def _content(self, recorder: recording.Recorder) -> TraceContent:
        steps: list[ShownStep] = []
        drawn: set[int] = set()
        free_s: dict[tuple[bool, int], float] = {}  # when each device finished its last step
        for step in recorder.steps:
            if not any(step.marks.values()):
                continue
            plan = step.described.plan
            devices = [
                [(step.remote is None, device) for device in mesh_devices]
                for mesh_devices in _mesh_devices(plan)
            ]
            before_s = {
                mesh: max(free_s[device] for device in mesh_devices if device in free_s)
                for mesh, mesh_devices in enumerate(devices)
                if not free_s.keys().isdisjoint(mesh_devices)
            }
            line, first_s = measured_timeline(step.described, step.marks, before_s)
            for event in line.events:
                if event.kind == "run":
                    free_s.update(dict.fromkeys(devices[event.mesh], first_s + event.end_s))
            predicted = None
            if id(plan) not in drawn:
                drawn.add(id(plan))
                predicted = predicted_timeline(plan)
            steps.append(ShownStep(plan.name, first_s - self._began_s, line, predicted))
        if recorder.num_dropped:
            self.notes.append(
                f"the first {recorder.num_dropped} steps were dropped, to stay within "
                f"{self._max_events} events"
            )
        clocks = {
            f"worker {worker}": {"offset_s": one.offset_s, "uncertainty_s": one.uncertainty_s}
            for collector in recorder.collectors.values()
            for worker, one in sorted(collector.offsets.items())
        }
        about: dict[str, Any] = {
            "clocks": clocks,
            "clock_uncertainty_s": max((c["uncertainty_s"] for c in clocks.values()), default=0.0),
            "dropped_steps": recorder.num_dropped,
            "missed_ends": recorder.num_missed,
            "notes": list(self.notes),
            "jax": jax.__version__,
        }
        return TraceContent(tuple(steps), about)


def _mesh_devices(plan: ParallelPlan) -> list[set[int]]:
    """The indices of each mesh's devices."""
    if not plan.is_pipeline:
        return [set(range(plan.num_devices))]
    devices: list[set[int]] = [set() for _ in range(1 + max(stage.mesh for stage in plan.stages))]
    for stage in plan.stages:
        devices[stage.mesh].update(stage.devices)
    return devices


def trace(
    path: str | Path, *, profile_dir: str | Path | None = None, max_events: int = MAX_EVENTS
) -> Trace:
    """Record every step that runs in a `with` block, on this process's devices or on a cluster:

        with autopar.trace("trace.json") as recorded:
            for batch in batches:
                state, loss = step(state, batch)
        plan.report("plan.html", measured=recorded.timelines[-1])

    path:        the file to write when the block ends, for ui.perfetto.dev.
    profile_dir: a folder for `jax.profiler` captures of this process and of every worker (on its
                 host), each in a folder of its own.
    max_events:  to keep; beyond that, the oldest steps are dropped.

    Returns a `Trace`. Raises `TraceFileError` on entry if the file cannot be written, and
    `ArgumentError` if another trace is active.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"trace({path!r}): needs the path of a file to write.")
    if profile_dir is not None and not isinstance(profile_dir, (str, os.PathLike)):
        raise ArgumentError(f"trace(profile_dir={profile_dir!r}): needs the path of a folder.")
    if not isinstance(max_events, int) or isinstance(max_events, bool) or max_events < 1:
        raise ArgumentError(f"trace(max_events={max_events!r}): needs a whole number ≥ 1.")
    return Trace(path, profile_dir, max_events)


def read_trace(path: str | Path) -> list[Timeline]:
    """The measured timelines of a file that `trace` wrote, one per step. Raises `TraceFileError`
    if `path` cannot be read or is another kind of file."""
    try:
        text = Path(path).read_text()
    except (OSError, TypeError, UnicodeDecodeError) as error:
        raise TraceFileError(f"read_trace({str(path)!r}): cannot read it: {error}") from error
    return read_timelines(text, f"read_trace({str(path)!r})")


def _check_target(path: Path) -> None:
    """Raise now rather than after an hour of training."""
    where = f"trace({str(path)!r})"
    if path.is_dir():
        raise TraceFileError(
            f"{where}: this is a folder; give the path of a file, such as trace.json."
        )
    if not path.parent.is_dir():
        raise TraceFileError(f"{where}: the folder {path.parent} does not exist; create it first.")
    probe = temporary_path(path)
    try:
        probe.write_text("")
    except OSError as error:
        raise TraceFileError(
            f"{where}: cannot write the file ({error.strerror or error}). Choose a writable folder."
        ) from error
    finally:
        probe.unlink(missing_ok=True)


def _start_profile(folder: Path) -> None:
    driver_folder = folder / "driver"
    try:
        driver_folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(str(driver_folder))
    except (OSError, RuntimeError) as error:
        raise TraceFileError(
            f"trace(profile_dir={str(folder)!r}): cannot start a capture ({error}). Choose a "
            "writable folder, and stop other captures."
        ) from error
