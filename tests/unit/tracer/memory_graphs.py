"""Small programs as graphs, and what is in memory in them: for the tests of the memory model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autopar.ir.graph import Graph, NodeKind
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def graph_of(fn, *args, overlaps: bool = False, **options) -> Graph:
    return build_graph(trace_step(fn, args, **options), overlaps=overlaps)


def lives_by_op(graph: Graph) -> dict[str, list[tuple[int, int, tuple[int, ...]]]]:
    """Name of the op that made it -> (start, end, shape) of what is in memory, inputs left out."""
    found: dict[str, list] = {}
    for life in graph.liveness.lives:
        node = graph.nodes[graph.producer[life.value][0]]
        if node.kind is NodeKind.INPUT:
            continue
        if node.kind is NodeKind.FINISH:
            node = graph.nodes[graph.producer[node.operands[0]][0]]
        shape = graph.values[life.value].shape
        found.setdefault(node.name, []).append((life.start, life.end, shape))
    return found


def train(loss_of):
    def step(w, x):
        return jax.tree.map(lambda p, g: p - g, w, jax.grad(lambda w: loss_of(w, x))(w))

    return step
