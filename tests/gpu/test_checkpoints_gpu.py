"""Checkpoints of arrays on a GPU: copied before their buffers are donated, and read back.

Run with `AUTOPAR_TEST_GPU=1 python -m pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


def step(state, batch):
    def loss_of(w):
        return ((batch @ w) ** 2).mean()

    loss, grad = jax.value_and_grad(loss_of)(state["w"])
    m = 0.9 * state["m"] + grad
    return {"w": state["w"] - 0.1 * m, "m": m, "count": state["count"] + 1}, loss


def test_a_donated_state_is_saved_in_the_background_and_restored(tmp_path: Path):
    train = autopar.parallelize(step)
    batch = np.random.default_rng(0).normal(size=(64, 2048)).astype(np.float32)
    state = {"w": jnp.eye(2048), "m": jnp.zeros((2048, 2048)), "count": jnp.int32(0)}
    state, _ = train(state, batch)
    want = jax.tree.map(np.array, state)
    save = autopar.save_checkpoint(tmp_path, state, 1, asynchronous=True)
    losses = []
    for _ in range(3):
        state, loss = train(state, batch)
        losses.append(float(loss))
    assert isinstance(save, autopar.CheckpointSave)
    save.wait()
    back = autopar.restore_checkpoint(tmp_path, train)
    for ours, theirs in zip(jax.tree.leaves(back), jax.tree.leaves(want), strict=True):
        assert isinstance(ours, jax.Array)
        assert {device.platform for device in ours.sharding.device_set} == {"gpu"}
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    again = []
    for _ in range(3):
        back, loss = train(back, batch)
        again.append(float(loss))
    assert again == losses


def test_saving_keeps_no_host_copies(tmp_path: Path):
    x = jnp.ones((1024, 1024))
    autopar.save_checkpoint(tmp_path, {"x": x}, 1)
    assert all(shard.data._npy_value is None for shard in x.addressable_shards)
