"""Ragged products on parts of the rows: sizes of groups against counting, and what XLA sends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.lower.ragged_parts import sizes_on_part


@pytest.mark.parametrize("sizes", [[3, 0, 5, 4], [0, 0, 2, 1], [12, 0, 0, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_sizes_are_counted_in_each_part(sizes: list[int], parts: int) -> None:
    each = 12 // parts
    owners = np.full(12, -1)  # rows behind the last group belong to none
    owners[: sum(sizes)] = np.repeat(np.arange(4), sizes)
    for part in range(parts):
        own = owners[part * each : (part + 1) * each]
        found = sizes_on_part(jnp.array(sizes), part * each, each)
        assert found.tolist() == [int((own == group).sum()) for group in range(4)]


@pytest.mark.parametrize("of_weights", [False, True])
def test_each_device_multiplies_its_own_rows(of_weights: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 16)).astype(np.float32)
    w = rng.normal(size=(4, 16, 8)).astype(np.float32)
    sizes = np.array([10, 0, 30, 20], np.int32)

    def product(x: Any, w: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, w, sizes)

    def gradient(x: Any, w: Any, sizes: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(lax.ragged_dot(x, w, sizes))))(w)

    step = gradient if of_weights else product
    parallel = autopar.parallelize(
        step, method=autopar.DataParallel(), batch_argnums=(0,), donate_argnums=()
    )
    found = parallel(x, w, sizes)
    np.testing.assert_allclose(found, jax.jit(step)(x, w, sizes), rtol=1e-5, atol=1e-5)
    text = parallel.last_executable.hlo_text()
    assert "f32[8,16]" in text  # the rows of a device
    assert "all-gather" not in text
    assert ("all-reduce" in text) == of_weights
