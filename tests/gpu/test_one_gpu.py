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
