"""Traces of steps on worker processes: clocks of their own, put on one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import autopar
from autopar.ir.pipeline import Run
from examples.models import build
from tests.remote.cases import pipeline, running_on
from tests.remote.process_cluster import ProcessCluster


@pytest.mark.ci
def test_two_processes_on_one_clock(tmp_path: Path) -> None:
    example = build("mlp-tiny")
    path = tmp_path / "trace.json"
    with running_on(ProcessCluster(2, 1), "jax_transfer"):
        step = autopar.parallelize(example.train_step, method=pipeline(2))
        state, batch = example.create_state(), example.make_batch()
        state, _ = step(state, batch)
        with autopar.trace(path) as recorded:
            for _ in range(2):
                state, _ = step(state, batch)
        state, _ = step(state, batch)  # which is not recorded
        programs = step.last_executable.programs
    assert recorded.notes == []
    assert len(recorded.timelines) == 2
    about = json.loads(path.read_text())["otherData"]
    uncertain_s = about["clock_uncertainty_s"]
    assert set(about["clocks"]) == {"worker 0", "worker 1"}
    assert uncertain_s > 0
    for line in recorded.timelines:
        for mesh, program in enumerate(programs.meshes):
            runs = [e for e in line.events if (e.kind, e.mesh) == ("run", mesh)]
            expected = [i.micro_batch for i in program.instructions if isinstance(i, Run)]
            assert [e.micro_batch for e in runs] == expected
            assert all(a.end_s <= b.start_s for a, b in pairwise(runs))
        sends = [e for e in line.events if e.kind == "send"]
        recvs = [e for e in line.events if e.kind == "recv"]
        assert len(sends) == len(recvs) > 0
        for recv in recvs:
            same = [
                e
                for e in sends
                if (e.name, e.micro_batch, e.num_bytes)
                == (recv.name, recv.micro_batch, recv.num_bytes)
            ]
            assert min(e.start_s for e in same) <= recv.end_s + 2 * uncertain_s
        assert all(own for own in line.memory)


@pytest.mark.slow
def test_a_session_that_ends_inside_of_a_trace(tmp_path: Path) -> None:
    example = build("mlp-tiny")
    with (
        autopar.trace(tmp_path / "trace.json") as recorded,
        running_on(ProcessCluster(2, 1), "jax_transfer"),
    ):
        step = autopar.parallelize(example.train_step, method=pipeline(2))
        step(example.create_state(), example.make_batch())
    assert recorded.notes == []
    assert len(recorded.timelines) == 1
