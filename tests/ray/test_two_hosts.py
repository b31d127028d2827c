"""Two hosts of two devices each: GPT and BERT as pipelines in this process and on Ray, and training
on Ray that loses a worker that hangs and one that is killed.

One plan of each model is carried out in both places, so that what differs is the runtime alone.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import autopar
from autopar.checkpoints import latest_step
from autopar.errors import WorkerError
from examples.models import Example, build
from tests.equivalence.pipelines import assert_equal, own_buffers
from tests.ray import kills
from tests.ray.test_pipelines_on_ray import fetched

TINY = {"hidden_size": 16, "num_heads": 2, "seq_len": 8, "vocab_size": 32}
MODELS = ("gpt-tiny", "bert-tiny")
PIPELINE = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))
NUM_STEPS = 2
# Adam divides a gradient by its own size. The true gradient of the keys' bias is zero, and with
# a small eps its rounding noise would become whole steps.
optimizer = optax.adam(1e-2, eps=1e-3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hangs are noticed soon, and workers that start again find their programs in a cache."""
    options = kills.options(tmp_path_factory.mktemp("cache"))
    options |= {"heartbeat_s": 0.5, "silence_limit_s": 5}
    autopar.init(**options, num_hosts=2, devices_per_host=2)
    yield
    autopar.shutdown()


def batch_of(example: Example, index: int) -> Any:
    return example.make_batch(key=jax.random.key(index))


@functools.cache
def planned(name: str) -> tuple[Example, Any, autopar.ParallelPlan, list[Any]]:
    """(example, first state, its plan for two hosts, (state, loss) after each step of `jax.jit`)"""
    example = build(name, batch_size=4, **TINY)
    first = example.create_state().replace(tx=optimizer)
    plan = autopar.plan(
        example.train_step,
        first,
        batch_of(example, 0),
        cluster=autopar.ClusterSpec(2, 2, "cpu"),
        method=PIPELINE,
    )
    serial, state, wanted = jax.jit(example.train_step), first, []
    for index in range(NUM_STEPS):
        state, loss = serial(state, batch_of(example, index))
        wanted.append((state, loss))
    return example, first, plan, wanted


def check(name: str) -> Any:
    example, first, plan, wanted = planned(name)
    step, state = autopar.parallelize(example.train_step, method=plan), own_buffers(first)
    for index in range(NUM_STEPS):
        state, loss = step(state, batch_of(example, index))
        want_state, want_loss = wanted[index]
        assert_equal(fetched(loss), want_loss, f"step {index}:", rtol=1e-5)
    assert_equal(fetched(state), want_state, "state:")
    assert step.last_executable.plan.num_stages == 2
    return state


@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_in_this_process_equals_jit(name: str) -> None:
    autopar.init(devices=jax.devices()[:4])
    try:
        check(name)
    finally:
        autopar.shutdown()


@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_on_ray_equals_jit(cluster: None, name: str) -> None:
    state = check(name)
    leaves = jax.tree.leaves(state)
    assert all(isinstance(x, autopar.DistributedArray) for x in leaves)
    assert {x.mesh.devices for x in leaves} == {(0, 1), (2, 3)}


def test_training_goes_on_when_a_worker_hangs_and_when_one_is_killed(
    cluster: None, tmp_path: Path
) -> None:
    """Steps since the last checkpoint are done again, and give the same losses and state."""
    num_steps, every = 8, 2
    want = kills.uninterrupted(PIPELINE, num_steps)
    # After which step: one of either mesh, between checkpoints.
    losing = {3: (0, signal.SIGSTOP), 5: (1, signal.SIGKILL)}
    step = autopar.parallelize(kills.train, method=PIPELINE)
    numbers: list[int] = []
    errors: list[Any] = []
    lost: list[int] = []

    def on_step(number: int, loss: Any) -> None:
        assert float(loss) == want.losses[number], f"step {number}"
        numbers.append(number)
        if number in losing:
            mesh, sign = losing.pop(number)
            while latest_step(tmp_path) != number - 1:  # it is written in the background
                time.sleep(0.01)
            devices = step.last_executable.meshes[mesh].devices
            (worker,) = [w for w in kills.workers() if w.place.mesh_devices == devices]
            lost.append(worker.place.worker)
            kills.kill(worker, sign)

    state, _ = autopar.run_training(
        step,
        kills.make_state(),
        [kills.batch_of(index) for index in range(num_steps)],
        checkpoint_dir=tmp_path,
        checkpoint_every=every,
        on_step=on_step,
        on_restart=errors.append,
    )
    assert [type(error) for error in errors] == [WorkerError, WorkerError]
    for error, worker, words in zip(errors, lost, ("has not answered", "died"), strict=True):
        assert str(error).startswith(f"Worker {worker} {words}"), str(error)
    assert numbers == [1, 2, 3, 3, 4, 5, 5, 6, 7, 8]
    for got, wanted in zip(kills.fetched(state), want.state, strict=True):
        np.testing.assert_array_equal(got, wanted)
