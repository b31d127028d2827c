"""Scans over some rows of a stack, over rows in groups and over rows of several stacks, as
pipelines: each stage holds its own rows, gradients are not put together to be cut again, and three
steps give what `jax.jit` gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.equivalence.pipelines import check
from tests.equivalence.test_stacks import forward, layer, pipeline, splits, stacked

OPTIMIZER = optax.adam(1e-2, eps=1e-3)


def rows(params: Any, *index: Any) -> Any:
    return jax.tree.map(lambda p: p[slice(*index)], params)


def first_apart(layers: Any, frozen: Any, x: Any) -> Any:
    """One layer of another kind, written by hand."""
    first = jax.tree.map(lambda p: p[0], layers)
    return forward(rows(layers, 1, None), x + jax.nn.gelu(x @ first["w"]) + first["b"])


def halves(layers: Any, frozen: Any, x: Any) -> Any:
    x = 0.5 * forward(rows(layers, 2), x)
    return jax.lax.scan(jax.checkpoint(layer), x, rows(layers, 2, None))[0]


def every_second(layers: Any, frozen: Any, x: Any) -> Any:
    return forward(rows(layers, 1, None, 2), forward(rows(layers, 0, None, 2), x))


def backwards(layers: Any, frozen: Any, x: Any) -> Any:
    return forward(jax.tree.map(lambda p: p[::-1], layers), x)


def periods(layers: Any, frozen: Any, x: Any) -> Any:
    """Two layers in each trip."""

    def two(x: Any, own: Any) -> tuple[Any, None]:
        x, _ = layer(x, jax.tree.map(lambda p: p[0], own))
        return x + layer(x, jax.tree.map(lambda p: p[1], own))[0], None

    grouped = jax.tree.map(lambda p: p.reshape(-1, 2, *p.shape[1:]), layers)
    return jax.lax.scan(two, x, grouped)[0]


def scan_of_periods(layers: Any, frozen: Any, x: Any) -> Any:
    grouped = jax.tree.map(lambda p: p.reshape(2, 2, *p.shape[1:]), layers)
    return jax.lax.scan(lambda x, own: (forward(own, x), None), x, grouped)[0]


def periods_and_rest(layers: Any, frozen: Any, x: Any) -> Any:
    """More layers than whole periods have."""
    x = periods(rows(layers, 4), frozen, x)
    return forward(rows(layers, 4, None), x)


def some_frozen(layers: Any, frozen: Any, x: Any) -> Any:
    return forward(jax.tree.map(lambda *p: jnp.concatenate(p), frozen, layers), x)


# name -> (layers, their number, rows of each part on two stages, on four); None: not on as many
Case = tuple[Callable[[Any, Any, Any], Any], int, Any, Any]
CASES: Mapping[str, Case] = {
    "first apart": (first_apart, 4, {(2, 2)}, {(1, 1, 1, 1)}),
    "halves": (halves, 4, {(2, 2)}, {(1, 1, 1, 1)}),
    "every second": (every_second, 4, None, {(1, 1, 1, 1)}),
    "backwards": (backwards, 4, {(2, 2)}, {(1, 1, 1, 1)}),
    "periods": (periods, 8, {(4, 4)}, {(2, 2, 2, 2)}),
    "scan of periods": (scan_of_periods, 4, {(2, 2)}, {(1, 1, 1, 1)}),
    "periods and rest": (periods_and_rest, 6, {(4, 2)}, None),
    "some frozen": (some_frozen, 2, None, {(1, 1)}),
}


@pytest.mark.representatives("every second-4", "some frozen-4", "periods and rest-2")
@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        pytest.param(name, num_stages, id=f"{name}-{num_stages}")
        for name, (*_, on_two, on_four) in CASES.items()
        for num_stages, wanted in ((2, on_two), (4, on_four))
        if wanted is not None
    ],
)
def test_each_stage_holds_its_own_rows(name: str, num_stages: int) -> None:
    layers, num, *wanted = CASES[name]

    def loss(params: Any, frozen: Any, batch: Any) -> Any:
        return jnp.mean((layers(params, frozen, batch["x"]) - batch["y"]) ** 2)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], state["frozen"], batch)
        updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "opt": opt}, value

    params, frozen = stacked(num), stacked(2, seed=1) if layers is some_frozen else {}
    state = {"params": params, "frozen": frozen, "opt": OPTIMIZER.init(params)}
    executable = check(step, state, pipeline(num_stages)).last_executable
    found = splits(executable.plan)
    assert set(found.values()) == wanted[num_stages == 4]
    assert len(found) == 6 + len(frozen)  # weights, biases and two moments of each
    assert not executable.plan.warnings
    # Only the counter is sent between the loop over micro-batches and the update.
    once = [t for t in executable.pipeline.transfers if t.ref.micro_batch is None]
    assert all(executable.buffers[t.source, t.ref.value].size <= 1 for t in once)
