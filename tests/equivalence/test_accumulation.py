"""A step on micro-batches equals one whole-batch step of `jax.jit`, for every model.

Wide-ResNet is the exception by its statistics: there the reference is the loop that a user would
write, the average of the micro-batches' gradients, with BatchNorm's running statistics from sums
over the whole batch.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path

import autopar
from examples.models import build

NUM = 4
# Adam makes steps of a learning rate's size out of the rounding noise of a gradient that is zero.
WITHOUT_GRADIENT = "['qkv']['bias']"


def mesh_of(shape: tuple[int, ...]) -> autopar.LogicalMesh:
    """Without a price on compute, so that products are split over all devices."""
    axes = len(shape)
    return autopar.LogicalMesh(shape, alpha=(1e-7,) * axes, beta=(1e-9, 2e-9)[:axes])


def check(got: Any, want: Any, learning_rate: float = 1e-3) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, b), a in zip(tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), keystr(path)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        atol = learning_rate if keystr(path).endswith(WITHOUT_GRADIENT) else 2e-5
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=atol, err_msg=keystr(path))


def gradients_in_loop(executable: Any, state: Any) -> list[Any]:
    """Reductions in the loop of arrays that have the shape of a parameter."""
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.params) if leaf.ndim > 1}
    return [
        c
        for c in executable.collectives()
        if c.in_loop and c.kind in ("all-reduce", "reduce-scatter") and shapes & set(c.shapes)
    ]


CASES = [
    ("mlp-tiny", (2, 4), 64),
    ("mlp-tiny", (8,), 64),
    pytest.param("gpt-tiny-scan", (8,), 16, marks=pytest.mark.slow),
    pytest.param("moe-tiny", (2, 4), 32, marks=pytest.mark.slow),
    pytest.param("gpt-tiny", (2, 4), 16, marks=pytest.mark.slow),
    pytest.param("bert-tiny", (8,), 16, marks=pytest.mark.slow),
]


@pytest.mark.representatives("mlp-tiny-mesh_shape0-64")
@pytest.mark.parametrize(("name", "mesh_shape", "batch_size"), CASES)
def test_model_equals_one_whole_batch_step(
    name: str, mesh_shape: tuple[int, ...], batch_size: int
) -> None:
    example = build(name).replace(batch_size=batch_size)
    state, batch = example.create_state(), example.make_batch()
    method = autopar.ShardParallel(mesh_of(mesh_shape), num_micro_batches=NUM)
    step = autopar.parallelize(example.train_step, method=method, donate_argnums=())
    got = step(state, batch)
    check(got, jax.jit(example.train_step)(state, batch), example.config.learning_rate)
    assert step.last_executable.plan.warnings == ()


@pytest.mark.ci
@pytest.mark.parametrize(
    "name",
    [
        "mlp-tiny",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-tiny-scan", "gpt-tiny")),
    ],
)
def test_data_parallel_model_reduces_gradients_once(name: str) -> None:
    example = build(name).replace(batch_size=16)
    state, batch = example.create_state(), example.make_batch()
    method = autopar.DataParallel(num_micro_batches=2)
    step = autopar.parallelize(example.train_step, method=method, donate_argnums=())
    got = step(state, batch)
    check(got, jax.jit(example.train_step)(state, batch), example.config.learning_rate)
    assert gradients_in_loop(step.last_executable, state) == []
    (reduction,) = step.last_executable.collectives()
    assert reduction.kind == "all-reduce" and not reduction.in_loop


def wide_resnet_reference(example: Any, state: Any, batch: Any) -> Any:
    """Micro-batches of every fourth image; gradients averaged; running statistics from the whole
    batch's sums of activations and of their squares."""
    from examples.models.transformer import cross_entropy

    def loss_fn(params: Any, part: Any) -> Any:
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            part["images"],
            mutable=["batch_stats"],
        )
        return jnp.mean(cross_entropy(logits, part["labels"])), updates["batch_stats"]

    value_and_grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    losses, grads, stats = [], [], []
    for i in range(NUM):
        part = {k: v.reshape(-1, NUM, *v.shape[1:])[:, i] for k, v in batch.items()}
        (loss, updated), grad = value_and_grad(state.params, part)
        losses.append(loss)
        grads.append(grad)
        stats.append(updated)

    def whole_batch(path: Any, old: Any, *new: Any) -> Any:
        """Flax keeps 0.99 · old + 0.01 · new, with var = E[x²] − E[x]²."""
        parts = [(n - 0.99 * old) / 0.01 for n in new]
        if path[-1].key == "mean":
            return 0.99 * old + 0.01 * sum(parts) / NUM
        return 0.99 * old + 0.01 * (sum(parts) / NUM + spread[path[:-1]])

    def means(path: Any, old: Any, *new: Any) -> Any:
        parts = jnp.stack([(n - 0.99 * old) / 0.01 for n in new])
        if path[-1].key == "mean":
            spread[path[:-1]] = jnp.var(parts, axis=0)

    spread: dict[Any, Any] = {}
    jax.tree.map_with_path(means, state.batch_stats, *stats)
    batch_stats = jax.tree.map_with_path(whole_batch, state.batch_stats, *stats)
    grad = jax.tree.map(lambda *each: sum(each) / NUM, *grads)
    return state.apply_gradients(grads=grad, batch_stats=batch_stats), sum(losses) / NUM


@pytest.mark.slow
def test_wide_resnet_uses_statistics_of_micro_batches() -> None:
    example = build("wresnet-tiny").replace(batch_size=32)
    state, batch = example.create_state(), example.make_batch()
    # Scales that start at zero would hide the gradients of whole blocks.
    state = state.replace(params=jax.tree.map(lambda x: x + 0.1, state.params))
    method = autopar.ShardParallel(mesh_of((8,)), num_micro_batches=NUM)
    step = autopar.parallelize(example.train_step, method=method, donate_argnums=())
    got = step(state, batch)
    want = wide_resnet_reference(example, state, batch)
    for (path, b), a in zip(tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        size = float(np.max(np.abs(b))) if np.ndim(b) else abs(float(b))
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=1e-3 * size + 1e-5, err_msg=keystr(path))
    warnings = step.last_executable.plan.warnings
    assert any("its own reduction" in text for text in warnings)


def test_plain_function_with_everything_that_users_do() -> None:
    """A masked mean, decay in the loss, clipping, metrics, per-example losses, dropout."""
    rng = np.random.default_rng(0)
    params = {
        "a": rng.normal(size=(8, 16)).astype(np.float32),
        "b": rng.normal(size=(16, 8)).astype(np.float32),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    batch = {
        "x": rng.normal(size=(64, 8)).astype(np.float32),
        "y": rng.normal(size=(64, 8)).astype(np.float32),
        "mask": (rng.random(64) < 0.3).astype(np.float32),
    }

    def step(state: Any, batch: Any, key: Any) -> Any:
        params, opt_state = state

        def loss_fn(params: Any) -> Any:
            hidden = jnp.tanh(batch["x"] @ params["a"])
            keep = jax.random.bernoulli(key, 0.8, hidden.shape)
            out = jnp.where(keep, hidden, 0.0) @ params["b"]
            each = jnp.mean((out - batch["y"]) ** 2, axis=-1)
            loss = jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])
            decay = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
            metrics = {"each": each, "largest": jnp.max(each), "rows": jnp.sum(batch["mask"])}
            return loss + 1e-3 * decay, metrics

        (loss, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss, metrics

    state = (params, optimizer.init(params))
    args = (state, batch, jax.random.key(5))
    want = jax.jit(step)(*args)
    for mesh_shape in ((2, 4), (8,)):
        method = autopar.ShardParallel(mesh_of(mesh_shape), num_micro_batches=NUM)
        parallel = autopar.parallelize(step, method=method, donate_argnums=())
        check(parallel(*args), want)
        assert parallel.last_executable.plan.warnings == ()


@pytest.mark.ci
def test_nnx() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(8, 16, rngs=rngs)
            self.second = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(jnp.tanh(self.first(x)))

    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def step(state: Any, x: Any) -> Any:
        def loss(state: Any) -> Any:
            return jnp.mean(nnx.merge(graph, state)(x) ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    method = autopar.DataParallel(num_micro_batches=NUM)
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    check(parallel(state, x), jax.jit(step)(state, x))


def test_manual_parallel() -> None:
    from jax.sharding import PartitionSpec as P

    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 16)).astype(np.float32)
    x = rng.normal(size=(32, 8)).astype(np.float32)

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w)
        return w - grad, loss

    method = autopar.ManualParallel(
        (4, 2), ("data", "model"), (P(None, "model"), P("data")), num_micro_batches=NUM
    )
    parallel = autopar.parallelize(step, method=method, donate_argnums=())
    check(parallel(w, x), jax.jit(step)(w, x))
    assert [c for c in parallel.last_executable.collectives() if c.in_loop] == []
