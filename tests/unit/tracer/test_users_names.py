"""Errors in the user's function name its arguments and its lines, and nothing of autopar's."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

STATE = {"w": jnp.ones((8, 8))}
BATCH = {"x": jnp.ones((16, 8)), "n": jnp.ones(3, int)}


def branch(state: Any, batch: Any) -> Any:
    return state if batch["x"].sum() > 0 else None


def to_float(state: Any, batch: Any) -> Any:
    return float(state["w"][0, 0]) * batch["x"]


def to_numpy(state: Any, batch: Any) -> Any:
    return state["w"] + np.asarray(batch["x"])


def shape(state: Any, batch: Any) -> Any:
    return state["w"] + jnp.zeros(batch["n"])


class Model:
    def __call__(self, state: Any, batch: Any) -> Any:
        return branch(state, batch)

    def step(self, state: Any, batch: Any) -> Any:
        return branch(state, batch)


CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "branch": (branch, "batch['x']"),
    "float": (to_float, "state['w']"),
    "numpy": (to_numpy, "batch['x']"),
    "shape": (shape, "batch['n']"),
    "a method": (Model().step, "batch['x']"),
    "an object": (Model(), "batch['x']"),
    "a partial": (partial(branch), "batch['x']"),
    "jitted": (jax.jit(branch), "batch['x']"),
}


@pytest.mark.parametrize("name", CASES)
def test_names(name: str) -> None:
    fn, path = CASES[name]
    with pytest.raises(TypeError) as raised:
        autopar.parallelize(fn, method=autopar.ShardParallel((8,)))(STATE, BATCH)
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert path in text or name == "jitted", text
    assert "leaves[" not in text and "autopar/tracer" not in text
    assert f" at {__file__}:" in text
    assert text.count("depends on the value") == 1
    last = traceback.extract_tb(raised.value.__traceback__)
    assert any(frame.filename == __file__ for frame in last[-4:])


def test_an_error_of_the_users_own_is_as_it_was() -> None:
    def step(state: Any, batch: Any) -> Any:
        raise KeyError("leaves[0] of mine", 3)

    with pytest.raises(KeyError) as raised:
        autopar.parallelize(step)(STATE, BATCH)
    assert raised.value.args == ("leaves[0] of mine", 3)
