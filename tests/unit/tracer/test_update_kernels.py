"""What Adam moves, as XLA's kernels for an H100 do, of layers written out and of layers in a stack.

The figures were read from compiled programs: written out, a layer's parameters and moments are
updated by one kernel. Gradients of layers that are put together in a stack (its scan is written
out) are concatenated anew in the kernel of each moment, and a third kernel reads both moments.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.ir.graph import Graph
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

NUM_LAYERS, WIDTH = 4, 1024
OPTIMIZER = optax.adam(1e-3)
STATE_BYTES = 4 * NUM_LAYERS * WIDTH**2


def update_graph(form: str) -> Graph:
    """Of a chain of products in 16 bits, with parameters in 32."""

    def layer(x, w):
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    def step(state, x):
        params, moments = state

        def loss(params):
            y = x
            if form == "scanned":
                y, _ = jax.lax.scan(layer, y, params)
            else:
                for w in params:
                    y, _ = layer(y, w)
            return y.astype(jnp.float32).sum()

        updates, moments = OPTIMIZER.update(jax.grad(loss)(params), moments, params)
        return (optax.apply_updates(params, updates), moments), x.sum()

    def stacked_step(state, x):
        """Rows of a stack, as a scan is written out."""
        params, moments = state
        rows = [params[i] for i in range(NUM_LAYERS)]

        def loss(rows):
            y = x
            for w in rows:
                y, _ = layer(y, w)
            return y.astype(jnp.float32).sum()

        gradient = jnp.stack(jax.grad(loss)(rows))
        updates, moments = OPTIMIZER.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), x.sum()

    stack = np.zeros((NUM_LAYERS, WIDTH, WIDTH), np.float32)
    params = list(stack) if form == "written out" else stack
    state = (params, OPTIMIZER.init(params))
    x = np.zeros((8, WIDTH), jnp.bfloat16)
    traced = stacked_step if form == "rows of a stack" else step
    return build_graph(trace_step(traced, (state, x), {}, batch_argnums=(1,)))


def moves(graph: Graph, region: str | None = None) -> float:
    """How often the update reads or writes all of the parameters."""
    moved = 0.0
    for node in graph.nodes:
        sizes = [graph.values[v].shape for v in (*node.operands, *node.results)]
        is_state = any(shape[-2:] == (WIDTH, WIDTH) for shape in sizes)
        if node.work is None and is_state and region in (None, node.region):
            moved += node.weight * sum(node.touched_bytes)
    return moved / STATE_BYTES


def num_kernels(graph: Graph) -> float:
    large = [n for n in graph.nodes if n.region == "update" and n.traffic is not None]
    shapes = [graph.values[n.results[0]].shape[-2:] for n in large]
    return sum(
        n.traffic.num_kernels
        for n, shape in zip(large, shapes, strict=True)
        if n.traffic is not None and shape == (WIDTH, WIDTH)
    )


@pytest.mark.parametrize(
    ("form", "expected", "kernels"),
    [("written out", 6.5, NUM_LAYERS), ("rows of a stack", 9.0, 3), ("scanned", 7.0, 1)],
)
def test_an_update_moves_what_its_kernels_do(form: str, expected: float, kernels: int) -> None:
    graph = update_graph(form)
    assert num_kernels(graph) == kernels
    # In 16 bits, a gradient is read where the update makes 32 of them; a scan stacks 32-bit ones.
    gradient = sum(
        sum(node.touched_bytes)
        for node in graph.nodes
        if node.region == "backward"
        and node.name == "transpose"
        and graph.values[node.results[0]].shape == (WIDTH, WIDTH)
    )
    gradients = 0.0 if form == "scanned" else gradient / STATE_BYTES
    assert moves(graph, "update") + gradients == pytest.approx(expected, abs=0.01)


def test_a_kernel_that_concatenates_has_one_result() -> None:
    """Compiled for an H100: no reader of its result and no reader of its operands joins it."""
    half, whole = np.zeros((512, 512), np.float32), np.zeros((512, 1024), np.float32)

    def scaled(a, b, c, d):
        made = jnp.concatenate([a, b], 1) * c
        return made, jnp.sin(made) + d

    def plain(c, d):
        made = c * d
        return made, jnp.sin(made) + d

    for fn, args, expected in ((scaled, (half, half, whole, whole), 2), (plain, (whole, whole), 1)):
        graph = build_graph(trace_step(fn, args, {}, batch_argnums=()))
        found = sum(n.traffic.num_kernels for n in graph.nodes if n.traffic is not None)
        assert found == expected
