"""Folded graphs that are found once for all searches of a plan."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.graph import Graph, Liveness
from autopar.sharding import known_folds
from autopar.sharding.known_folds import KnownFolds, fold_graph
from autopar.sharding.problem import FoldedGraph
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step
from tests.unit.tracer.memory_graphs import array


def layers() -> Graph:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jnp.tanh(jnp.tanh(x @ w) @ w)
        return x

    return build_graph(trace_step(step, (array(8, 8), array(4, 8))))


def assert_equal(one: FoldedGraph, other: FoldedGraph) -> None:
    assert one.classes == other.classes
    assert one.members == other.members
    assert one.prices == other.prices
    assert one.edges == other.edges


def test_graphs_that_differ_in_lives_alone_are_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folds, graph = KnownFolds(), layers()
    folded = folds.of(graph)
    assert len(set(folded.classes)) < len(graph.nodes)
    other = replace(graph, liveness=Liveness())
    with monkeypatch.context() as patch:
        patch.delattr(known_folds, "fold_repeated_layers")
        assert folds.of(graph) is folded
        again = folds.of(other)
    assert again.graph is other
    assert_equal(again, fold_graph(other))


def test_other_nodes_and_another_way_to_fold_are_folded_anew() -> None:
    folds, graph = KnownFolds(), layers()
    folded = folds.of(graph)
    assert folds.of(layers()) is not folded
    single = folds.of(graph, fold=False)
    assert single.classes == list(range(len(graph.nodes)))
    changed = replace(graph, nodes=graph.nodes[:-1])
    assert len(folds.of(changed).classes) == len(graph.nodes) - 1
