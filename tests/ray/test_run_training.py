"""Training on a Ray cluster that loses workers, or starts again with fewer: the losses are those of
a run without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from tests.ray import training

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    yield
    autopar.shutdown()


def test_killed_workers_change_no_loss(tmp_path: Path) -> None:
    autopar.init(cluster="ray", num_hosts=2, devices_per_host=2)
    step = autopar.parallelize(training.train, method=training.PIPELINE)
    training.killed_workers_change_no_loss(
        step, tmp_path, num_steps=24, num_kills=3, with_loader=False
    )


def test_training_continues_on_fewer_workers(local_ray: None, tmp_path: Path) -> None:
    def init(num_workers: int) -> None:
        autopar.init(cluster="ray", num_hosts=num_workers, devices_per_host=1)

    training.training_continues_on_fewer_workers(init, 4, training.Near(), tmp_path)
