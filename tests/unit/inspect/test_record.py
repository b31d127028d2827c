"""`autopar.trace` on 8 virtual devices: what is recorded, what is written, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import pytest

import autopar
from autopar.ir.pipeline import Recv, Run, Send
from autopar.ir.timeline import Timeline
from autopar.runtime import recording
from examples.models import build
from tests.unit.inspect.test_perfetto import check_schema


class Model:
    """A step with its arguments; calling it runs one step."""

    def __init__(self, method: Any) -> None:
        example = build("mlp-tiny")
        self.step = autopar.parallelize(example.train_step, method=method)
        self.state, self.batch = example.create_state(), example.make_batch()
        self()

    def __call__(self) -> Any:
        self.state, loss = self.step(self.state, self.batch)
        return loss


@pytest.fixture(scope="module")
def pipelined() -> Model:
    stages = autopar.UniformStages(2)
    return Model(autopar.PipeshardParallel(4, stages=stages, schedule="1f1b"))


@pytest.fixture(scope="module")
def sharded() -> Model:
    return Model(autopar.ShardParallel((8,)))


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    yield
    assert recording.current is None


def check_pipeline(line: Timeline, executable: Any) -> None:
    """Everything that the lists have, in their order; a mesh runs one thing at a time."""
    programs, pipeline = executable.programs, executable.pipeline
    names = executable.names
    for mesh, program in enumerate(programs.meshes):
        own = [e for e in line.events if e.mesh == mesh]
        runs = [e for e in own if e.kind == "run"]
        expected = [i for i in program.instructions if isinstance(i, Run)]
        assert [(e.name, e.micro_batch) for e in runs] == [
            (names[i.stage_program], i.micro_batch) for i in expected
        ]
        assert all(one.end_s <= two.start_s for one, two in pairwise(runs))
        for kind, which in (("send", Send), ("recv", Recv)):
            moves = [i for i in program.instructions if isinstance(i, which)]
            sizes = sorted(e.num_bytes for e in own if e.kind == kind)
            assert sizes == sorted(
                sum(nbytes(executable, pipeline.transfers[n]) for n in i.transfers) for i in moves
            )
    assert min(e.start_s for e in line.events) == 0.0
    assert max(e.end_s for e in line.events) == pytest.approx(line.step_s)
    assert [max(held for _, held in own) for own in line.memory] == [
        pytest.approx(max(m)) for m in executable.description.live_bytes
    ]


def nbytes(executable: Any, transfer: Any) -> int:
    buffer = executable.buffers[transfer.source, transfer.ref.value]
    return buffer.size * buffer.dtype.itemsize


def test_a_pipeline_is_recorded(pipelined: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with autopar.trace(path) as recorded:
        for _ in range(2):
            loss = pipelined()
    assert float(loss) > 0
    assert len(recorded.timelines) == 2
    for line in recorded.timelines:
        check_pipeline(line, pipelined.step.last_executable)
    document = json.loads(path.read_text())
    check_schema(document)
    plan = pipelined.step.last_executable.plan
    steps = document["otherData"]["steps"]
    assert [step["predicted_step_s"] for step in steps] == [plan.estimated_step_s, None]
    read = autopar.read_trace(path)
    assert [len(line.events) for line in read] == [len(x.events) for x in recorded.timelines]
    assert read[0].step_s == recorded.timelines[0].step_s
    plan.report(tmp_path / "plan.html", measured=recorded.timelines[-1])
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]


def test_predicted_events_are_those_of_the_lists(pipelined: Model) -> None:
    """From a plan file: the same runs, sends and receives that the step has, in their order."""
    executable = pipelined.step.last_executable
    line = autopar.ParallelPlan.from_json(executable.plan.to_json()).timeline()
    assert line.step_s == pytest.approx(executable.plan.estimated_step_s)
    for mesh, program in enumerate(executable.programs.meshes):
        runs = [e.name for e in line.events if (e.mesh, e.kind) == (mesh, "run")]
        assert runs == [
            executable.names[i.stage_program] for i in program.instructions if isinstance(i, Run)
        ]
        sends = sorted(e.num_bytes for e in line.events if (e.mesh, e.kind) == (mesh, "send"))
        moved = [i for i in program.instructions if isinstance(i, Send)]
        transfers = executable.pipeline.transfers
        assert sends == sorted(
            sum(nbytes(executable, transfers[n]) for n in i.transfers) for i in moved
        )


@pytest.mark.ci
def test_a_step_on_one_mesh_is_recorded(sharded: Model, tmp_path: Path) -> None:
    with autopar.trace(tmp_path / "trace.json") as recorded:
        jax.block_until_ready(sharded())
    (line,) = recorded.timelines
    (event,) = line.events
    assert (event.kind, event.name) == ("run", "train_step")
    assert event.end_s == line.step_s > 0


@pytest.mark.ci
def test_stages_that_make_results_are_recorded(pipelined: Model, tmp_path: Path) -> None:
    example = build("mlp-tiny")
    method = autopar.CreateStateParallel(pipelined.step, pipelined.batch)
    create = autopar.parallelize(example.create_state, method=method)
    create(jax.random.key(0))
    with autopar.trace(tmp_path / "trace.json") as recorded:
        create(jax.random.key(1))
    (line,) = recorded.timelines
    assert [e.name for e in sorted(line.events, key=lambda e: e.mesh)] == [
        "stage0_results",
        "stage1_results",
    ]


def test_it_is_written_when_the_body_raises(pipelined: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(KeyError), autopar.trace(path):
        pipelined()
        raise KeyError
    assert len(autopar.read_trace(path)) == 1


@pytest.mark.ci
def test_old_steps_are_dropped_and_that_is_said(sharded: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with (
        pytest.warns(UserWarning, match="first 2 steps were dropped"),
        autopar.trace(path, max_events=1) as recorded,
    ):
        for _ in range(3):
            sharded()
    assert len(recorded.timelines) == 1
    assert json.loads(path.read_text())["otherData"]["dropped_steps"] == 2


def test_no_step_is_written_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.warns(UserWarning, match="no step ran"), autopar.trace(path) as recorded:
        pass
    assert recorded.timelines == autopar.read_trace(path) == []


def test_a_second_trace_is_refused(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="no step"),
        autopar.trace(tmp_path / "a.json"),
        pytest.raises(autopar.ArgumentError, match=r"b\.json.*another trace is active"),
        autopar.trace(tmp_path / "b.json"),
    ):
        pass


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "none" / "trace.json", "does not exist"),
        (Path("/proc/trace.json"), "cannot write the file"),
    ):
        with pytest.raises(autopar.TraceFileError, match=said), autopar.trace(path):
            raise AssertionError("the body runs")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(path=3), r"trace\(3\)"),
        (dict(path="t.json", profile_dir=3), "profile_dir=3"),
        (dict(path="t.json", max_events=0), "max_events=0"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(autopar.ArgumentError, match=said):
        autopar.trace(**arguments)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(autopar.TraceFileError, match="cannot read it"):
        autopar.read_trace(tmp_path / "none.json")


@pytest.mark.ci
def test_captures_of_the_profiler(sharded: Model, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    with autopar.trace(tmp_path / "trace.json", profile_dir=folder):
        jax.block_until_ready(sharded())
    assert list((folder / "driver").rglob("*.xplane.pb"))
