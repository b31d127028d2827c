"""Training on a real Ray cluster whose nodes come and go: it waits, shrinks only if allowed, grows
again, and leaves nodes that Ray is about to take away."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar import RestartPolicy
from tests.ray import kills
from tests.ray.kills import Nodes

pytestmark = pytest.mark.slow  # each starts a cluster of several nodes


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with warnings.catch_warnings():  # about Ray's own future, and its unclosed files
        warnings.simplefilter("ignore")
        made = Nodes(2, cpus_per_node=4)
        yield made
        autopar.shutdown()
        made.close()


class Watched:
    """Losses and the number of devices of every step, and something to do at one of them."""

    def __init__(self, at: int, act: Any) -> None:
        self.losses: dict[int, float] = {}
        self.devices: list[tuple[int, int]] = []
        self._at, self._act, self._acted = at, act, False

    def __call__(self, number: int, loss: Any) -> None:
        self.losses[number] = float(loss)
        self.devices.append((number, autopar.session.current().cluster().num_devices))
        if number == self._at and not self._acted:
            self._acted = True
            self._act()
        time.sleep(0.15)  # so that nodes can come while it trains


def train(tmp_path: Path, watched: Watched, num_steps: int, policy: RestartPolicy) -> None:
    autopar.init(**kills.options(tmp_path / "cache"), devices_per_host=4)
    step = autopar.parallelize(kills.train, method=autopar.DataParallel())
    autopar.run_training(
        step,
        kills.make_state(),
        [kills.batch_of(index) for index in range(num_steps)],
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=3,
        on_step=watched,
        restart_policy=policy,
    )
    want = kills.on_one_device(num_steps)
    np.testing.assert_allclose([watched.losses[n + 1] for n in range(num_steps)], want, rtol=1e-5)


def test_it_shrinks_and_grows_again(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lose() -> None:
        nodes.lose(kills.workers()[-1].node.node_id)

    class Returning(Watched):
        def __call__(self, number: int, loss: Any) -> None:
            super().__call__(number, loss)
            if self.devices[-1][1] == 4 and len(nodes) == 1:
                nodes.add()

    watched = Returning(8, lose)
    with caplog.at_level(logging.WARNING, "autopar"):
        train(tmp_path, watched, 300, RestartPolicy(min_devices=4, shrink_after_s=0))
    seen = [count for _, count in watched.devices]
    assert seen[0] == 8 and 4 in seen and seen[-1] == 8, seen
    assert "Training goes on with 4 devices of 8." in caplog.messages
    assert any("8 devices are there again; 4 are in use" in one for one in caplog.messages)


def test_it_waits_for_a_node_to_be_replaced(nodes: Nodes, tmp_path: Path) -> None:
    """For longer than three attempts took before."""

    def replace() -> None:
        nodes.lose(kills.workers()[-1].node.node_id)
        threading.Timer(40, nodes.add).start()

    watched = Watched(8, replace)
    train(tmp_path, watched, 16, RestartPolicy(wait_s=300, max_pause_s=8))
    assert {count for _, count in watched.devices} == {8}


def test_it_leaves_a_node_that_ray_takes_away(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It saves a checkpoint first, so no step is done twice."""
    nodes.add()
    drained: list[str] = []

    def drain() -> None:
        import ray

        drained.append(kills.workers()[-1].node.node_id)
        address = ray.get_runtime_context().gcs_address
        subprocess.run(
            (
                f"{sys.executable} -m ray.scripts.scripts drain-node --address {address} "
                f"--node-id {drained[0]} --reason DRAIN_NODE_REASON_PREEMPTION "
                "--reason-message spot --deadline-remaining-seconds 600"
            ).split(),
            check=True,
            timeout=60,
            capture_output=True,
        )

    watched = Watched(8, drain)
    with caplog.at_level(logging.WARNING, "autopar"):
        train(tmp_path, watched, 80, RestartPolicy(min_devices=4, shrink_after_s=0))
    numbers = [number for number, _ in watched.devices]
    assert numbers == list(range(1, 81)), "no step is done twice"
    assert any("the cluster takes away" in one for one in caplog.messages)
    assert [count for _, count in watched.devices][-1] == 8
    assert drained[0] not in {worker.node.node_id for worker in kills.workers()}
