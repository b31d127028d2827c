"""Workers of a cluster write their shards to an object store and read them from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.s3_server import s3_server

pytestmark = pytest.mark.ci  # test_objects stands for object stores, test_two_hosts for Ray

BATCHES = list(np.random.default_rng(0).normal(size=(6, 8, 16)).astype(np.float32))


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with s3_server() as variables:
        autopar.init(cluster="ray", num_hosts=2, devices_per_host=1, env=variables)
        yield
        autopar.shutdown()


def train(state: Any, batch: Any) -> tuple[Any, jax.Array]:
    def loss_of(w: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(batch @ w) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    return {"w": state["w"] - 0.1 * gradient}, loss


def fresh_state() -> dict[str, jax.Array]:
    return {"w": jax.random.normal(jax.random.key(0), (16, 16))}


def run(num_steps: int, folder: str) -> tuple[Any, dict[int, float]]:
    losses: dict[int, float] = {}
    state, _ = autopar.run_training(
        autopar.parallelize(train, method=autopar.Zero3Parallel()),
        fresh_state(),
        BATCHES,
        checkpoint_dir=f"s3://bucket/{folder}",
        checkpoint_every=2,
        num_steps=num_steps,
        on_step=lambda number, loss: losses.update({number: float(loss)}),
    )
    return state, losses


def test_training_goes_on_exactly() -> None:
    want, losses = run(6, "whole")
    run(3, "parts")
    state, rest = run(6, "parts")
    assert rest == {n: losses[n] for n in (4, 5, 6)}
    np.testing.assert_array_equal(state["w"].fetch(), want["w"].fetch())
    assert autopar.checkpoint_steps("s3://bucket/parts") == [4, 6]
    here = autopar.restore_checkpoint("s3://bucket/parts")
    np.testing.assert_array_equal(here["w"], want["w"].fetch())


def test_each_worker_wrote_its_shards() -> None:
    import fsspec

    run(2, "shards")
    names = fsspec.filesystem("s3").find("bucket/shards/step_00000002")
    assert sum(".worker_" in name for name in names) == 2
