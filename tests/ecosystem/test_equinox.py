"""Equinox modules as `eqx.filter_jit` treats them, and equinox's own models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from tests.ecosystem.steps import SHARDED, TWO_STAGES, batch, check_close, check_functional

ONE_AXIS = autopar.ShardParallel((8,))
OPTIMIZER = optax.adam(1e-2)


class Net(eqx.Module):
    """Leaves of every kind: arrays, a function, a text, numbers that are no arrays."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear
    activation: Callable[[Any], Any]
    name: str
    scale: float
    is_deep: bool

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key, 2)
        self.first = eqx.nn.Linear(16, 16, use_bias=False, key=keys[0])  # BatchNorm undoes one
        self.norm = eqx.nn.BatchNorm(16, axis_name="rows", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)
        self.last = eqx.nn.Linear(16, 16, key=keys[1])
        self.activation, self.name, self.scale, self.is_deep = jax.nn.gelu, "net", 0.5, True

    def __call__(self, x: Any, state: Any, key: Any) -> tuple[Any, Any]:
        x, state = self.norm(self.first(x), state)
        x = self.dropout(x, key=key)
        if self.is_deep:  # would be an error if it were traced
            x = self.last(self.activation(x)) * self.scale
        return x, state


def train_step(
    model: Any, state: Any, opt_state: Any, x: Any, y: Any, key: Any, update: bool = True
) -> tuple[Any, Any, Any, Any]:
    @eqx.filter_value_and_grad(has_aux=True)
    def loss_fn(model: Any) -> Any:
        rows = jax.vmap(model, axis_name="rows", in_axes=(0, None, 0), out_axes=(0, None))
        out, new_state = rows(x, state, jax.random.split(key, x.shape[0]))
        return jnp.mean((out - y) ** 2), new_state

    (loss, state), grads = loss_fn(model)
    if update:
        updates, opt_state = OPTIMIZER.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        model = eqx.apply_updates(model, updates)
    return model, state, opt_state, loss


def parts() -> list[Any]:
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    return [model, state, OPTIMIZER.init(eqx.filter(model, eqx.is_array))]


def test_a_module_with_leaves_of_every_kind() -> None:
    got, want = parts(), parts()
    step, serial = autopar.parallelize(train_step, method=ONE_AXIS), eqx.filter_jit(train_step)
    for i in range(2):
        data = (*batch(i).values(), jax.random.key(i))
        *got, got_loss = step(*got, *data)
        *want, want_loss = serial(*want, *data)
        check_close(got_loss, want_loss)
    check_close(got, want)  # Python's numbers are still Python's numbers
    assert got[0].is_deep is True and got[0].activation is jax.nn.gelu
    plan = step.last_executable.plan
    assert [t.path for t in plan.inputs if t.role == "batch"] == ["x", "y"]
    assert {t.path for t in plan.inputs if t.role == "state"} >= {"model.first.weight"}
    assert any(t.path.startswith("state[") and t.role == "state" for t in plan.inputs)


def shallow(model: Any) -> Any:
    return eqx.tree_at(lambda m: (m.is_deep, m.scale), model, (False, 1.0))


def test_leaves_that_are_no_arrays_are_part_of_the_program() -> None:
    def step(model: Any, x: Any, mode: str = "sum") -> tuple[Any, Any]:
        out = x @ model.first.weight * model.scale
        out = out if model.is_deep else -out
        return model, out.sum() if mode == "sum" else out.max()

    parallel, serial = autopar.parallelize(step, method=ONE_AXIS), eqx.filter_jit(step)
    model, x = parts()[0], batch()["x"]
    for _ in range(2):
        for one in (model, shallow(model)):
            for mode in ("sum", "max"):
                got, value = parallel(one, x, mode=mode)
                check_close((got, value), serial(one, x, mode=mode))
    assert len(parallel.compiled_entries()) == 4


@pytest.mark.slow
def test_a_shared_layer_is_one_array() -> None:
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key: Any) -> None:
            pair = (eqx.nn.Embedding(32, 16, key=key), eqx.nn.Linear(16, 32, key=key))
            self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, tokens: Any) -> Any:
            embed, head = self.shared()
            return jax.vmap(lambda token: head(embed(token)))(tokens)

    def step(model: Any, tokens: Any) -> tuple[Any, Any]:
        loss, grads = eqx.filter_value_and_grad(
            lambda model: -jnp.mean(jax.nn.log_softmax(jax.vmap(model)(tokens))[..., 0])
        )(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    tokens = np.arange(32, dtype=np.int32).reshape(8, 4)
    model = Tied(jax.random.key(0))
    got, plan = check_functional(step, model, [tokens] * 2, SHARDED, jit=eqx.filter_jit)
    assert [t.shape for t in plan.inputs].count((32, 16)) == 1
    assert isinstance(got, Tied)


def test_a_method_of_a_module() -> None:
    class Scaled(eqx.Module):
        weight: jax.Array
        factor: float

        @autopar.parallelize(method=ONE_AXIS)
        def apply(self, x: Any) -> Any:
            return (x @ self.weight) * self.factor

    x = batch()["x"]
    for factor in (1.0, 2.0):
        got = Scaled(jnp.eye(16), factor).apply(x)
        np.testing.assert_allclose(got, x * factor, rtol=1e-5)


def attention_step(model: Any, batch: Any) -> tuple[Any, Any]:
    """Over equinox's own attention and MLP."""

    def loss_fn(model: Any) -> Any:
        attention, mlp = model
        out = jax.vmap(lambda x: jax.vmap(mlp)(attention(x, x, x)))(batch["x"])
        return jnp.mean((out - batch["x"]) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), loss


@pytest.mark.slow
@pytest.mark.parametrize("method", [SHARDED, TWO_STAGES], ids=["sharded", "stages"])
def test_models_of_equinox(method: Any) -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    model = (
        eqx.nn.MultiheadAttention(2, 16, key=keys[0]),
        eqx.nn.MLP(16, 16, 32, 1, key=keys[1]),
    )
    sequences = {"x": batch()["x"].reshape(8, 2, 16)}
    check_functional(attention_step, model, [sequences] * 2, method, jit=eqx.filter_jit)


def test_what_is_no_array_is_part_of_the_program_without_equinox_too() -> None:
    """`jax.jit` refuses it; here it is static, and comes back as it was."""

    def step(state: Any, batch: Any) -> Any:
        scale = 2.0 if batch["mode"] == "twice" else 1.0
        weight = state["w"] + scale * jnp.mean(state["f"](batch["x"]))
        return {"w": weight, "f": state["f"]}, weight

    parallel = autopar.parallelize(step, method=SHARDED)
    for mode, scale in (("once", 1.0), ("twice", 2.0)):
        state = {"w": jnp.ones(()), "f": jnp.sin}
        new, weight = parallel(state, batch() | {"mode": mode})
        assert new["f"] is jnp.sin
        wanted = 1.0 + scale * np.mean(np.sin(batch()["x"]))
        np.testing.assert_allclose(weight, wanted, rtol=1e-5)
    assert len(parallel.compiled_entries()) == 2
