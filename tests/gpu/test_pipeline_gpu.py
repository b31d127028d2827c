"""Pipelines on one GPU in this process: two stages that take turns on it, so that programs, copies
between stages and donated buffers run on a real device. `test_many_gpus` has those on several."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

import autopar
from examples.models import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu" and os.environ.get("AUTOPAR_TEST_RANKS") != "cpu",
        reason="needs a GPU",
    ),
]

TAKING_TURNS = autopar.PipeshardParallel(
    4, stages=autopar.UniformStages(2), schedule="interleaved_1f1b"
)


@pytest.fixture(autouse=True)
def _one_device():
    autopar.init(devices=jax.devices()[:1])
    yield
    autopar.shutdown()


@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny", "llama-tiny", "moe-tiny"])
def test_stages_that_take_turns_equal_jit(name):
    example = build(name)
    batch = example.make_batch()
    state, expected = example.create_state(), example.create_state()
    step, jitted = (
        autopar.parallelize(example.train_step, method=TAKING_TURNS),
        jax.jit(example.train_step),
    )
    for _ in range(3):
        state, loss = step(state, batch)
        expected, expected_loss = jitted(expected, batch)
        np.testing.assert_allclose(float(loss), float(expected_loss), rtol=2e-3)
    assert step.last_executable.plan.num_stages == 2


def test_no_buffer_is_left_behind():
    example = build("mlp-tiny")
    state, batch = example.create_state(), example.make_batch()
    step = autopar.parallelize(example.train_step, method=TAKING_TURNS)
    for _ in range(2):
        state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    before = len(jax.live_arrays())
    for _ in range(20):
        state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    assert len(jax.live_arrays()) <= before
