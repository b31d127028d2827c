"""Training goes on, with the losses of a run without losses of workers: real kills from outside, at
moments that nobody has chosen."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autopar
from autopar.errors import WorkerError
from tests.ray import kills
from tests.ray.kills import METHODS, Nodes, Record, Soak

pytestmark = (
    pytest.mark.slow
)  # Each starts a cluster; tests/ray/test_faults.py kills a worker in the default line.

PIPELINE, ONE_MESH = METHODS


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Makes a session on the Ray that this process has joined; restarts find their programs in a
    cache."""

    def make(**options: Any) -> None:
        autopar.init(**kills.options(tmp_path / "cache"), **options)

    yield make
    autopar.shutdown()


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with warnings.catch_warnings():  # about Ray's own future, and its unclosed files
        warnings.simplefilter("ignore")
        made = Nodes(2, cpus_per_node=8)
        yield made
        made.close()


def check(records: list[Record]) -> None:
    rows = [record.as_row() for record in records]
    assert not [row for row in rows if row["wrong"] or not row["exact"]], json.dumps(rows, indent=1)


# These have a Ray of their own, so they come before `local_ray`, which stays for all that follow.


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_kills(nodes: Nodes, cluster: Callable[..., None], tmp_path: Path) -> None:
    cluster(num_hosts=4, devices_per_host=2)
    num_kills = int(os.environ.get("AUTOPAR_KILLS", "50"))
    seed = int(os.environ.get("AUTOPAR_SEED", random.SystemRandom().randrange(2**32)))
    print(f"AUTOPAR_KILLS={num_kills} AUTOPAR_SEED={seed}")
    whats = kills.mixture(num_kills, seed)
    soak = Soak(whats, [PIPELINE, ONE_MESH], tmp_path, seed, nodes=nodes, tell=kills.show)
    records = soak.run()
    assert len(records) == num_kills
    check(records)


@pytest.mark.slow
def test_fewer_devices_after_the_loss_of_a_node(
    nodes: Nodes, cluster: Callable[..., None], tmp_path: Path
) -> None:
    """The plan is another one, and losses are the same but for rounding."""
    cluster(devices_per_host=4)
    step = autopar.parallelize(kills.train, method=autopar.DataParallel())
    num_devices, losses, errors = [], {}, []
    num_steps = 16

    def on_step(number: int, loss: Any) -> None:
        losses[number] = float(loss)
        num_devices.append(autopar.session.current().cluster().num_devices)
        if number == 8 and not errors:
            nodes.lose(kills.workers()[-1].node.node_id)

    autopar.run_training(
        step,
        kills.make_state(),
        [kills.batch_of(index) for index in range(num_steps)],
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=3,
        on_step=on_step,
        on_restart=errors.append,
        restart_policy=autopar.RestartPolicy(min_devices=4, shrink_after_s=0),
    )
    assert [type(error) for error in errors] == [WorkerError]
    assert "lost with its node" in str(errors[0])
    assert set(num_devices) == {8, 4} and num_devices == sorted(num_devices, reverse=True)
    want = kills.on_one_device(num_steps)
    np.testing.assert_allclose([losses[n] for n in sorted(losses)], want, rtol=1e-5)
    assert sorted(losses) == list(range(1, num_steps + 1))


def test_a_killed_worker_costs_nothing_but_time(
    local_ray: None, cluster: Callable[..., None], tmp_path: Path
) -> None:
    cluster(num_hosts=4, devices_per_host=2)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    records = Soak(["kill"], [PIPELINE], tmp_path, seed, num_steps=25).run()
    assert len(records) == 1
    check(records)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loader", "function"])
def test_batches_of_a_data_loader_are_loaded_again(
    local_ray: None, cluster: Callable[..., None], tmp_path: Path, kind: str
) -> None:
    """Those that lay on lost workers are placed on the new ones."""
    cluster(num_hosts=2, devices_per_host=2)
    num_steps = 12
    step = autopar.parallelize(kills.train, method=autopar.ShardParallel((2, 2)))
    batches: Any
    if kind == "loader":
        batches = autopar.data_loader((kills.batch_of(i) for i in range(num_steps)), step)
    else:

        def batches(first: int) -> autopar.DataLoader:
            return autopar.data_loader([kills.batch_of(i) for i in range(first, num_steps)], step)

    losses: dict[int, float] = {}
    errors: list[Any] = []

    def on_step(number: int, loss: Any) -> None:
        losses[number] = float(loss)
        # One of them right after a checkpoint, when the next batch is at hand.
        if (number, len(errors)) in ((4, 0), (6, 1)):
            kills.kill(kills.workers()[0])

    autopar.run_training(
        step,
        kills.make_state(),
        batches,
        checkpoint_dir=tmp_path / "checkpoints",
        checkpoint_every=3,
        on_step=on_step,
        on_restart=errors.append,
    )
    assert [type(error) for error in errors] == [WorkerError, WorkerError]
    want = kills.on_one_device(num_steps)
    np.testing.assert_allclose([losses[n] for n in range(1, num_steps + 1)], want, rtol=1e-5)
