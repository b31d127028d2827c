"""A cluster of one process with two meshes of its own: the session that every process has, without
the others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopar.runtime.ranks.process_replies import read_key, sent_key
from autopar.runtime.ranks.process_session import _fill
from autopar.runtime.ranks.process_workers import ProcessWorker
from autopar.runtime.remote.commands import StepCall
from autopar.runtime.remote.place import WorkerPlace

ROOT = Path(__file__).parents[4]
SCRIPT = Path(__file__).with_name("one_process.py")


def worker(number: int, rank: int = 0) -> ProcessWorker:
    place = WorkerPlace(number, rank, 2, 0, "here", (0,), (0, 1), "cpu", "127.0.0.1", "", "")
    return ProcessWorker(place, 0, None)


def call(first_tag: int, watched: tuple[int, ...] = (0,)) -> StepCall:
    return StepCall(1, (), (), (), (), (), first_tag, watched)


def test_keys_of_steps_and_of_reads_differ() -> None:
    steps = {sent_key(worker(w), call(tag)) for w in range(3) for tag in (0, 1, 2**39)}
    reads = {read_key(number, nth, w) for number in (1, 2**30) for nth in (1, 2) for w in (0, 9)}
    assert len(steps) == 9 and len(reads) == 8 and steps.isdisjoint(reads)


def test_only_the_first_worker_of_a_mesh_sends_and_only_what_is_watched() -> None:
    assert sent_key(worker(0, rank=1), call(0)) is None
    assert sent_key(worker(0), call(0, watched=())) is None


def test_shards_are_put_in_their_boxes() -> None:
    value = np.zeros((4, 2))
    wanted = [(((0, 2), (0, 2)), 0), (((2, 4), (0, 2)), 1)]
    _fill(value, wanted, [np.ones((2, 2)), np.full((2, 2), 2.0)])
    assert value.tolist() == [[1, 1], [1, 1], [2, 2], [2, 2]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(port), str(folder / "outcomes")],
        env={**env, "PJRT_NPROC": "8"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "outcomes").read_text())


def test_a_step_runs_on_meshes_of_one_process(outcomes: dict[str, Any]) -> None:
    assert outcomes["rows"] == [[[0, 2]], [[2, 3]]]
    assert outcomes["worst"] < 1e-6


def test_what_was_placed_has_numbers_of_its_own_and_is_not_read(outcomes: dict[str, Any]) -> None:
    assert outcomes["placed"] < 0
    assert "was placed by this process" in outcomes["read"]


def test_a_trace_has_the_runs_of_all_meshes(outcomes: dict[str, Any]) -> None:
    assert outcomes["traced"] == {"meshes": [0, 1], "notes": []}


def test_a_session_that_has_ended_says_so(outcomes: dict[str, Any]) -> None:
    assert "was ended by autopar.shutdown()" in outcomes["ended"]
    assert outcomes["groups_closed"]
