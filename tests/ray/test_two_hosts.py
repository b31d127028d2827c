"""Two hosts of two devices each: GPT and BERT as pipelines in this process and on Ray, and training
on Ray that loses a worker that hangs and one that is killed."""

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
from autopar.errors import WorkerError
from autopar.runtime.checkpoints.find import latest_step
from examples.models import Example, build
from tests.equivalence.pipelines import assert_equal, own_buffers
from tests.ray import kills
from tests.ray.training import fetched

TINY = {"hidden_size": 16, "num_heads": 2, "seq_len": 8, "vocab_size": 32, "dropout": 0.0}
MODELS = ("gpt-tiny", "bert-tiny")
PIPELINE = autopar.PipeshardParallel(2, stages=autopar.UniformStages(2))
NUM_STEPS = 2
WRITING_LIMIT_S = 60.0
optimizer = optax.sgd(0.5)


@pytest.fixture(scope="module")
def cluster(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hangs are noticed soon, Ray stays when workers go, and new ones find programs in a cache."""
    options = kills.options(tmp_path_factory.mktemp("cache"))
    options |= {"heartbeat_s": 0.5, "silence_limit_s": 5}
    autopar.init(**options, num_hosts=2, devices_per_host=2)
    yield
    autopar.shutdown()


def batch_of(example: Example, index: int) -> Any:
    return example.make_batch(key=jax.random.key(index))


@functools.cache
def reference(name: str) -> tuple[Example, Any, list[jax.Array], Any]:
    """(example, first state, the losses of `jax.jit`, its last state)"""
    example = build(name, batch_size=4, **TINY)
    first = example.create_state()
    first = first.replace(tx=optimizer, opt_state=optimizer.init(first.params))
    serial, state, losses = jax.jit(example.train_step), first, []
    for index in range(NUM_STEPS):
        state, loss = serial(state, batch_of(example, index))
        losses.append(loss)
    return example, first, losses, state


def train(name: str) -> Any:
    """The last state of a pipeline, whose losses and state are those of `jax.jit`."""
    example, first, want_losses, want_state = reference(name)
    step, state = autopar.parallelize(example.train_step, method=PIPELINE), own_buffers(first)
    for index in range(NUM_STEPS):
        state, loss = step(state, batch_of(example, index))
        assert_equal(fetched(loss), want_losses[index], f"step {index}:", rtol=1e-5)
    assert_equal(fetched(state), want_state, "state:")
    assert [len(stage.devices) for stage in step.last_executable.plan.stages] == [2, 2]
    return state


@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_in_this_process_equals_jit(name: str) -> None:
    autopar.init(devices=jax.devices()[:4])
    try:
        state = train(name)
    finally:
        autopar.shutdown()
    meshes = {frozenset(d.id for d in x.devices()) for x in jax.tree.leaves(state.params)}
    assert {frozenset({0, 1}), frozenset({2, 3})} <= meshes


@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_on_ray_equals_jit(cluster: None, name: str) -> None:
    leaves = jax.tree.leaves(train(name))
    assert all(isinstance(x, autopar.DistributedArray) for x in leaves)
    assert {x.mesh.devices for x in leaves} == {(0, 1), (2, 3)}


def test_training_goes_on_when_a_worker_hangs_and_when_one_is_killed(
    cluster: None, tmp_path: Path
) -> None:
    """Steps since the last checkpoint are done again; losses and state are those of a run in which
    nothing is lost."""
    step = autopar.parallelize(kills.train, method=PIPELINE)
    batches = [kills.batch_of(index) for index in range(8)]
    want_losses: dict[int, float] = {}
    whole, _ = autopar.run_training(
        step,
        kills.make_state(),
        batches,
        checkpoint_dir=tmp_path / "whole",
        on_step=lambda number, loss: want_losses.update({number: float(loss)}),
    )
    want_state = kills.fetched(whole)

    # After which step which mesh loses its worker: in the middle between two checkpoints.
    losing = {3: (0, signal.SIGSTOP), 5: (1, signal.SIGKILL)}
    numbers: list[int] = []
    lost: list[int] = []
    errors: list[Any] = []

    def on_step(number: int, loss: Any) -> None:
        assert float(loss) == want_losses[number], f"step {number}"
        numbers.append(number)
        if number in losing:
            mesh, sign = losing.pop(number)
            until = time.monotonic() + WRITING_LIMIT_S
            while latest_step(tmp_path / "lost") != number - 1:  # it is written in the background
                assert time.monotonic() < until, f"no checkpoint of step {number - 1}"
                time.sleep(0.01)
            devices = step.last_executable.meshes[mesh].devices
            (worker,) = [w for w in kills.workers() if w.place.mesh_devices == devices]
            lost.append(worker.place.worker)
            kills.kill(worker, sign)

    state, _ = autopar.run_training(
        step,
        kills.make_state(),
        batches,
        checkpoint_dir=tmp_path / "lost",
        checkpoint_every=2,
        on_step=on_step,
        on_restart=errors.append,
    )
    assert [type(error) for error in errors] == [WorkerError, WorkerError]
    for error, worker, words in zip(errors, lost, ("has not answered", "died"), strict=True):
        assert str(error).startswith(f"Worker {worker} {words}"), str(error)
    assert numbers == [1, 2, 3, 3, 4, 5, 5, 6, 7, 8]
    for got, want in zip(kills.fetched(state), want_state, strict=True):
        np.testing.assert_array_equal(got, want)
