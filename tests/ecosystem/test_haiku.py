"""Haiku's transformed functions and its own models."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from tests.ecosystem.steps import (
    SHARDED,
    TWO_STAGES,
    batch,
    check_close,
    check_functional,
    own,
)

hk = pytest.importorskip("haiku")

OPTIMIZER = optax.adam(1e-2)


def mlp(x: Any) -> Any:
    x = hk.nets.MLP([16, 16], activate_final=True)(x, dropout_rate=0.1, rng=hk.next_rng_key())
    return hk.nets.MLP([16, 16])(hk.LayerNorm(-1, True, True)(x))


@pytest.mark.slow
@pytest.mark.parametrize("method", [SHARDED, TWO_STAGES], ids=["sharded", "stages"])
def test_transform(method: Any) -> None:
    model = hk.transform(mlp)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, key = state
        key, own = jax.random.split(key)

        def loss_fn(params: Any) -> Any:
            return jnp.mean((model.apply(params, own, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    params = model.init(jax.random.key(0), batch()["x"])
    state = (params, OPTIMIZER.init(params), jax.random.key(1))
    _, plan = check_functional(step, state, [batch(0), batch(1)], method)
    assert any(t.path == "state[0]['mlp/~/linear_0']['w']" for t in plan.inputs)


def dense(images: Any) -> Any:
    x = hk.Linear(16, with_bias=False)(hk.Flatten()(images))
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
    return hk.nets.MLP([16, 4])(x)


def convolutions(images: Any) -> Any:
    return hk.nets.MobileNetV1((1, 2), (8, 16), num_classes=4)(images, is_training=True)


def residual(images: Any) -> Any:
    net = hk.nets.ResNet(
        (1, 1, 1, 1), 4, bottleneck=False, channels_per_group=(4, 4, 8, 8), resnet_v2=True
    )
    return net(images, is_training=True)


@pytest.mark.parametrize(
    "function",
    [
        dense,
        pytest.param(convolutions, marks=pytest.mark.slow),
        pytest.param(residual, marks=pytest.mark.slow),
    ],
)
def test_transform_with_state(function: Any) -> None:
    """The averages of BatchNorm are an argument of their own, where the batch would be looked
    for."""
    model = hk.without_apply_rng(hk.transform_with_state(function))

    def step(params: Any, averages: Any, images: Any, labels: Any) -> tuple[Any, Any, Any]:
        def loss_fn(params: Any) -> Any:
            logits, new = model.apply(params, averages, images)
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
            return -jnp.mean(picked), new

        (loss, averages), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), averages, loss

    images = jax.random.normal(jax.random.key(0), (8, 8, 8, 3))
    labels = jnp.arange(8) % 4
    params, averages = model.init(jax.random.key(1), images)
    want, got = (params, averages), own((params, averages))
    serial, parallel = jax.jit(step), autopar.parallelize(step, method=autopar.ShardParallel((8,)))
    for _ in range(2):
        *want, want_loss = serial(*want, images, labels)
        *got, got_loss = parallel(*got, images, labels)
        check_close(got_loss, want_loss)
    check_close(got, want, rtol=1e-3, atol=1e-4)
    plan = parallel.last_executable.plan
    roles = {t.path.split("[")[0]: t.role for t in plan.inputs}
    assert roles == {"params": "state", "averages": "state", "images": "batch", "labels": "batch"}
