"""Timelines as a trace file for Perfetto: from `Timeline`s to JSON, and from JSON back.

Perfetto (ui.perfetto.dev) and chrome://tracing open the file.

There are two processes, "measured" and "predicted". In each, every mesh has a thread for its runs,
and as many threads for sends and receives as overlap, with an arrow from each send to its receive.
Counters are bytes on one device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import TraceFileError
from autopar.ir.timeline import Event, Timeline

FORMAT = "autopar-trace"
FORMAT_VERSION = 1
MEASURED, PREDICTED = 1, 2
_PROCESSES = {MEASURED: "measured", PREDICTED: "predicted"}
_KINDS = ("run", "send", "recv")
_THREADS_PER_MESH = 100


@dataclass(frozen=True)
class ShownStep:
    """One step, `begin_s` after the start of the trace; `predicted`: drawn next to it."""

    name: str
    begin_s: float
    timeline: Timeline
    predicted: Timeline | None = None


@dataclass(frozen=True)
class TraceContent:
    """`about`: metadata, such as clocks and dropped steps."""

    steps: tuple[ShownStep, ...]
    about: dict[str, Any] = field(default_factory=dict)


def trace_json(content: TraceContent) -> str:
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, int], str] = {}
    flows = 0
    for number, step in enumerate(content.steps):
        for process, line in ((MEASURED, step.timeline), (PREDICTED, step.predicted)):
            if line is not None:
                writer = _StepWriter(process, number, step.begin_s, flows, threads)
                events += writer.events(line)
                flows = writer.flows
    about = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "steps": [
            {
                "name": step.name,
                "begin_s": step.begin_s,
                "step_s": step.timeline.step_s,
                "num_meshes": step.timeline.num_meshes,
                "predicted_step_s": step.predicted.step_s if step.predicted else None,
            }
            for step in content.steps
        ],
        **content.about,
    }
    document = {
        "traceEvents": [*_names(threads), *events],
        "displayTimeUnit": "ms",
        "otherData": about,
    }
    return json.dumps(document, separators=(",", ":"))


def _names(threads: dict[tuple[int, int], str]) -> Iterable[dict[str, Any]]:
    for process in sorted({process for process, _ in threads}):
        name = {"name": _PROCESSES[process]}
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": name}
    for (process, thread), name in sorted(threads.items()):
        where = {"pid": process, "tid": thread}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread}}


class _StepWriter:
    def __init__(
        self,
        process: int,
        number: int,
        begin_s: float,
        flows: int,
        threads: dict[tuple[int, int], str],
    ) -> None:
        self.process, self.number, self.begin_s = process, number, begin_s
        self.flows, self.threads = flows, threads
        self.category = _PROCESSES[process]

    def microseconds(self, seconds: float) -> float:
        return round(1e6 * (self.begin_s + seconds), 3)

    def events(self, line: Timeline) -> Iterable[dict[str, Any]]:
        free_s: dict[tuple[int, str], list[float]] = {}
        sends: dict[tuple, list[int]] = {}  # arrows of sends without their receive yet
        in_order = sorted(line.events, key=lambda e: (e.start_s, _KINDS.index(e.kind)))
        for event in in_order:
            thread = self.thread(event, free_s)
            start = self.microseconds(event.start_s)
            duration = round(self.microseconds(event.end_s) - start, 3)
            where = {"pid": self.process, "tid": thread}
            yield {
                "ph": "X",
                "name": event.name if event.micro_batch is None else _with_number(event),
                "cat": self.category,
                "ts": start,
                "dur": duration,
                **where,
                "args": {
                    "step": self.number,
                    "mesh": event.mesh,
                    "kind": event.kind,
                    "what": event.name,
                    "stage": event.stage,
                    "micro_batch": event.micro_batch,
                    "phase": event.phase,
                    "bytes": event.num_bytes,
                },
            }
            key = event.name, event.micro_batch, event.num_bytes
            arrow = {"name": "transfer", "cat": self.category, **where}
            if event.kind == "send":
                sends.setdefault(key, []).append(self.flows)
                yield {**arrow, "ph": "s", "id": self.flows, "ts": start}
                self.flows += 1
            elif event.kind == "recv" and sends.get(key):
                flow = sends[key].pop(0)
                yield {**arrow, "ph": "f", "bp": "e", "id": flow, "ts": round(start + duration, 3)}
        for mesh, points in enumerate(line.memory):
            for at_s, held in points:
                yield {
                    "ph": "C",
                    "name": f"mesh {mesh} bytes",
                    "cat": f"{self.category} step {self.number}",
                    "ts": self.microseconds(at_s),
                    "pid": self.process,
                    "args": {"bytes": held},
                }

    def thread(self, event: Event, free_s: dict[tuple[int, str], list[float]]) -> int:
        """The first free thread of this mesh and kind."""
        lanes = free_s.setdefault((event.mesh, event.kind), [])
        lane = next((n for n, at in enumerate(lanes) if at <= event.start_s), len(lanes))
        lanes[lane : lane + 1] = [event.end_s]
        third = (_THREADS_PER_MESH - 1) // 3
        place = 0 if event.kind == "run" else 1 + _KINDS.index(event.kind) * third
        number = 1 + _THREADS_PER_MESH * event.mesh + place + min(lane, third - 1)
        name = f"mesh {event.mesh}"
        if event.kind != "run":
            name += " sends" if event.kind == "send" else " receives"
        self.threads[self.process, number] = name + (f" ({lane + 1})" if lane else "")
        return number


def _with_number(event: Event) -> str:
    return f"{event.name} {event.micro_batch}"


# -- reading


def read_timelines(text: str, where: str) -> list[Timeline]:
    """The measured timelines of a trace file, one per step."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceFileError(f"{where}: not JSON ({error}). Record the trace again.") from error
    about = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise TraceFileError(
            f"{where}: not a trace of autopar. Give a file that autopar.trace(…) wrote."
        )
    if about.get("version") != FORMAT_VERSION:
        raise TraceFileError(
            f"{where}: trace format {about.get('version')!r}; this autopar reads {FORMAT_VERSION}. "
            "Use the autopar that wrote it, or record again."
        )
    try:
        return _timelines(document["traceEvents"], about["steps"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise TraceFileError(f"{where}: malformed trace ({error!r}). Record it again.") from error


def _timelines(rows: Sequence[Any], steps: Sequence[Any]) -> list[Timeline]:
    events: list[list[Event]] = [[] for _ in steps]
    memory: list[list[list[tuple[float, float]]]] = [
        [[] for _ in range(int(step["num_meshes"]))] for step in steps
    ]
    category = _PROCESSES[MEASURED]
    for row in rows:
        if row["ph"] == "X" and row["cat"] == category:
            args = row["args"]
            number, micro_batch = int(args["step"]), args["micro_batch"]
            if args["kind"] not in _KINDS or row["dur"] < 0:
                raise ValueError(f"an event {row!r:.80}")
            start_s = 1e-6 * float(row["ts"]) - float(steps[number]["begin_s"])
            events[number].append(
                Event(
                    int(args["mesh"]),
                    str(args["kind"]),
                    str(args["what"]),
                    int(args["stage"]),
                    None if micro_batch is None else int(micro_batch),
                    start_s,
                    start_s + 1e-6 * float(row["dur"]),
                    str(args["phase"]),
                    float(args["bytes"]),
                )
            )
        elif row["ph"] == "C" and row["cat"].startswith(f"{category} step "):
            number = int(row["cat"].rpartition(" ")[2])
            mesh = int(row["name"].split()[1])
            at_s = 1e-6 * float(row["ts"]) - float(steps[number]["begin_s"])
            memory[number][mesh].append((max(0.0, at_s), float(row["args"]["bytes"])))
    timelines = []
    for step, step_events, held in zip(steps, events, memory, strict=True):
        num_meshes = int(step["num_meshes"])
        if any(not 0 <= event.mesh < num_meshes for event in step_events):
            raise ValueError("an event of an unknown mesh")
        step_events.sort(key=lambda event: event.start_s)
        lines = tuple(map(tuple, held)) if any(held) else ()
        timelines.append(Timeline(tuple(step_events), float(step["step_s"]), num_meshes, lines))
    return timelines
