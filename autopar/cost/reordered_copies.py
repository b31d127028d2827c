"""Copies in another order of dimensions: from a `Graph` and its layouts to `Holding`s.

XLA for GPUs reduces partial sums and splits them only by their first dimension in memory, so what
splits another one comes with that dimension first. A kernel that combines such a result with an
array in its own order, as a norm's gradient does with what was normalized, reads a copy of that
array, and so do all later kernels that read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.cost.holding import Holding
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import NodeLayouts, num_shards
from autopar.tracer.costs import REDUCTIONS, UNFUSED
from autopar.tracer.regions import BACKWARD, UPDATE


def reordered_copies(
    graph: Graph, mesh: LogicalMesh, layouts: Sequence[NodeLayouts]
) -> Iterator[Holding]:
    """Of what kernels combine with results that have another order."""
    copied: dict[int, Holding] = {}
    splits = [i for i in range(len(graph.nodes)) if _splits_inner(graph, layouts, i)]
    chains = _Chains(graph) if splits else None
    for index in splits:
        assert chains is not None
        start = graph.liveness.times[index]
        for value in chains.combined_with(graph.nodes[index].results[0]):
            made, result = graph.producer[value]
            size = graph.values[value].num_bytes / num_shards(layouts[made][1][result], mesh.shape)
            source = chains.source(value)
            copied[source] = Holding(value, start, chains.last_made_of(source, start), size, True)
    yield from copied.values()


class _Chains:
    """Elementwise ops between values of one shape."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.written = {life.value for life in graph.liveness.lives}
        self.readers: dict[int, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            for value in node.operands:
                self.readers.setdefault(value, []).append(index)

    def combined_with(self, value: int) -> list[int]:
        """The first values in memory, or made of one, that kernels of the backward pass combine
        with this one."""
        frontier, seen, found = [value], {value}, dict[int, int]()
        while frontier:
            for index in self.readers.get(frontier.pop(), ()):
                node = self.graph.nodes[index]
                made = node.results[0] if node.results else value
                if not self._is_elementwise(node) or node.region != BACKWARD or made in seen:
                    continue
                if self._shape(made) != self._shape(value):
                    continue
                seen.add(made)
                if made not in self.written:
                    frontier.append(made)
                for other in node.operands:
                    if other not in seen and self._shape(other) == self._shape(value):
                        source = self.source(other)
                        if source in self.written and source not in seen:
                            found.setdefault(source, other)
        return [other for other in found.values() if not self._is_made_of(other, seen)]

    def source(self, value: int) -> int:
        """The value in memory that elementwise ops make a value of; itself if there is none."""
        frontier, seen = [value], {value}
        while frontier:
            one = frontier.pop()
            if one in self.written:
                return one
            node = self.graph.nodes[self.graph.producer[one][0]]
            if self._is_elementwise(node):
                operands = [v for v in node.operands if v not in seen]
                frontier += [v for v in operands if self._shape(v) == self._shape(value)]
                seen.update(operands)
        return value

    def last_made_of(self, source: int, start: int) -> int:
        """When the last kernel after a time writes an array that is made of a value."""
        times = [start]
        for life in self.graph.liveness.lives:
            node = self.graph.nodes[self.graph.producer[life.value][0]]
            if life.start > start and life.value != source and self._is_elementwise(node):
                shape = self._shape(source)
                made_of = [v for v in node.operands if self._shape(v) == shape]
                if any(self.source(v) == source for v in made_of):
                    times.append(life.start)
        return max(times)

    def _is_made_of(self, value: int, others: set[int]) -> bool:
        node = self.graph.nodes[self.graph.producer[value][0]]
        return not others.isdisjoint(node.operands)

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.graph.values[value].shape

    def _is_elementwise(self, node: Node) -> bool:
        if node.kind is not NodeKind.OP:
            return node.kind in (NodeKind.USE, NodeKind.FINISH)
        return node.name not in UNFUSED and node.name not in REDUCTIONS


def _splits_inner(graph: Graph, layouts: Sequence[NodeLayouts], index: int) -> bool:
    """Whether a node reduces partial sums of activations and splits another than their first
    dimension."""
    node = graph.nodes[index]
    if node.kind is not NodeKind.FINISH or node.region == UPDATE:
        return False
    producer, result = graph.producer[node.operands[0]]
    shape = graph.values[node.operands[0]].shape
    if graph.nodes[producer].name != "dot_general" or len(shape) < 3:
        return False
    first = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    before, after = layouts[producer][1][result], layouts[index][0][0]
    return any(a != b and b > first for a, b in zip(before, after, strict=True))
