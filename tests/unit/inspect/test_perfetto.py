"""The trace file: what viewers need of it, and that it can be read again."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from autopar.errors import TraceFileError
from autopar.inspect.perfetto import ShownStep, TraceContent, read_timelines, trace_json
from autopar.ir.timeline import Event, Timeline

LINE = Timeline(
    (
        Event(0, "run", "stage0_forward", 0, 0, 0.0, 0.5, "forward"),
        Event(0, "send", "stage0 to stage1", 0, 0, 0.5, 0.75, "", 64.0),
        Event(1, "recv", "stage0 to stage1", 1, 0, 0.5, 0.75, "", 64.0),
        Event(0, "send", "stage0 to stage1", 0, 1, 0.625, 1.0, "", 64.0),
        Event(1, "recv", "stage0 to stage1", 1, 1, 0.625, 1.0, "", 64.0),
        Event(1, "run", "stage1_update", 1, None, 1.0, 1.5, "update"),
    ),
    1.5,
    2,
    (((0.0, 8.0), (0.5, 4.0)), ((0.0, 2.0),)),
)
CONTENT = TraceContent(
    (ShownStep("train", 0.25, LINE, LINE), ShownStep("train", 2.0, LINE)), {"dropped_steps": 0}
)


def check_schema(document: dict[str, Any]) -> None:
    """What the format asks of events, and what makes them legible: nothing on a thread overlaps,
    and every arrow has both ends, each in a slice of its thread."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    arrows: dict[int, list[str]] = {}
    named = set()
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0 and isinstance(event["tid"], int)
                thread = event["pid"], event["tid"]
                slices.setdefault(thread, []).append((event["ts"], event["ts"] + event["dur"]))
            case "s" | "f":
                arrows.setdefault(event["id"], []).append(event["ph"])
                own = slices[event["pid"], event["tid"]]
                assert any(start - 1e-3 <= event["ts"] <= end + 1e-3 for start, end in own)
            case "C":
                assert all(isinstance(v, float | int) for v in event["args"].values())
            case "M":
                named.add((event["name"], event["pid"], event["tid"]))
            case other:
                raise AssertionError(f"an event of kind {other!r}")
    for thread, own in slices.items():
        assert ("thread_name", *thread) in named
        own.sort()
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(own))
    assert all(ends == ["s", "f"] for ends in arrows.values())


def test_the_file_is_as_viewers_want_it() -> None:
    document = json.loads(trace_json(CONTENT))
    check_schema(document)
    names = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {"measured", "predicted"}
    threads = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {
        "mesh 0",
        "mesh 1",
        "mesh 0 sends",
        "mesh 0 sends (2)",
        "mesh 1 receives",
        "mesh 1 receives (2)",
    }
    steps = document["otherData"]["steps"]
    assert [step["predicted_step_s"] for step in steps] == [1.5, None]


def test_measured_timelines_come_back() -> None:
    assert read_timelines(trace_json(CONTENT), "here") == [LINE, LINE]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: "{", "not JSON"),
        (lambda d: json.dumps([1]), "not a trace of autopar"),
        (lambda d: json.dumps({**d, "otherData": {}}), "not a trace of autopar"),
        (lambda d: json.dumps({**d, "otherData": {**d["otherData"], "version": 99}}), "format 99"),
        (lambda d: json.dumps({**d, "traceEvents": [{"ph": "X"}]}), "malformed"),
        (lambda d: json.dumps({**d, "traceEvents": None}), "malformed"),
    ],
)
def test_other_files_are_refused(change: Any, said: str) -> None:
    text = change(json.loads(trace_json(CONTENT)))
    with pytest.raises(TraceFileError, match=f"here: .*{said}"):
        read_timelines(text, "here")


def test_an_event_of_no_mesh_is_refused() -> None:
    document = json.loads(trace_json(CONTENT))
    next(e for e in document["traceEvents"] if e["ph"] == "X")["args"]["mesh"] = 5
    with pytest.raises(TraceFileError, match="an event of an unknown mesh"):
        read_timelines(json.dumps(document), "here")
