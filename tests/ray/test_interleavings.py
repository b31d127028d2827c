"""Two threads, two steps and two plans over the same links do not deadlock, and compute what one
device does."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

import autopar
from tests.ray import training
from tests.ray.interleavings import call_in_random_order
from tests.ray.training import Near, pipeline

pytestmark = pytest.mark.slow  # test_two_hosts stands for steps on Ray


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    autopar.init(cluster="ray", num_hosts=4, devices_per_host=1, start_limit_s=300)
    yield
    autopar.shutdown()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, None], ids=["0", "1", "any"])
def test_threads_that_call_steps_on_the_same_workers(seed: int | None) -> None:
    """Two plans over the same links, and one on a mesh that overlaps both of theirs."""
    if seed is None:
        seed = int(os.environ.get("AUTOPAR_SEED", random.SystemRandom().randrange(2**32)))
    print(f"AUTOPAR_SEED={seed}")
    methods = (pipeline(2), pipeline(2, schedule="gpipe"), autopar.ShardParallel((2, 2)))
    steps = [autopar.parallelize(training.train, method=method) for method in methods]
    # The workers run before the threads start.
    steps[0](training.make_state(0), training.batch_of(0, rows=32))
    call_in_random_order(steps, 15, seed, Near())
