"""Traces on one GPU, where programs are dispatched long before they run."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import jax
import pytest

import autopar
from autopar.ir.program import Run
from examples.models import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


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
    with autopar.trace(tmp_path / "trace.json") as recorded:
        began_s = time.perf_counter()
        for _ in range(3):
            state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        took_s = time.perf_counter() - began_s
    assert recorded.notes == []
    assert len(recorded.timelines) == 3
    busy_s = sum(sum(line.busy_s()) for line in recorded.timelines)
    assert 0.3 * took_s < busy_s <= 1.01 * took_s
    for line in recorded.timelines:
        runs = [e for e in line.events if e.kind == "run"]
        assert all(one.end_s <= two.start_s for one, two in pairwise(runs))
        if isinstance(method, autopar.PipeshardParallel):
            (program,) = step.last_executable.programs.meshes
            expected = [i.micro_batch for i in program.instructions if isinstance(i, Run)]
            assert [e.micro_batch for e in runs] == expected
