"""Forward, backward and update, told from names and from data flow."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state

from autopar.ir.program import Equation
from autopar.tracer.regions import (
    BACKWARD,
    FORWARD,
    UPDATE,
    equation_regions,
    module_name,
    region_by_name,
)
from autopar.tracer.trace_step import trace_step

BATCH = {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 2), np.float32)}
PARAMS = {"w": np.ones((4, 2), np.float32), "b": np.ones(2, np.float32)}


def regions_of(fn: Any, *args: Any) -> list[tuple[Equation, str]]:
    program = trace_step(fn, args).program
    return list(zip(program.equations, equation_regions(program), strict=True))


def by_name(found: list[tuple[Equation, str]], name: str) -> list[str]:
    return [region for equation, region in found if equation.name == name]


def loss_of(params: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


@pytest.mark.parametrize(
    ("scope", "region", "module"),
    [
        ("jvp(GPT)/Block_0/Dense_1", FORWARD, "GPT/Block_0/Dense_1"),
        ("transpose(jvp(GPT))/Block_0/Dense_1", BACKWARD, "GPT/Block_0/Dense_1"),
        ("jvp()", FORWARD, ""),
        ("transpose(jvp())", BACKWARD, ""),
        ("", None, ""),
        ("Dense_0", None, "Dense_0"),
        ("transpose(jvp(checkpoint))/rematted_computation/Dense_0", BACKWARD, "Dense_0"),
        ("vmap(jvp(Net))/Dense_0", FORWARD, "Net/Dense_0"),
    ],
)
def test_names(scope: str, region: str | None, module: str) -> None:
    assert region_by_name(scope) == region
    assert module_name(scope) == module


def test_plain_jax_train_step() -> None:
    def step(params: Any, batch: Any, count: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        rate = 0.1 / jnp.sqrt(count + 1.0)
        decayed = jax.tree.map(lambda p: p * 0.99, params)
        return jax.tree.map(lambda p, g: p - rate * g, decayed, grads), loss, count + 1

    found = regions_of(step, PARAMS, BATCH, 0.0)
    assert by_name(found, "dot_general") == [FORWARD, BACKWARD]
    # The schedule, the decay and the step itself, by what they feed or read.
    assert set(by_name(found, "sqrt")) == {UPDATE}
    outside = [region for equation, region in found if not equation.scope]
    assert set(outside) == {UPDATE}


@pytest.mark.ci
def test_linen_modules_are_named() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2, name="head")(nn.relu(nn.Dense(8, name="body")(x)))

    model = Net()
    params = model.init(jax.random.key(0), BATCH["x"])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    found = regions_of(step, state, BATCH)
    products = [(module_name(e.scope), r) for e, r in found if e.name == "dot_general"]
    assert products == [
        ("Net/body", FORWARD),
        ("Net/head", FORWARD),
        ("Net/head", BACKWARD),
        ("Net/head", BACKWARD),
        ("Net/body", BACKWARD),
    ]
    assert set(by_name(found, "sqrt")) == {UPDATE}


def test_metrics_of_a_named_module_are_forward() -> None:
    def step(params: Any, batch: Any) -> Any:
        grads = jax.grad(loss_of)(params, batch)
        with jax.named_scope("metrics"):
            accuracy = jnp.tanh(batch["x"] @ params["w"]).mean()
        return jax.tree.map(lambda p, g: p - g, params, grads), accuracy

    found = regions_of(step, PARAMS, BATCH)
    assert by_name(found, "tanh") == [FORWARD]


def test_averages_of_the_state_are_update() -> None:
    def step(params: Any, batch: Any, average: Any) -> Any:
        grads = jax.grad(loss_of)(params, batch)
        average = jax.tree.map(lambda a, p: jnp.maximum(a * 0.9, p), average, params)
        return jax.tree.map(lambda p, g: p - g, params, grads), average

    found = regions_of(step, PARAMS, BATCH, PARAMS)
    assert set(by_name(found, "max")) == {UPDATE}


def test_what_feeds_the_forward_pass_is_forward() -> None:
    def step(params: Any, batch: Any) -> Any:
        scaled = {"x": jnp.sin(batch["x"]), "y": batch["y"]}
        grads = jax.grad(loss_of)(params, scaled)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    assert by_name(regions_of(step, PARAMS, BATCH), "sin") == [FORWARD]


def test_without_a_gradient_all_is_forward() -> None:
    found = regions_of(lambda params, batch: loss_of(params, batch) + 1, PARAMS, BATCH)
    assert {region for _, region in found} == {FORWARD}
