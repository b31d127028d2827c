"""What a cluster of processes must do, whatever its devices: run by tests on CPU processes
everywhere, and on GPUs or shares of one in `tests/gpu`."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar import session
from autopar.lower.tiles import plan_tiles
from autopar.runtime.remote.session import RemoteSession
from examples.models import build
from examples.models.mlp import apply_mlp
from tests.remote.process_cluster import ProcessCluster

NUM_STEPS = 3
THREADS_LIMIT_S = 240.0


@contextmanager
def running_on(cluster: ProcessCluster, transport: str) -> Iterator[RemoteSession]:
    """Parallelized functions run on this cluster meanwhile."""
    before = session._current
    remote = RemoteSession(cluster, transport, plan_tiles)
    session._current = session.Session(next(session._numbers), None, remote)
    try:
        yield remote
    finally:
        session._current = before
        remote.close()


def pipeline(
    stages: int | Sequence[tuple[int, int]], schedule: str = "1f1b", num_micro_batches: int = 4
) -> autopar.PipeshardParallel:
    """`stages`: how many, or the submesh of each."""
    chosen: Any
    if isinstance(stages, int):
        chosen = autopar.UniformStages(stages)
    else:
        chosen = autopar.ManualStages([[k] for k in range(len(stages))], stages)
    return autopar.PipeshardParallel(num_micro_batches, stages=chosen, schedule=schedule)


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


def check_plan_to_plan(name: str, *methods: Any, rtol: float = 1e-4) -> None:
    """State goes from one plan's meshes to the next plan's, stays there for a step, and comes
    back."""
    example = build(name)
    order = [*range(len(methods)), *reversed(range(len(methods)))]
    want = losses_of(jax.jit(example.train_step), example, len(order))
    steps = [autopar.parallelize(example.train_step, method=m) for m in methods]
    state, got = example.create_state(), []
    for number in order:
        state, loss = steps[number](state, example.make_batch())
        got.append(float(loss))
    np.testing.assert_allclose(got, want, rtol=rtol)


def check_created(name: str, method: Any, rtol: float = 1e-4) -> None:
    """The state is created where the step keeps it, equals that of one device, and is trained."""
    example = build(name)
    step = autopar.parallelize(example.train_step, method=method)
    create = autopar.parallelize(
        example.create_state,
        method=autopar.CreateStateParallel(step, example.abstract_batch()),
    )
    state = create(jax.random.key(0))
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, autopar.DistributedArray) for leaf in leaves)
    for leaf, expected in zip(leaves, jax.tree.leaves(example.create_state()), strict=True):
        np.testing.assert_allclose(leaf.fetch(), np.asarray(expected), rtol=rtol, atol=1e-6)
    losses = []
    for _ in range(2):
        state, loss = step(state, example.make_batch())
        losses.append(float(loss))
    np.testing.assert_allclose(
        losses, losses_of(jax.jit(example.train_step), example, 2), rtol=rtol
    )


def check_inference(method: Any, rtol: float = 1e-4) -> None:
    """A forward pass through the stages gives what `jax.jit` gives."""
    example = build("mlp-tiny")
    params, batch = example.create_state().params, example.make_batch()

    def evaluate(params: Any, batch: Any) -> Any:
        rows = apply_mlp(example.config, params, batch["x"])
        return {"rows": rows, "loss": jnp.mean((rows - batch["y"]) ** 2)}

    want = jax.jit(evaluate)(params, batch)
    parallel = autopar.parallelize(evaluate, method=method)
    for _ in range(2):
        got = parallel(params, batch)
        for name, expected in want.items():
            np.testing.assert_allclose(
                got[name].fetch(), np.asarray(expected), rtol=rtol, atol=rtol
            )


def check_two_threads(name: str, methods: Sequence[Any], rtol: float = 1e-4) -> None:
    """Two plans over the same devices, called by two threads as they please: both are planned,
    loaded and run meanwhile, and neither waits for the other for ever."""
    example = build(name)
    want = losses_of(jax.jit(example.train_step), example)

    def train(method: Any) -> list[float]:
        return losses_of(autopar.parallelize(example.train_step, method=method), example)

    with ThreadPoolExecutor(len(methods)) as threads:
        training = [threads.submit(train, method) for method in methods]
        for losses in training:
            np.testing.assert_allclose(losses.result(THREADS_LIMIT_S), want, rtol=rtol)


def check_room_is_made(remote: RemoteSession) -> None:
    """On two devices, a mesh that nobody uses ends when others need its devices. Arrays and steps
    that somebody holds keep theirs; and a step whose mesh was closed starts it again."""
    example = build("mlp-tiny")
    want = losses_of(jax.jit(example.train_step), example)
    apart = autopar.parallelize(example.train_step, method=pipeline(2))
    np.testing.assert_allclose(losses_of(apart, example), want, rtol=1e-4)
    executable: Any = apart.last_executable
    groups = [mesh.group for mesh in executable.meshes]

    check_step("mlp-tiny", autopar.ShardParallel((2,)))
    assert not any(group.closed for group in groups), "their step can still be called"
    (whole,) = (mesh for devices, mesh in remote._meshes.items() if len(devices) == 2)
    gc.collect()
    check_step("mlp-tiny", pipeline(2, num_micro_batches=2))
    check_step("mlp-tiny", autopar.ShardParallel((1,)))
    assert whole.group.closed, "of a step that is gone"

    for group in groups:
        remote.cluster.close_group(group)
    np.testing.assert_allclose(losses_of(apart, example), want, rtol=1e-4)
    assert not {mesh.group for mesh in executable.meshes} & {*groups}
