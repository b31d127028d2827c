"""Training on a Ray cluster whose workers are killed: the losses are those of a run without."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import session
from tests.ray.test_training_on_ray import PIPELINE, batch_of, make_state, train

NUM_STEPS = 24
KILLS = 3


def worker_pids() -> list[int]:
    remote = session.current().remote
    assert remote is not None
    return [worker.hello.pid for group in remote.cluster._groups for worker in group.workers]


@pytest.mark.slow
def test_killed_workers_change_no_loss(tmp_path: Path) -> None:
    autopar.init(cluster="ray", num_hosts=2, devices_per_host=2)
    try:
        step = autopar.parallelize(train, method=PIPELINE)
        batches = [batch_of(index) for index in range(NUM_STEPS)]
        want: dict[int, float] = {}

        def note(number: int, results: Any) -> None:
            want[number] = float(results["loss"])

        autopar.run_training(
            step, make_state(0), batches, checkpoint_dir=tmp_path / "whole", on_step=note
        )

        rng = random.Random(0)
        moments = sorted(rng.sample(range(2, NUM_STEPS - 2), KILLS))
        got: dict[int, float] = {}
        killed: list[int] = []

        def kill(pid: int) -> None:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

        def note_and_kill(number: int, results: Any) -> None:
            if moments and number >= moments[0]:
                moments.pop(0)
                pid = rng.choice(worker_pids())
                threading.Timer(rng.uniform(0, 0.1), kill, [pid]).start()
            loss = float(results["loss"])
            assert got.setdefault(number, loss) == loss, "a step that is done again"

        autopar.run_training(
            step,
            make_state(0),
            iter(batches),
            checkpoint_dir=tmp_path / "killed",
            checkpoint_every=4,
            on_step=note_and_kill,
        )
        assert len(killed) == KILLS and not moments
        assert got == want
    finally:
        autopar.shutdown()
