"""A step that nobody has any more leaves no program behind, as under `jax.jit`."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

METHODS = {
    "one mesh": autopar.DataParallel(),
    "stages": autopar.PipeshardParallel(2, stages=autopar.UniformStages(2)),
}


def _train(scale: float, method: Any) -> None:
    @autopar.parallelize(method=method, batch_argnums=(1,))
    def train_step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            hidden = batch
            for weight in weights:
                hidden = jnp.tanh(hidden @ weight) * scale
            return jnp.mean(hidden**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = [np.eye(16, dtype=np.float32)] * 4
    for _ in range(2):
        weights = train_step(weights, np.ones((16, 16), np.float32))
    jax.block_until_ready(weights)


@pytest.mark.parametrize("name", METHODS)
def test_a_dropped_step_leaves_no_program(name: str) -> None:
    client = jax.devices()[0].client
    _train(0.5, METHODS[name])  # what JAX and autopar keep for all steps
    gc.collect()
    before = len(client.live_executables())
    for k in range(3):
        _train(k + 1.0, METHODS[name])
    gc.collect()
    assert len(client.live_executables()) <= before
