"""Operators with constant operands, which are operands of the equation but not of the graph's node:
planning finds the others by their place in the equation, and the sharded step equals `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from tests.equivalence.constructs import assert_same, floats, run

X, W = floats(16, 8), floats(8, 8)
IDS = np.arange(16) % 5
NOTHING = (((), ()), ((), ()))


def gradient(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: ((x @ w).at[3, 2].set(1.0) ** 2).sum())(w)


def scan(w: Any, x: Any) -> Any:
    def body(carry: Any, _: Any) -> tuple[Any, Any]:
        carry = carry.at[0, 1].set(0.5)
        return carry @ w, carry[0, 1]

    return lax.scan(body, x, None, length=3)


def while_loop(w: Any, x: Any) -> Any:
    """As an ODE solver saves its steps: into a buffer, at the trip's index."""

    def body(state: Any) -> Any:
        i, done, table = state
        return i + 1, done.at[i].set(True), table.at[i, i].add(1.0)

    return lax.while_loop(lambda s: s[0] < 3, body, (0, jnp.zeros(8, bool), x @ w))


def cond(w: Any, x: Any) -> Any:
    return lax.cond(w[0, 0] > 0, lambda: x.at[0, 0].set(1.0), lambda: x)


def scatters(w: Any, x: Any) -> Any:
    at = x.at[2, 1]
    total = w.sum()
    return at.set(3.0), at.add(3.0), at.mul(3.0), at.max(3.0), at.min(3.0), total.at[()].set(3.0)


def segments(w: Any, x: Any) -> Any:
    """As a graph network sums over the edges of each node, and counts them."""
    counts = jnp.zeros(5).at[IDS].add(1.0)
    return jax.ops.segment_sum(x @ w, IDS, 5) / counts[:, None]


def slices(w: Any, x: Any) -> Any:
    return lax.dynamic_update_slice(w.sum(), 2.0, ()), lax.dynamic_slice(x, (2, 3), (4, 2))


def products(w: Any, x: Any) -> Any:
    return lax.dot_general(2.0, w, NOTHING), lax.dot_general(x, 2.0, NOTHING)


def scalars(w: Any, x: Any) -> Any:
    return lax.clamp(0.0, x, 1.0), jnp.where(w > 0, 1.0, w), lax.pad(x, 1.0, ((1, 1, 0), (0, 0, 0)))


CASES = (gradient, scan, while_loop, cond, scatters, segments, slices, products, scalars)


@pytest.mark.representatives("while_loop", "scatters")
@pytest.mark.parametrize("fn", CASES, ids=lambda fn: fn.__name__)
def test_constant_operands(fn: Callable[..., Any]) -> None:
    run(fn, W, X, donate_argnums=())


def test_constant_updates_with_micro_batches() -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jax.vmap(lambda row: row.at[2].set(1.0))(x @ w) ** 2)

        value, slope = jax.value_and_grad(loss)(w)
        return w - 0.1 * slope.at[0, 0].set(0.5), value

    method = autopar.ShardParallel((8,), num_micro_batches=2)
    assert_same(autopar.parallelize(step, method=method)(W, X), jax.jit(step)(W, X))


def test_a_scatter_touches_its_updates_even_if_they_are_constant() -> None:
    """One element of four bytes, in an array of 512, beside its two indices."""
    graph = build_graph(trace_step(lambda w, x: x.at[w.astype(int)[0, 0], 1].set(1.0), (W, X)))
    (node,) = [n for n in graph.nodes if n.name == "scatter"]
    assert len(node.operands) == 2 and node.part_bytes == 4.0
    assert max(node.touched_bytes) <= 4.0
    assert node.traffic is not None and max(node.traffic.num_bytes) <= 8.0


@pytest.mark.skipif(
    not hasattr(jax.config, "jax_use_simplified_jaxpr_constants"), reason="an older JAX"
)
def test_literal_arrays_are_captured() -> None:
    """Behind this option of JAX, whole arrays are literals of equations."""
    before = jax.config.jax_use_simplified_jaxpr_constants  # type: ignore[attr-defined]
    jax.config.update("jax_use_simplified_jaxpr_constants", True)
    try:
        run(segments, W, X, donate_argnums=())
    finally:
        jax.config.update("jax_use_simplified_jaxpr_constants", before)
