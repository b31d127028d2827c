"""Folded graphs that were looked at last: a `Graph` → its `FoldedGraph`.

Graphs that differ in the lives of values alone are folded once.
"""

from __future__ import annotations

from autopar.ir.graph import Graph
from autopar.sharding.fold import fold_repeated_layers
from autopar.sharding.problem import FoldedGraph

_MOST = 2  # each keeps its graph


def fold_graph(graph: Graph, *, fold: bool = True) -> FoldedGraph:
    classes = fold_repeated_layers(graph) if fold else list(range(len(graph.nodes)))
    return FoldedGraph(graph, classes)


class KnownFolds:
    """The last few folded graphs."""

    def __init__(self) -> None:
        self._known: list[tuple[bool, FoldedGraph]] = []

    def of(self, graph: Graph, *, fold: bool = True) -> FoldedGraph:
        for how, folded in self._known:
            if how == fold and _differ_in_lives_alone(folded.graph, graph):
                return folded if folded.graph is graph else folded.of_lives(graph)
        folded = fold_graph(graph, fold=fold)
        self._known = [(fold, folded), *self._known][:_MOST]
        return folded


def _differ_in_lives_alone(one: Graph, other: Graph) -> bool:
    """Whether one was made from the other so."""
    return (
        one.nodes is other.nodes
        and one.values is other.values
        and one.outputs is other.outputs
        and one.state is other.state
    )
