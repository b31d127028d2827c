"""Traces on one GPU, where programs are dispatched long before they run."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import jax
import pytest

import autopar
from autopar.ir.pipeline import Run
from examples.models import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]

ROUNDING_S = 1e-9  # of a sum of two times


@pytest.fixture(autouse=True)
def _one_device():
    autopar.init(devices=jax.devices()[:1])
    yield
    autopar.shutdown()


@pytest.mark.parametrize(
    "method",
    [
        autopar.PipeshardParallel(4, stages=autopar.UniformStages(2), schedule="interleaved_1f1b"),
        autopar.ShardParallel(),
    ],
    ids=["taking turns", "one mesh"],
)
def test_the_trace_covers_the_steps(method, tmp_path: Path) -> None:
    example = build("gpt-tiny", 64, hidden_size=512, num_layers=4, seq_len=256, vocab_size=1024)
    step = autopar.parallelize(example.train_step, method=method)
    state, batch = example.create_state(), example.make_batch()
    for _ in range(2):
        state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    path = tmp_path / "trace.json"
    before_s = time.perf_counter()
    with autopar.trace(path) as recorded:
        opened_s = time.perf_counter()
        for _ in range(3):
            state, loss = step(state, batch)
        dispatched_s = time.perf_counter()
        was_running = not loss.is_ready()
        jax.block_until_ready((state, loss))
    after_s = time.perf_counter()
    assert recorded.notes == []
    assert len(recorded.timelines) == 3
    steps = json.loads(path.read_text())["otherData"]["steps"]
    spans = [
        (shown["begin_s"] + event.start_s, shown["begin_s"] + event.end_s)
        for shown, line in zip(steps, recorded.timelines, strict=True)
        for event in line.events
        if event.kind == "run"
    ]
    # One device does one thing after another, all of it while the trace is open.
    assert spans[0][0] >= 0 and spans[-1][1] <= after_s - before_s
    assert all(one[1] <= two[0] + ROUNDING_S for one, two in pairwise(spans))
    # Ends are those of the device, not of the dispatch.
    if was_running:
        assert opened_s + spans[-1][1] > dispatched_s
    for line in recorded.timelines:
        runs = [e for e in line.events if e.kind == "run"]
        assert all(one.end_s <= two.start_s for one, two in pairwise(runs))
        if isinstance(method, autopar.PipeshardParallel):
            (program,) = step.last_executable.programs.meshes
            expected = [i.micro_batch for i in program.instructions if isinstance(i, Run)]
            assert [e.micro_batch for e in runs] == expected
