"""Who makes and who reads each value."""

from __future__ import annotations

import jax.numpy as jnp

from autopar.ir.graph import Graph, NodeKind
from autopar.tracer.dataflow import Dataflow
from tests.unit.tracer.memory_graphs import array, graph_of


def turned() -> Graph:
    return graph_of(
        lambda w, x: jnp.sort((x @ w).T.reshape(-1) + 1.0), array(64, 32), array(16, 64)
    )


def test_a_transpose_that_its_product_makes_is_a_view_of_it() -> None:
    graph = turned()
    flow = Dataflow(graph.nodes, graph.values)
    (transpose,) = [n for n in graph.nodes if n.name == "transpose"]
    (reshape,) = [n for n in graph.nodes if n.name == "reshape"]
    (product,) = [n for n in graph.nodes if n.name == "dot_general"]
    assert flow.source(reshape.results[0]) == transpose.results[0]
    flow = flow.with_turned(transpose.results)
    assert flow.maker(flow.source(reshape.results[0])) is product


def test_only_more_than_a_matrix_is_written_in_another_order() -> None:
    graph = graph_of(lambda x: (x.T, x.reshape(4, 4, 4).transpose(2, 0, 1)), array(4, 16))
    flow = Dataflow(graph.nodes, graph.values)
    found = [flow.is_transpose(n) for n in graph.nodes if n.name == "transpose"]
    assert sorted(found) == [False, True]


def test_readers_of_partial_sums_read_the_finished_value() -> None:
    graph = turned()
    flow = Dataflow(graph.nodes, graph.values)
    (finish,) = [i for i, n in enumerate(graph.nodes) if n.kind is NodeKind.FINISH]
    partial, whole = graph.nodes[finish].operands[0], graph.nodes[finish].results[0]
    assert flow.finished(partial) == flow.finished(whole) == whole
    assert flow.direct_readers[partial] == [finish]


def test_a_filled_array_is_a_constant() -> None:
    graph = graph_of(lambda x: jnp.full((8,), 2.0) * jnp.sort(x), array(8))
    flow = Dataflow(graph.nodes, graph.values)
    made = {n.name: flow.is_constant(n.results[0]) for n in graph.nodes}
    assert made["broadcast_in_dim"] and not made["sort"] and not made["mul"]
