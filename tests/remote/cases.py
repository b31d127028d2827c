"""What a cluster of processes must do, whatever its devices: run by tests on CPU processes
everywhere, and on GPUs where there are enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

import autopar
from autopar import session
from autopar.lower.tiles import plan_tiles
from autopar.runtime.remote.session import RemoteSession
from examples.models import build
from tests.remote.process_cluster import ProcessCluster

NUM_STEPS = 3


@contextmanager
def running_on(cluster: ProcessCluster, transport: str) -> Iterator[None]:
    """Parallelized functions run on this cluster meanwhile."""
    before = session._current
    remote = RemoteSession(cluster, transport, plan_tiles)
    session._current = session.Session(next(session._numbers), None, remote)
    try:
        yield
    finally:
        session._current = before
        remote.close()


def pipeline(num_stages: int, schedule: str = "1f1b") -> autopar.PipeshardParallel:
    return autopar.PipeshardParallel(4, stages=autopar.UniformStages(num_stages), schedule=schedule)


def losses_of(step: Any, example: Any, num_steps: int = NUM_STEPS) -> list[float]:
    state, losses = example.create_state(), []
    for _ in range(num_steps):
        state, loss = step(state, example.make_batch())
        losses.append(loss)
    return [float(loss) for loss in losses]


def check_step(name: str, method: Any, rtol: float = 1e-4) -> Any:
    """A step on the cluster gives the losses of `jax.jit`."""
    example = build(name)
    want = losses_of(jax.jit(example.train_step), example)
    parallel = autopar.parallelize(example.train_step, method=method)
    np.testing.assert_allclose(losses_of(parallel, example), want, rtol=rtol)
    return parallel.last_executable


def check_plan_to_plan(name: str, first: Any, second: Any, rtol: float = 1e-4) -> None:
    """State goes from one plan's meshes to another's and back."""
    example = build(name)
    serial, state, want = jax.jit(example.train_step), example.create_state(), []
    for _ in range(4):
        state, loss = serial(state, example.make_batch())
        want.append(float(loss))
    steps = [autopar.parallelize(example.train_step, method=m) for m in (first, second)]
    state, got = example.create_state(), []
    for step in (steps[0], steps[1], steps[1], steps[0]):
        state, loss = step(state, example.make_batch())
        got.append(float(loss))
    np.testing.assert_allclose(got, want, rtol=rtol)
