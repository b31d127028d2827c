"""What autopar is held against on one GPU is the same step; the cases are ones that exist."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from benchmarks.one_gpu_cases import (
    GROUPS,
    Case,
    _mean_gradients,
    example_of,
    method_of,
    plain_step,
)


def test_mean_gradients_are_those_of_the_whole_batch() -> None:
    def loss_fn(params, state, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal(3, np.float32)}
    batch = {"x": rng.standard_normal((8, 3), np.float32), "y": np.ones(8, np.float32)}
    state = types.SimpleNamespace(params=params)
    found = _mean_gradients(loss_fn, state, batch, 4)
    assert_close(found, jax.value_and_grad(loss_fn)(params, state, batch))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
def test_accumulation_by_hand_is_the_whole_batch(model: str) -> None:
    case = Case(model, 8, {"num_layers": 1}, micro_batches=4)
    example = example_of(case)
    batch = example.make_batch()

    def first_moments(step):
        # Adam's first moments are the gradients, up to a factor.
        state, loss = jax.jit(step)(example.create_state(), batch)
        return loss, state.opt_state[0].mu

    assert_close(first_moments(plain_step(case)), first_moments(example.train_step))


def assert_close(found, expected) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_cases_can_be_made() -> None:
    for case in (case for group in GROUPS.values() for case in group):
        example = example_of(case)
        assert example.batch_size == case.batch
        assert callable(plain_step(case))
        assert getattr(example.config, "remat", False) == (case.remat == "model")
        method = method_of(case)
        assert method is None or isinstance(method, autopar.ShardParallel)
    with pytest.raises(ValueError, match="no hand-written accumulation"):
        plain_step(dataclasses.replace(GROUPS["moe"][0], micro_batches=2))
