"""State made on its stages, and evaluations that follow a pipelined train step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import autopar
from autopar import CreateStateParallel, FollowParallel, ManualStages, PipeshardParallel
from autopar.ir.layering import PER_STAGE_OUTPUTS, LayerSource
from autopar.runtime.pipeline import PipelineExecutable

pytestmark = (
    pytest.mark.slow
)  # Minutes of compiling; what follows whom is checked in tests/unit too.

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(16, 16)).astype(np.float32),
    "y": RNG.normal(size=(16, 8)).astype(np.float32),
}
UNEQUAL = ManualStages([[0], [1], [2, 3]], [(1, 2), (1, 2), (1, 4)])


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(8)(x)


def init(key):
    model = Mlp()
    params = model.init(key, BATCH["x"])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))


def loss_of(params, batch):
    return ((Mlp().apply({"params": params}, batch["x"]) - batch["y"]) ** 2).mean()


def step(state, batch):
    loss, grads = jax.value_and_grad(loss_of)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


def trained(stages: Any = UNEQUAL, schedule: str = "1f1b", num: int = 4) -> tuple[Any, Any]:
    train = autopar.parallelize(
        step, method=PipeshardParallel(num, stages=stages, schedule=schedule)
    )
    return train, jax.jit(init)(jax.random.key(0))


def assert_same(got: Any, want: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def moved(executable: Any, leaves: Any) -> int:
    """How many of the arrays do not lie where the program wants them."""
    wanted = executable.input_shardings
    return sum(
        isinstance(leaf, jax.Array) and leaf.sharding != sharding
        for leaf, sharding in zip(jax.tree.leaves(leaves), wanted, strict=True)
    )


def test_state_is_made_on_its_stages() -> None:
    train, _ = trained()
    create = autopar.parallelize(init, method=CreateStateParallel(train, BATCH))
    state = create(jax.random.key(0))
    want = jax.jit(init)(jax.random.key(0))
    assert_same(state, want)
    plan = train.last_planned.plan
    places = [t for t in plan.inputs if t.role == "state"]
    assert {t.stages[0] for t in places} == {0, 1, 2}
    devices = jax.devices()
    for leaf, tensor in zip(jax.tree.leaves(state), places, strict=True):
        on = {devices[d] for d in plan.stages[tensor.stages[0]].devices}
        assert leaf.sharding.device_set == on, tensor.path
        assert leaf.sharding.spec == plan.spec_of(tensor), tensor.path
    # The step takes it as it is.
    state, loss = train(state, BATCH)
    assert train.last_planned.plan is plan
    want, want_loss = jax.jit(step)(want, BATCH)
    assert_same((state, loss), (want, want_loss))


def test_the_program_that_makes_state(tmp_path: Any) -> None:
    train, _ = trained()
    create = autopar.parallelize(init, method=CreateStateParallel(train, BATCH))
    state = create(jax.random.key(0))
    assert not moved(train._compile((state, BATCH), {})[1], (state, BATCH))
    executable = create.last_executable
    assert isinstance(executable, PipelineExecutable)
    assert executable.plan.layering == PER_STAGE_OUTPUTS
    assert list(executable.compiled) == [f"stage{s}_results" for s in range(3)]
    for name, program in executable.compiled.items():
        own = [
            leaf
            for leaf, place in zip(jax.tree.leaves(state), executable.pipeline.outputs, strict=True)
            if name == f"stage{place.stage}_results"
        ]
        made = sum(leaf.addressable_shards[0].data.nbytes for leaf in own)
        assert made <= program.memory_analysis().output_size_in_bytes <= made + 64 * len(own)
    assert executable.memory_bytes() == max(executable.mesh_memory_bytes()) > 0
    assert "// stage2_results" in executable.hlo_text()
    assert all(op.group_size > 1 for op in executable.collectives())
    executable.dump_debug_info(tmp_path)
    assert "each stage computes its own outputs" in (tmp_path / "plan.txt").read_text()
    plan = autopar.ParallelPlan.load(tmp_path / "plan.json")
    again = autopar.parallelize(init, method=plan)
    assert_same(again(jax.random.key(0)), state)
    for one, two in zip(
        jax.tree.leaves(again(jax.random.key(0))), jax.tree.leaves(state), strict=True
    ):
        assert one.sharding == two.sharding
    assert_same(jax.jit(lambda key: create(key).params)(jax.random.key(0)), state.params)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_evaluation_reads_parameters_where_training_has_them(schedule: str) -> None:
    stages = UNEQUAL if schedule == "1f1b" else autopar.UniformStages(4)
    train, want = trained(stages, schedule)
    state, _ = train(want, BATCH)
    want, _ = jax.jit(step)(jax.jit(init)(jax.random.key(0)), BATCH)

    def evaluate(params, batch):
        logits = Mlp().apply({"params": params}, batch["x"])
        return {"loss": ((logits - batch["y"]) ** 2).mean(), "logits": logits}

    follow = autopar.parallelize(evaluate, method=FollowParallel(train))
    assert_same(follow(state.params, BATCH), jax.jit(evaluate)(want.params, BATCH))
    executable = follow.last_executable
    assert isinstance(executable, PipelineExecutable)
    plan = executable.plan
    assert (plan.schedule, plan.num_micro_batches) == ("inference", 4)
    assert plan.method == "FollowParallel()"
    train_plan = train.last_planned.plan
    assert [s.devices for s in plan.stages] == [s.devices for s in train_plan.stages]
    assert not moved(executable, (state.params, jax.tree.map(np.asarray, BATCH)))
    # Nothing was donated: training goes on.
    assert_same(train(state, BATCH), jax.jit(step)(want, BATCH))


def test_the_whole_state_and_another_batch_size() -> None:
    train, want = trained()
    state, _ = train(want, BATCH)
    want, _ = jax.jit(step)(jax.jit(init)(jax.random.key(0)), BATCH)
    follow = autopar.parallelize(
        lambda train_state, batch: loss_of(train_state.params, batch), method=FollowParallel(train)
    )
    for rows, micro_batches in ((8, 4), (6, 1)):
        batch = {k: v[:rows] for k, v in BATCH.items()}
        got = follow(state, batch)
        np.testing.assert_allclose(got, loss_of(want.params, batch), rtol=2e-5)
        executable = follow.last_executable
        assert executable.plan.num_micro_batches == micro_batches
        # Moments that it never reads stay where they are, too.
        assert not moved(executable, (state, batch))


def test_micro_batches_that_would_change_results_are_not_made() -> None:
    train, want = trained()
    state, _ = train(want, BATCH)

    def best(params, batch):
        logits = Mlp().apply({"params": params}, batch["x"])
        return logits / jnp.linalg.norm(logits), jnp.sort(logits[:, 0])

    follow = autopar.parallelize(best, method=FollowParallel(train))
    assert_same(follow(state.params, BATCH), jax.jit(best)(jax.device_get(state.params), BATCH))
    assert follow.last_executable.plan.num_micro_batches == 1


def test_an_evaluation_of_few_layers_uses_the_stages_that_it_needs() -> None:
    train, want = trained()
    state, _ = train(want, BATCH)

    def features(params, batch):
        dense = params["Dense_0"]
        return jnp.tanh(batch["x"] @ dense["kernel"] + dense["bias"])

    follow = autopar.parallelize(features, method=FollowParallel(train))
    params = state.params
    assert_same(follow(params, BATCH), jax.jit(features)(jax.device_get(params), BATCH))
    plan = follow.last_executable.plan
    assert plan.layering.source is LayerSource.BY_ARGUMENTS
    train_plan = train.last_planned.plan
    assert [s.devices for s in plan.stages] == [train_plan.stages[0].devices]


def test_functions_of_parameters_alone() -> None:
    train, want = trained()
    state, _ = train(want, BATCH)
    norm = lambda params: sum((p**2).sum() for p in jax.tree.leaves(params))  # noqa: E731
    follow = autopar.parallelize(norm, method=FollowParallel(train))
    np.testing.assert_allclose(follow(state.params), norm(jax.device_get(state.params)), rtol=1e-5)


def test_a_gradient_can_follow_too() -> None:
    train, want = trained()
    state, _ = train(want, BATCH)
    grad = lambda params, batch: jax.grad(loss_of)(params, batch)  # noqa: E731
    follow = autopar.parallelize(grad, method=FollowParallel(train))
    assert_same(follow(state.params, BATCH), jax.jit(grad)(jax.device_get(state.params), BATCH))
    assert follow.last_executable.plan.schedule == "gpipe"


# -- tied weights, held by two stages, and layers that a scan runs


def tied_step(state, batch):
    def loss(params):
        x = params["embedding"][batch["ids"]]
        for w in params["blocks"]:
            x = x + jnp.tanh(x @ w)
        logits = x @ params["embedding"].T
        labels = jax.nn.one_hot(batch["ids"], logits.shape[-1])
        return optax.softmax_cross_entropy(logits, labels).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def tied_eval(params, batch):
    x = params["embedding"][batch["ids"]]
    for w in params["blocks"]:
        x = x + jnp.tanh(x @ w)
    return jax.nn.log_softmax(x @ params["embedding"].T)


def test_tied_weights() -> None:
    state = {
        "embedding": RNG.normal(size=(32, 16)).astype(np.float32),
        "blocks": [RNG.normal(size=(16, 16)).astype(np.float32) / 4 for _ in range(4)],
    }
    batch = {"ids": RNG.integers(0, 32, size=(8, 4))}
    train = autopar.parallelize(
        tied_step, method=PipeshardParallel(2, stages=autopar.UniformStages(2))
    )
    want, _ = jax.jit(tied_step)(state, batch)
    got, _ = train(state, batch)
    assert_same(got, want)
    follow = autopar.parallelize(tied_eval, method=FollowParallel(train))
    want_eval = jax.jit(tied_eval)(want, batch)
    np.testing.assert_allclose(follow(got, batch), want_eval, rtol=2e-5, atol=2e-5)
    assert not moved(follow.last_executable, (got, batch))
    assert len(follow.last_executable.plan.stages) == 2


def test_layers_that_a_scan_runs() -> None:
    def forward(params, batch):
        def block(x, w):
            return x + jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(block, batch @ params["in"], params["blocks"])
        return (x**2).mean()

    def scan_step(state, batch):
        value, grads = jax.value_and_grad(forward)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    state = {
        "in": RNG.normal(size=(8, 16)).astype(np.float32),
        "blocks": RNG.normal(size=(4, 16, 16)).astype(np.float32) / 4,
    }
    batch = RNG.normal(size=(8, 8)).astype(np.float32)
    train = autopar.parallelize(
        scan_step, method=PipeshardParallel(2, stages=autopar.UniformStages(2))
    )
    want, _ = jax.jit(scan_step)(state, batch)
    got, _ = train(state, batch)
    follow = autopar.parallelize(forward, method=FollowParallel(train))
    np.testing.assert_allclose(follow(got, batch), jax.jit(forward)(want, batch), rtol=2e-5)
    assert not moved(follow.last_executable, (got, batch))
    assert len(follow.last_executable.plan.stages) == 2


def test_the_plan_of_an_evaluation_can_be_saved_and_used(tmp_path: Any) -> None:
    train, want = trained()
    state, _ = train(want, BATCH)
    follow = autopar.parallelize(loss_of, method=FollowParallel(train))
    value = follow(state.params, BATCH)
    follow.last_executable.plan.save(tmp_path / "eval.json")
    plan = autopar.ParallelPlan.load(tmp_path / "eval.json")
    again = autopar.parallelize(loss_of, method=plan)
    np.testing.assert_array_equal(again(state.params, BATCH), value)
    assert not moved(again.last_executable, (state.params, BATCH))
