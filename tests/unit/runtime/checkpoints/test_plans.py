"""Checkpoints of train states, from one plan to another: more devices, fewer, pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import autopar
from autopar import AutoLayers, PipeshardParallel, ShardParallel, UniformStages, Zero3Parallel
from autopar.errors import ArgumentError, CheckpointError, MeshError
from autopar.training.restore import input_shardings

WIDTH = 16
BATCH = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
PIPELINE = PipeshardParallel(4, stages=UniformStages(2), layers=AutoLayers(4))


@pytest.fixture(autouse=True)
def all_devices() -> Iterator[None]:
    yield
    autopar.shutdown()


def fresh_state() -> TrainState:
    rng = np.random.default_rng(1)
    params = {f"w{i}": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for i in range(4)}
    return TrainState.create(apply_fn=forward, params=params, tx=optax.adam(1e-2))


def forward(params: Any, x: Any) -> Any:
    for i in range(4):
        x = jnp.tanh(x @ params[f"w{i}"])
    return x


def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    loss, grads = jax.value_and_grad(lambda p: (state.apply_fn(p, batch) ** 2).mean())(state.params)
    return state.apply_gradients(grads=grads), loss


def trained(num_devices: int, method: Any, steps: int = 2) -> tuple[Any, Any]:
    """(the step, the state after some steps)."""
    autopar.init(devices=jax.devices()[:num_devices])
    step = autopar.parallelize(train_step, method=method)
    state = fresh_state()
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return step, state


def values(state: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def assert_equal(one: Any, other: Any) -> None:
    for ours, theirs in zip(values(one), values(other), strict=True):
        np.testing.assert_array_equal(ours, theirs)


ROUTES = {
    "4 to 2 devices": (4, Zero3Parallel(), 2, Zero3Parallel()),
    "4 to 8 devices": (4, Zero3Parallel(), 8, Zero3Parallel()),
    "onto a pipeline": (4, Zero3Parallel(), 8, PIPELINE),
    "from a pipeline": (8, PIPELINE, 2, ShardParallel()),
    "to a smaller pipeline": (8, PIPELINE, 4, PIPELINE),
}


@pytest.mark.representatives("onto a pipeline")
@pytest.mark.parametrize(("route"), ROUTES.values(), ids=ROUTES.keys())
def test_a_state_is_restored_onto_another_plan(tmp_path: Path, route: Any):
    devices, method, devices_after, method_after = route
    _, state = trained(devices, method)
    autopar.save_checkpoint(tmp_path, state, 2)

    autopar.init(devices=jax.devices()[:devices_after])
    step = autopar.parallelize(train_step, method=method_after)
    shapes = jax.eval_shape(fresh_state)
    plan = step.plan(shapes, BATCH)
    back = autopar.restore_checkpoint(tmp_path, step)
    assert isinstance(back, TrainState) and back.tx is shapes.tx
    assert_equal(back, state)
    # It lies where the step wants it, so that nothing is moved and nothing planned again.
    call = plan.in_tree[1]
    own = [s for s, a in zip(_shardings(step, back), call.argument, strict=True) if a == 0]
    for leaf, sharding in zip(jax.tree.leaves(back), own, strict=True):
        assert leaf.sharding == sharding
    step(back, BATCH)
    assert sum(len(plans) for plans in step._plans.values()) == 1
    assert_equal(autopar.restore_checkpoint(tmp_path, plan), state)

    # And into plain JAX.
    plain = autopar.restore_checkpoint(tmp_path, jax.eval_shape(fresh_state))
    assert_equal(plain, state)
    jax.jit(train_step)(plain, BATCH)


def _shardings(step: Any, state: Any) -> list[Any]:
    """What the compiled step wants of its arguments."""
    from autopar.api import local_devices
    from autopar.executables import make_executable

    planned = step.planned((state, BATCH), {})
    shardings = make_executable(planned, local_devices()).input_shardings
    assert shardings == input_shardings(planned.plan, local_devices())
    return list(shardings)


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path):
    step, state = trained(4, Zero3Parallel())
    autopar.save_checkpoint(tmp_path, state, 2)
    losses = []
    for _ in range(3):
        state, loss = step(state, BATCH)
        losses.append(float(loss))
    state = autopar.restore_checkpoint(tmp_path, step)
    again = []
    for _ in range(3):
        state, loss = step(state, BATCH)
        again.append(float(loss))
    assert again == losses


@pytest.mark.ci
def test_a_donated_state_is_saved_in_the_background(tmp_path: Path):
    step, state = trained(8, PIPELINE)
    want = values(state)
    save = autopar.save_checkpoint(tmp_path, state, 2, asynchronous=True)
    state, _ = step(state, BATCH)  # takes over the buffers
    assert isinstance(save, autopar.CheckpointSave) and save.wait() == save.path
    for ours, theirs in zip(values(autopar.restore_checkpoint(tmp_path, step)), want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_another_argument_than_the_state(tmp_path: Path):
    step, _ = trained(2, ShardParallel())
    autopar.save_checkpoint(tmp_path, BATCH * 2, 1)
    back = autopar.restore_checkpoint(tmp_path, step)
    np.testing.assert_array_equal(back, BATCH * 2)


def test_keyword_arguments_and_counters_that_were_numbers(tmp_path: Path):
    def step(*, weights, batch):
        loss, grad = jax.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(weights["w"])
        return {"w": weights["w"] - grad, "count": weights["count"] + 1}, loss

    wrapped = autopar.parallelize(step, method=ShardParallel(), donate_argnums=())
    state = {"w": np.eye(WIDTH, dtype=np.float32), "count": 0}
    autopar.save_checkpoint(tmp_path, state, 0)
    new, _ = wrapped(weights=state, batch=BATCH)
    autopar.save_checkpoint(tmp_path, new, 1)
    for at in (0, 1):
        back = autopar.restore_checkpoint(tmp_path, wrapped, step=at)
        assert back["count"].item() == at and back["count"].weak_type
        wrapped(weights=back, batch=BATCH)
    assert sum(len(plans) for plans in wrapped._plans.values()) == 1


def test_targets_that_cannot_be_restored_to(tmp_path: Path):
    step, state = trained(2, ShardParallel(), steps=1)
    autopar.save_checkpoint(tmp_path, state, 1)
    with pytest.raises(ArgumentError, match=r"has no plan yet.*Call step.plan\(state, batch\)"):
        autopar.restore_checkpoint(tmp_path, autopar.parallelize(train_step))
    step.last_planned.plan.save(tmp_path / "plan.json")
    read = autopar.ParallelPlan.load(tmp_path / "plan.json")
    with pytest.raises(ArgumentError, match="a plan read from a file"):
        autopar.restore_checkpoint(tmp_path, read)
    autopar.init(devices=jax.devices()[:1])
    with pytest.raises(MeshError, match="needs 2 devices"):
        autopar.restore_checkpoint(tmp_path, step)


def test_a_plan_of_another_model(tmp_path: Path):
    step, state = trained(2, ShardParallel(), steps=1)
    params = {**state.params, "w9": np.ones(3)}
    del params["w0"]
    autopar.save_checkpoint(tmp_path, state.replace(params=params), 1)
    with pytest.raises(CheckpointError) as caught:
        autopar.restore_checkpoint(tmp_path, step)
    text = str(caught.value)
    assert "2 leaves differ" in text
    assert ".params['w0']: wanted float32[16, 16], not in the checkpoint" in text
    assert ".params['w9']: only in the checkpoint, float64[3]" in text
