"""What a worker does with arrays that a later step may use up while it waits for them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.runtime.remote.executor import _unless_used_up


def test_an_array_that_is_there() -> None:
    assert _unless_used_up(np.asarray, jnp.ones(3)).sum() == 3


@pytest.mark.parametrize("wait", [np.asarray, jax.block_until_ready])
def test_an_array_that_the_next_step_takes_just_before_the_wait(wait: Any) -> None:
    """It was not deleted when the step ended, so no check beforehand can tell."""

    def taken_first(array: jax.Array) -> Any:
        array.delete()
        return wait(array)

    assert _unless_used_up(taken_first, jnp.ones(3)) is None


def test_an_error_of_the_step_itself() -> None:
    def fails(array: jax.Array) -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        _unless_used_up(fails, jnp.ones(3))
