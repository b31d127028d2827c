"""What one GPU can show: a parallelized step is the jitted step, fused attention included.

Run with `AUTOPAR_TEST_GPU=1 python -m pytest -m gpu tests/gpu`. Several GPUs are not needed; on
more than one, the step is sharded over all of them and must still agree.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from examples.models import build, gpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


def run(step, state, batch, count=3):
    losses = []
    for _ in range(count):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny", "llama-tiny", "moe-tiny"])
def test_equals_jit(name):
    example = build(name)
    batch = example.make_batch()
    expected = run(jax.jit(example.train_step), example.create_state(), batch)
    got = run(autopar.parallelize(example.train_step), example.create_state(), batch)
    np.testing.assert_allclose(got, expected, rtol=2e-3)


def test_fused_attention_passes_through():
    """cuDNN's attention is a custom call with its own partitioning: it must be bound unchanged."""
    config = gpt.GPTConfig(256, 2, 4, seq_len=256, vocab_size=512, dtype=jnp.bfloat16)
    fused = gpt.example(dataclasses.replace(config, attention="cudnn"), 8)
    batch = fused.make_batch()
    expected = run(jax.jit(fused.train_step), fused.create_state(), batch)
    step = autopar.parallelize(fused.train_step)
    got = run(step, fused.create_state(), batch)
    np.testing.assert_allclose(got, expected, rtol=2e-2)
    assert "cudnn" in step.last_executable.hlo_text().lower()


def test_state_is_donated():
    example = build("mlp-tiny")
    state, batch = example.create_state(), example.make_batch()
    step = autopar.parallelize(example.train_step)
    step(state, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_micro_batches_equal_the_whole_batch():
    example = build("gpt-tiny", 8)
    state, batch = example.create_state(), example.make_batch()
    expected, expected_loss = jax.jit(example.train_step)(state, batch)
    method = autopar.ShardParallel((1,), num_micro_batches=4)
    step = autopar.parallelize(example.train_step, method=method, donate_argnums=())
    got, loss = step(state, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3)


def test_recomputed_layers_take_less_memory_and_compute_the_same():
    def blocks(state, batch):
        def loss_of(params):
            x = batch
            for w in params:
                x = x + jax.nn.gelu(x @ w) @ w.T
            return (x**2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), loss

    keys = jax.random.split(jax.random.key(0), 9)
    state = [0.02 * jax.random.normal(k, (512, 2048)) for k in keys[:8]]
    batch = jax.random.normal(keys[8], (8192, 512))
    peaks, results = {}, {}
    for remat in ("none", "all"):
        options = autopar.ShardingOptions(remat=remat)
        method = autopar.ShardParallel((1,), options=options)
        step = autopar.parallelize(blocks, method=method, donate_argnums=())
        results[remat] = step(state, batch)
        peaks[remat] = step.last_executable.memory_bytes()
    assert peaks["all"] < 0.7 * peaks["none"]
    for a, b in zip(*map(jax.tree.leaves, results.values()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)
