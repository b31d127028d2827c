"""A step for which a worker's devices lack memory, on a real local Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import autopar
from autopar.runtime.ray import cluster
from tests.equivalence.multi_controller import normal
from tests.equivalence.multi_controller_pipelines import momentum_step, pipeline
from tests.equivalence.pipelines import assert_equal

WIDTH, ROWS = 128, 256


@pytest.fixture
def _cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    short = partial(cluster.RayCluster, executor="tests.ray.short_executor:ShortExecutor")
    monkeypatch.setattr(cluster, "RayCluster", short)
    autopar.init(cluster="ray", num_hosts=2, devices_per_host=2)
    yield
    autopar.shutdown()


@pytest.mark.usefixtures("_cluster")
def test_a_first_run_for_which_a_worker_has_no_room_is_planned_again() -> None:
    """No worker has begun it, so the state, which is on the workers, is still there."""
    params = {f"w{i}": normal(i, WIDTH, WIDTH) / 8 for i in range(4)}
    zeros = jax.tree.map(np.zeros_like, params)
    state = {"params": params, "first": zeros, "second": zeros}
    batch = {"x": normal(10, ROWS, WIDTH)}
    free = autopar.parallelize(momentum_step, method=pipeline(2))
    found, _ = free(state, batch)
    wanted, _ = jax.jit(momentum_step)(state, batch)
    peak = max(free.last_executable.memory_bytes(), free.last_planned.plan.estimated_peak_bytes)
    options = autopar.ShardingOptions(memory_budget_bytes=1.2 * peak)
    step = autopar.parallelize(momentum_step, method=replace(pipeline(2), options=options))
    for _ in range(3):
        found, loss = step(found, batch)
        wanted, wanted_loss = jax.jit(momentum_step)(wanted, batch)
        assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-5)
    assert_equal(jax.tree.map(np.asarray, found), wanted)
    (why,) = step.last_planned.plan.memory_found.replanned
    assert "ran out of memory" in why
    assert step.last_executable.plan.num_stages == 2
