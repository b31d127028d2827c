"""What a worker does with arrays that a later step may use up while it waits for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.runtime.remote import executor
from autopar.runtime.remote.executor import Executor, _unless_used_up


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


@pytest.mark.parametrize(("left", "has_room"), [(5 * 2**30, True), (5 * 2**30 - 1, False)])
def test_room_is_asked_for_in_pieces(
    left: int, has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def occupied(sizes: list[int], devices: Any) -> None:
        assert devices == ["device"] and max(sizes) == 2**30
        if sum(sizes) > left:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(executor, "occupy", occupied)
    worker: Any = SimpleNamespace(_local=["device"], wait=lambda: None)
    assert Executor.has_room(worker, 5 * 2**30) is has_room
    assert Executor.has_room(worker, 5 * 2**30 - 1)


def test_another_error_is_no_lack_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(sizes: list[int], devices: Any) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

    monkeypatch.setattr(executor, "occupy", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="lost"):
        Executor.has_room(SimpleNamespace(_local=[], wait=lambda: None), 1)  # type: ignore[arg-type]
