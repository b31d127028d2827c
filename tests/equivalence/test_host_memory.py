"""Steps whose optimizer state lies in host memory compute what `jax.jit` computes, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import (
    AutoParallel,
    CreateStateParallel,
    FollowParallel,
    ShardingOptions,
    ShardParallel,
)
from autopar.errors import ArgumentError, MemoryBudgetError

WIDTH, LAYERS, ROWS = 64, 24, 16
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make_state(tx: optax.GradientTransformation, dtype=jnp.float32, key=None):
    keys = jax.random.split(jax.random.key(0) if key is None else key, LAYERS)
    params = [(jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5).astype(dtype) for k in keys]
    return {"params": params, "opt": tx.init(params), "count": jnp.zeros((), jnp.int32)}


def loss_of(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w.astype(jnp.float32))
    return jnp.mean((x - batch["y"]) ** 2)


def step_of(tx: optax.GradientTransformation, loss_fn=loss_of):
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "count": state["count"] + 1}, loss

    return train_step


@pytest.fixture(scope="module")
def batch():
    keys = jax.random.split(jax.random.key(1))
    return {n: jax.random.normal(k, (ROWS, WIDTH)) for n, k in zip("xy", keys, strict=True)}


def budget(state, share: float, num_devices: int) -> ShardingOptions:
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return ShardingOptions(memory_budget_bytes=share * held / num_devices)


def kinds(tree) -> set[str | None]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def check_training(step, train_step, state, batch, num_steps: int = 3):
    """Returns the last state."""
    reference, mine = state, jax.tree.map(jnp.copy, state)
    for _ in range(num_steps):
        reference, expected = jax.jit(train_step)(reference, batch)
        mine, loss = step(mine, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for got, wanted in zip(jax.tree.leaves(mine), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-2, atol=1e-4)
    executable = step.last_executable
    plan = executable.plan
    assert plan.host is not None and plan.host.num_groups > 3
    assert executable.memory_bytes() <= plan.memory_budget_bytes
    assert executable.host_bytes() == pytest.approx(plan.host.num_bytes)
    assert "pinned_host" in kinds(mine["opt"]) and kinds(mine["params"]) == {"device"}
    return mine


@pytest.fixture
def one_device():
    autopar.init(devices=jax.devices()[:1])
    yield
    autopar.shutdown()


def test_on_one_device(one_device, batch) -> None:
    train_step, state = step_of(CLIPPED), make_state(CLIPPED)
    step = autopar.parallelize(train_step, method=AutoParallel(options=budget(state, 1.0, 1)))
    check_training(step, train_step, state, batch)
    text = step.last_executable.plan.explain(detail="full")
    assert "host memory: " in text and "in host memory" in text
    assert "transfers from host memory" in text


def test_on_a_mesh(batch) -> None:
    train_step, state = step_of(CLIPPED), make_state(CLIPPED)
    method = ShardParallel((8,), options=budget(state, 1.3, 8))
    step = autopar.parallelize(train_step, method=method)
    mine = check_training(step, train_step, state, batch)
    moment = next(
        x for x in jax.tree.leaves(mine["opt"]) if x.sharding.memory_kind == "pinned_host"
    )
    assert moment.sharding.shard_shape(moment.shape) != moment.shape  # split: fewer bytes to fetch


@pytest.mark.ci
def test_with_micro_batches(one_device, batch) -> None:
    train_step, state = step_of(CLIPPED), make_state(CLIPPED)
    method = ShardParallel(num_micro_batches=2, options=budget(state, 1.0, 1))
    step = autopar.parallelize(train_step, method=method)
    check_training(step, train_step, state, batch)
    assert step.last_executable.plan.num_micro_batches == 2


@pytest.mark.ci
def test_bfloat16_parameters_with_a_float32_copy(one_device, batch) -> None:
    """The copy, which only the update reads, is in host memory too."""

    def init(params):
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return wide, optax.adam(1e-3).init(wide)

    def update(grads, state, params):
        wide, inner = state
        wide_grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, inner = optax.adam(1e-3).update(wide_grads, inner)
        new = optax.apply_updates(wide, updates)
        change = jax.tree.map(lambda n, p: n.astype(p.dtype) - p, new, params)
        return change, (new, inner)

    tx = optax.GradientTransformation(init, update)
    train_step, state = step_of(tx), make_state(tx, jnp.bfloat16)
    method = ShardParallel(options=budget(state, 0.75, 1))
    step = autopar.parallelize(train_step, method=method)
    mine = check_training(step, train_step, state, batch, num_steps=2)
    assert "pinned_host" in kinds(mine["opt"][0])


def narrow_loss_of(params, batch):
    """float32 parameters, products in bfloat16."""
    x = batch["x"].astype(jnp.bfloat16)
    for w in params:
        x = jnp.tanh(x @ w.astype(jnp.bfloat16))
    return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)


def recomputed_loss_of(params, batch):
    """The same, recomputing each layer: the backward pass casts once more, behind a barrier."""
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w.astype(jnp.bfloat16)))
    x = batch["x"].astype(jnp.bfloat16)
    for w in params:
        x = layer(x, w)
    return jnp.mean((x.astype(jnp.float32) - batch["y"]) ** 2)


def check_parameters_on_host(step, train_step, state, batch, rtol: float = 1e-5):
    """Returns the last state."""
    reference, mine = state, jax.tree.map(jnp.copy, state)
    for _ in range(3):
        reference, expected = jax.jit(train_step)(reference, batch)
        mine, loss = step(mine, batch)
        np.testing.assert_allclose(loss, expected, rtol=rtol)
    for got, wanted in zip(jax.tree.leaves(mine), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=1e-2, atol=10 * rtol)
    executable = step.last_executable
    plan = executable.plan
    assert plan.host is not None and plan.host.parameters
    assert kinds(mine["params"]) >= {"pinned_host"}
    assert executable.host_bytes() == pytest.approx(plan.host.num_bytes)
    return mine


def planned(train_step, state, batch, method):
    """The step by the plan that is predicted to fit, whatever XLA for CPUs takes: it widens what it
    multiplies."""
    plan = autopar.parallelize(train_step, method=method).plan(state, batch)
    return autopar.parallelize(train_step, method=plan)


@pytest.mark.parametrize("loss", [narrow_loss_of, recomputed_loss_of])
def test_parameters_that_are_cast(one_device, batch, loss) -> None:
    """Two bytes of each parameter stay on the device, beside its gradient."""
    train_step, state = step_of(CLIPPED, loss), make_state(CLIPPED)
    step = planned(train_step, state, batch, AutoParallel(options=budget(state, 0.5, 1)))
    check_parameters_on_host(step, train_step, state, batch)
    text = " ".join(step.last_executable.plan.explain(detail="full").split())
    assert "parameters that are cast to a narrower type" in text


@pytest.mark.ci
def test_cast_parameters_on_a_mesh(batch) -> None:
    train_step, state = step_of(CLIPPED, narrow_loss_of), make_state(CLIPPED)
    method = ShardParallel((8,), options=budget(state, 0.6, 8))
    step = planned(train_step, state, batch, method)
    check_parameters_on_host(step, train_step, state, batch, rtol=1e-3)  # sums of bfloat16


@pytest.mark.ci
def test_cast_parameters_with_micro_batches(one_device, batch) -> None:
    train_step, state = step_of(CLIPPED, narrow_loss_of), make_state(CLIPPED)
    method = ShardParallel(num_micro_batches=2, options=budget(state, 0.7, 1))
    step = planned(train_step, state, batch, method)
    check_parameters_on_host(step, train_step, state, batch)


def saved_and_restored(state: Any, folder: Path) -> Any:
    """The state from a checkpoint of it, in the same memory."""
    autopar.save_checkpoint(folder, state, 1)
    restored = autopar.restore_checkpoint(folder, state)
    for got, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))
        assert got.sharding.memory_kind == wanted.sharding.memory_kind
    return restored


def test_cast_parameters_made_saved_and_evaluated(one_device, batch, tmp_path) -> None:
    train_step, state = step_of(CLIPPED, narrow_loss_of), make_state(CLIPPED)
    step = planned(train_step, state, batch, ShardParallel(options=budget(state, 0.5, 1)))
    create = autopar.parallelize(
        lambda key: make_state(CLIPPED, key=key), method=CreateStateParallel(step, batch)
    )
    made = create(jax.random.key(0))
    assert "pinned_host" in kinds(made["params"])
    made, loss = step(made, batch)
    _, expected = jax.jit(train_step)(state, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    restored = saved_and_restored(made, tmp_path / "checkpoint")
    evaluate = autopar.parallelize(
        lambda state, batch: narrow_loss_of(state["params"], batch), method=FollowParallel(step)
    )
    before = float(evaluate(made, batch))
    assert "pinned_host" in kinds(made["params"])  # nothing was moved
    step.last_executable.plan.save(tmp_path / "plan.json")
    again = autopar.parallelize(
        train_step, method=autopar.ParallelPlan.load(tmp_path / "plan.json")
    )
    _, loss = again(restored, batch)
    assert float(loss) == pytest.approx(before, rel=1e-5)


def test_parameters_that_the_step_computes_with_stay(one_device, batch) -> None:
    train_step, state = step_of(CLIPPED), make_state(CLIPPED)
    step = autopar.parallelize(train_step, method=ShardParallel(options=budget(state, 0.45, 1)))
    with pytest.raises(MemoryBudgetError, match="no parameter can: the step computes with them"):
        step.plan(state, batch)


def test_state_made_saved_and_evaluated(one_device, batch, tmp_path) -> None:
    train_step, state = step_of(CLIPPED), make_state(CLIPPED)
    options = budget(state, 1.0, 1)
    step = autopar.parallelize(train_step, method=ShardParallel(options=options))
    create = autopar.parallelize(
        lambda key: make_state(CLIPPED, key=key), method=CreateStateParallel(step, batch)
    )
    made = create(jax.random.key(0))
    plan = step.last_planned.plan
    assert plan.host is not None
    on_host = {plan.inputs[i].path for i in plan.host.inputs}
    for path, leaf in jax.tree_util.tree_leaves_with_path(made):
        name = "state" + jax.tree_util.keystr(path)
        assert (leaf.sharding.memory_kind == "pinned_host") == (name in on_host)
    again = jax.tree.leaves(made)
    made, loss = step(made, batch)
    _, expected = jax.jit(train_step)(state, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert all(leaf.is_deleted() for leaf in again if leaf.sharding.memory_kind == "pinned_host")

    restored = saved_and_restored(made, tmp_path / "checkpoint")

    evaluate = autopar.parallelize(
        lambda state, batch: loss_of(state["params"], batch), method=FollowParallel(step)
    )
    before = float(evaluate(made, batch))
    assert before == pytest.approx(float(loss_of(made["params"], batch)), rel=1e-5)
    assert "pinned_host" in kinds(made["opt"])  # nothing was moved
    _, loss = step(restored, batch)
    assert float(loss) == pytest.approx(before, rel=1e-5)


def test_old_state_stays_without_donation(one_device, batch) -> None:
    train_step, state = step_of(CLIPPED), make_state(CLIPPED)
    method = ShardParallel(options=budget(state, 1.5, 1))
    step = autopar.parallelize(train_step, method=method, donate_argnums=())
    first, loss = step(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    _, again = step(state, batch)
    assert float(loss) == float(again)
    second, _ = step(first, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert "pinned_host" in kinds(second["opt"])


def test_a_plan_from_a_file_runs(one_device, batch, tmp_path) -> None:
    train_step, state = step_of(CLIPPED), make_state(CLIPPED)
    method = ShardParallel(options=budget(state, 1.0, 1))
    autopar.parallelize(train_step, method=method).plan(state, batch).save(tmp_path / "plan.json")
    plan = autopar.ParallelPlan.load(tmp_path / "plan.json")
    assert plan.host is not None
    step = autopar.parallelize(train_step, method=plan)
    check_training(step, train_step, state, batch, num_steps=2)


def test_never_is_never(one_device, batch) -> None:
    state = make_state(CLIPPED)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    options = ShardingOptions(memory_budget_bytes=held, host_memory="never")
    step = autopar.parallelize(step_of(CLIPPED), method=ShardParallel(options=options))
    with pytest.raises(MemoryBudgetError, match=r"host memory: not tried: .*never"):
        step.plan(state, batch)


def test_at_most_so_many_bytes(one_device, batch) -> None:
    train_step, state = step_of(CLIPPED), make_state(CLIPPED)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    options = ShardingOptions(memory_budget_bytes=1.3 * held, host_memory=held / 3)
    step = autopar.parallelize(train_step, method=ShardParallel(options=options))
    check_training(step, train_step, state, batch, num_steps=1)
    assert 0 < step.last_executable.host_bytes() <= held / 3


@pytest.mark.parametrize("given", ["always", 0, -1.0, None, True])
def test_other_values_are_refused(given) -> None:
    with pytest.raises(ArgumentError, match=r"host_memory=.*'auto', 'never' or a number of bytes"):
        ShardingOptions(host_memory=given)


def test_pipelines_refuse_host_memory() -> None:
    with pytest.raises(ArgumentError, match="keep their state on the devices"):
        autopar.PipeshardParallel(2, options=ShardingOptions(host_memory=1e9))
