"""State made in its shards, and evaluation that follows training: as one device would have it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import autopar
from autopar import CreateStateParallel, FollowParallel, ShardingOptions, ShardParallel
from autopar.errors import ArgumentError
from autopar.runtime.local import LocalExecutable

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 32)).astype(np.float32),
    "y": RNG.normal(size=(16, 8)).astype(np.float32),
}
SPLIT = ShardParallel((2, 4), options=ShardingOptions(allow_replicated_parameters=False))


def assert_same(got: Any, want: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


# -- three kinds of state: (init, train step, loss of an evaluation, what it evaluates)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.tanh(nn.Dense(64)(x)))


def linen_init(key):
    model = Mlp()
    params = model.init(key, BATCH["x"])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def linen_loss(params, batch):
    return ((Mlp().apply({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()


def linen_step(state, batch):
    loss, grads = jax.value_and_grad(linen_loss)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


GRAPH = nnx.graphdef(nnx.eval_shape(lambda: NnxMlp(nnx.Rngs(0))))


def nnx_init(key):
    return nnx.state(NnxMlp(nnx.Rngs(key)))


def nnx_loss(state, batch):
    return ((nnx.merge(GRAPH, state)(batch["x"]) - batch["y"]) ** 2).mean()


def nnx_step(state, batch):
    loss, grads = jax.value_and_grad(nnx_loss)(state, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def dict_init(key):
    up, down = jax.random.split(key)
    params = {"up": jax.random.normal(up, (32, 64)) / 8, "down": jax.random.normal(down, (64, 8))}
    return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}


def dict_loss(params, batch):
    return ((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2).mean()


def dict_step(state, batch):
    loss, grads = jax.value_and_grad(dict_loss)(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, loss


KINDS = {
    "linen": (linen_init, linen_step, linen_loss, lambda state: state.params),
    "nnx": (nnx_init, nnx_step, nnx_loss, lambda state: state),
    "dicts": (dict_init, dict_step, dict_loss, lambda state: state["params"]),
}


@pytest.mark.representatives("nnx")
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_made_where_training_wants_it(kind: str, monkeypatch) -> None:
    init, step, loss, evaluated = KINDS[kind]
    train = autopar.parallelize(step, method=SPLIT)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
    create = autopar.parallelize(init, method=CreateStateParallel(train, shapes))
    state = create(jax.random.key(0))
    want = jax.jit(init)(jax.random.key(0))
    assert_same(state, want)
    planned = train.last_planned
    assert planned is not None
    wanted = [planned.plan.spec_of(t) for t in planned.plan.inputs if t.path.startswith("state")]
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(state)] == wanted
    assert any(spec != P() for spec in wanted)

    # The step takes it as it is, with the plan that was made for it.
    moved = []
    place = LocalExecutable.place
    monkeypatch.setattr(
        LocalExecutable, "place", lambda self, leaves: moved.append(1) or place(self, leaves)
    )
    state, first = train(state, BATCH)
    assert train.last_planned.traced is planned.traced  # it was not planned again
    assert not moved
    want, want_first = jax.jit(step)(want, BATCH)
    np.testing.assert_allclose(first, want_first, rtol=2e-5)
    assert_same(state, want)

    # Evaluation reads it where training keeps it, on a batch of another size.
    batch = {k: v[:6] for k, v in BATCH.items()}
    follow = autopar.parallelize(loss, method=FollowParallel(train))
    np.testing.assert_allclose(
        follow(evaluated(state), batch), jax.jit(loss)(evaluated(want), batch), rtol=2e-5
    )
    assert not moved
    executable = follow.last_executable
    assert executable is not None
    plan = executable.plan
    assert plan.mesh_shape == planned.plan.mesh_shape
    specs = [plan.spec_of(t) for t in plan.inputs if not t.path.startswith("batch")]
    assert specs == [leaf.sharding.spec for leaf in jax.tree.leaves(evaluated(state))]
    # Nothing was donated: training goes on.
    assert_same(train(state, BATCH), jax.jit(step)(want, BATCH))


@pytest.mark.ci
def test_no_parameter_is_ever_whole_on_a_device() -> None:
    """By XLA's own figures: all that a device holds is less than one parameter."""
    size = 1024

    def init(key):
        keys = jax.random.split(key, 2)
        return {f"w{i}": jax.random.normal(k, (size, size)) / 32 for i, k in enumerate(keys)}

    def step(state, batch):
        loss = lambda ws: ((jnp.tanh(batch @ ws["w0"]) @ ws["w1"]) ** 2).mean()  # noqa: E731
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    options = ShardingOptions(allow_replicated_parameters=False)
    train = autopar.parallelize(step, method=ShardParallel((8,), options=options))
    method = CreateStateParallel(train, jax.ShapeDtypeStruct((8, size), jnp.float32))
    create = autopar.parallelize(init, method=method)
    state = create(jax.random.key(1))
    stats = create.last_executable.compiled.memory_analysis()
    parameter_bytes = 4 * size * size
    assert stats.output_size_in_bytes < 1.01 * 2 * parameter_bytes / 8
    assert stats.temp_size_in_bytes + stats.output_size_in_bytes < parameter_bytes
    assert_same(state, jax.jit(init)(jax.random.key(1)))


@pytest.mark.ci
def test_static_arguments_and_further_ones() -> None:
    """The state comes second here, behind the batch; the last argument is static."""

    def step(batch, state, rate, power):
        loss = lambda w: ((batch @ w) ** power).mean()  # noqa: E731
        return state - rate * jax.grad(loss)(state)

    def init(rows, key):
        return jax.random.normal(key, (rows, 16))

    train = autopar.parallelize(step, method=SPLIT, static_argnums=3, batch_argnums=0)
    batch = BATCH["x"]
    method = CreateStateParallel(train, (batch, np.float32(0.1), 2))
    create = autopar.parallelize(init, method=method, static_argnums=0)
    state = create(32, jax.random.key(0))
    want = init(32, jax.random.key(0))
    assert_same(state, want)
    planned = train.last_planned
    assert_same(train(batch, state, np.float32(0.1), 2), step(batch, want, 0.1, 2))
    assert train.last_planned.traced is planned.traced  # it was not planned again

    def evaluate(state, scale, batch):
        return (batch @ state) * scale

    follow = autopar.parallelize(
        evaluate, method=FollowParallel(train), static_argnums=1, batch_argnums=2
    )
    assert_same(follow(want, 3, batch), evaluate(want, 3, batch))
    plan = follow.last_executable.plan
    assert plan.input_specs[0] == planned.plan.input_specs[1]
    assert plan.input_specs[2] == planned.plan.input_specs[0]


def test_the_whole_state_can_be_followed() -> None:
    train = autopar.parallelize(linen_step, method=SPLIT)
    state = jax.eval_shape(linen_init, jax.random.key(0))
    training = train.plan(state, BATCH)
    follow = autopar.parallelize(
        lambda train_state, batch: linen_loss(train_state.params, batch),
        method=FollowParallel(train),
    )
    plan = follow.plan(state, BATCH)
    strip = lambda path: path.partition(".")[2]  # noqa: E731
    ours = {strip(t.path): t.layout for t in plan.inputs if t.role != "batch"}
    theirs = {strip(t.path): t.layout for t in training.inputs if t.role == "state"}
    assert ours == theirs
    assert {t.path: t.layout for t in plan.inputs if t.role == "batch"} == {
        t.path: t.layout for t in training.inputs if t.role == "batch"
    }


def test_evaluation_batches_are_split_as_training_is_where_they_can_be() -> None:
    options = ShardingOptions(batch_axis=("x", "y"))
    train = autopar.parallelize(dict_step, method=ShardParallel((2, 4), options=options))
    state = jax.eval_shape(dict_init, jax.random.key(0))
    train.plan(state, BATCH)
    follow = autopar.parallelize(dict_loss, method=FollowParallel(train))
    for rows, spec in ((24, P(("x", "y"))), (6, P("x")), (3, P())):
        batch = {
            "x": jax.ShapeDtypeStruct((rows, 32), jnp.float32),
            "y": jax.ShapeDtypeStruct((rows, 8), jnp.float32),
        }
        specs = follow.plan(state["params"], batch).input_specs
        assert specs[1] == {"x": spec, "y": spec}


@pytest.mark.ci
def test_on_one_device() -> None:
    autopar.init(devices=jax.devices()[:1])
    try:
        train = autopar.parallelize(dict_step)
        create = autopar.parallelize(dict_init, method=CreateStateParallel(train, BATCH))
        state = create(jax.random.key(0))
        follow = autopar.parallelize(dict_loss, method=FollowParallel(train))
        want = jax.jit(dict_init)(jax.random.key(0))
        assert_same(state, want)
        assert_same(follow(state["params"], BATCH), jax.jit(dict_loss)(want["params"], BATCH))
    finally:
        autopar.shutdown()


# -- mistakes


@pytest.mark.parametrize("method", [lambda f: CreateStateParallel(f, BATCH), FollowParallel])
@pytest.mark.parametrize("step", [dict_step, None, 3, "step"])
def test_what_is_no_parallelized_step(method: Any, step: Any) -> None:
    with pytest.raises(ArgumentError, match=r"made with autopar\.parallelize") as caught:
        method(step)
    assert repr(step) in str(caught.value)


def test_following_a_step_that_has_no_plan() -> None:
    train = autopar.parallelize(dict_step)
    follow = autopar.parallelize(dict_loss, method=FollowParallel(train))
    with pytest.raises(ArgumentError, match=r"no plan yet that dict_loss.*Call the step first"):
        follow(jax.jit(dict_init)(jax.random.key(0))["params"], BATCH)


def test_following_with_nothing_that_training_has() -> None:
    train = autopar.parallelize(dict_step, method=SPLIT)
    train.plan(jax.eval_shape(dict_init, jax.random.key(0)), BATCH)
    follow = autopar.parallelize(lambda other, batch: other * 2, method=FollowParallel(train))
    with pytest.raises(ArgumentError, match=r"no array of <lambda>'s arguments.*state\["):
        follow(jnp.ones((16, 16)), BATCH)


def test_a_step_that_takes_more_than_a_batch() -> None:
    train = autopar.parallelize(lambda state, batch, rate: state - rate * batch.mean())
    create = autopar.parallelize(
        lambda key: jax.random.normal(key, (8, 8)), method=CreateStateParallel(train, jnp.ones(8))
    )
    with pytest.raises(ArgumentError, match=r"takes 2 arguments beside the state.*Give a tuple"):
        create(jax.random.key(0))


def test_a_train_step_that_fails_says_what_it_was_planned_for() -> None:
    train = autopar.parallelize(dict_step)
    create = autopar.parallelize(
        lambda key: {"parameters": jax.random.normal(key, (8, 8))},
        method=CreateStateParallel(train, BATCH),
    )
    with pytest.raises(KeyError) as caught:
        create(jax.random.key(0))
    assert "train step of CreateStateParallel" in " ".join(caught.value.__notes__)


def test_plans_for_other_clusters() -> None:
    train = autopar.parallelize(dict_step)
    for method in (CreateStateParallel(train, BATCH), FollowParallel(train)):
        with pytest.raises(ArgumentError, match="Use parallelize"):
            autopar.plan(
                dict_init, jax.random.key(0), cluster=autopar.ClusterSpec(1, 8), method=method
            )
