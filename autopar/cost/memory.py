"""Bytes per device over time: from a `Graph` and its layouts to a `MemoryProfile`.

`graph.liveness` says which values are in memory when; here they get their sizes. To these come
copies in other layouts, made by collectives, which live while the nodes that read them need them,
and beside them what is sent, if it is written for that alone. A copy that several nodes need in one
layout is made once; in a plan that is short of memory the backward pass makes its own (`refetch`),
so that gathered parameters and activations do not live from the forward pass on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.cost.holding import Holding
from autopar.cost.reordered_copies import reordered_copies
from autopar.ir.graph import Graph, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import NodeLayouts, is_slice, num_shards
from autopar.tracer.costs import REDUCTIONS, UNFUSED, VIEWS
from autopar.tracer.regions import BACKWARD, FORWARD, UPDATE
from autopar.tracer.sums import ADDITIONS


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    holdings: tuple[Holding, ...]
    num_times: int

    @cached_property
    def bytes_at(self) -> np.ndarray:
        change = np.zeros(self.num_times + 2)
        for h in self.holdings:
            change[h.start] += h.num_bytes
            change[h.end + 1] -= h.num_bytes
        return np.cumsum(change)[: self.num_times + 1]

    @property
    def peak_time(self) -> int:
        return int(np.argmax(self.bytes_at))

    @property
    def peak_bytes(self) -> float:
        return float(self.bytes_at.max(initial=0.0))

    def at(self, time: int) -> list[Holding]:
        """The values and copies in memory at a time, largest first."""
        alive = [h for h in self.holdings if h.start <= time <= h.end]
        return sorted(alive, key=lambda h: -h.num_bytes)


def memory_profile(
    graph: Graph, mesh: LogicalMesh, layouts: Sequence[NodeLayouts], *, refetch: bool = False
) -> MemoryProfile:
    graph = _as_it_runs(graph, layouts)
    holdings = []
    for life in graph.liveness.lives:
        node, result = graph.producer[life.value]
        size = graph.values[life.value].num_bytes * life.count
        shards = num_shards(layouts[node][1][result], mesh.shape)
        holdings.append(Holding(life.value, life.start, life.end, size / shards, False))
    holdings += _copies(graph, mesh, layouts, refetch)
    holdings += reordered_copies(graph, mesh, layouts)
    return MemoryProfile(tuple(holdings), len(graph.nodes))


def _as_it_runs(graph: Graph, layouts: Sequence[NodeLayouts]) -> Graph:
    """The graph with the liveness that holds for these layouts."""
    unhidden = graph.liveness.unhidden
    if unhidden is None or _sends_backward(graph, layouts):
        return graph
    return replace(graph, liveness=unhidden)


def _sends_backward(graph: Graph, layouts: Sequence[NodeLayouts]) -> bool:
    """Whether the backward pass of a micro-batch sends anything but sums over all of them."""
    trip = _trip(graph)
    hoisted = frozenset() if graph.liveness.runs_alone else _added_up(graph, trip)
    for index in trip:
        node = graph.nodes[index]
        if node.region != BACKWARD:
            continue
        for position, value in enumerate(node.operands):
            producer, result = graph.producer[value]
            source, target = layouts[producer][1][result], layouts[index][0][position]
            is_sum = NodeKind.MERGE in (node.kind, graph.nodes[producer].kind)
            is_sum = is_sum or value in hoisted
            if not (is_sum or source == target or is_slice(source, target)):
                return True
    return False


def _trip(graph: Graph) -> range:
    """The nodes that run for each micro-batch: the body of the loop through both passes, or all if
    there is none."""
    start = stop = 0
    for index, node in enumerate(graph.nodes):
        if node.kind is NodeKind.MERGE:
            if index >= stop:
                start = index
            stop = max([stop, *(graph.producer[v][0] + 1 for v in node.operands)])
        elif index == stop - 1:
            regions = {node.region for node in graph.nodes[start:stop]}
            if {FORWARD, BACKWARD} <= regions:
                return range(start, stop)
    return range(len(graph.nodes))


def _added_up(graph: Graph, trip: range) -> frozenset[int]:
    """Values of a loop's body that are only added to its carries, after elementwise ops: XLA
    reduces them after the loop, if they are partial sums."""
    carries = {v for node in graph.nodes if node.kind is NodeKind.MERGE for v in node.results}
    others: set[int] = set()  # values with another reader
    found: set[int] = set()
    for index in reversed(trip):
        node = graph.nodes[index]
        added = found.issuperset(node.results) and others.isdisjoint(node.results)
        if node.name in ADDITIONS and not carries.isdisjoint(node.operands):
            added = True
        if added and node.name not in REDUCTIONS and node.name not in UNFUSED:
            found.update(node.operands)
        else:
            others.update(node.operands)
    return frozenset(found - others)


def _copies(
    graph: Graph, mesh: LogicalMesh, layouts: Sequence[NodeLayouts], refetch: bool
) -> Iterator[Holding]:
    spans: dict[tuple, tuple[int, int]] = {}
    sent: dict[tuple, tuple[int, int, float]] = {}
    written = in_memory(graph)
    by_pass = refetch or graph.liveness.runs_alone
    for index, start, end, is_again in graph.liveness.copy_spans():
        node = graph.nodes[index]
        region = BACKWARD if is_again else node.region
        for position, value in enumerate(node.operands):
            producer, result = graph.producer[value]
            source, target = layouts[producer][1][result], layouts[index][0][position]
            if source == target or is_slice(source, target):
                continue
            if node.kind is NodeKind.FINISH:
                # The finished value is counted; its partial sums exist until they are reduced.
                size = graph.values[value].num_bytes / num_shards(source, mesh.shape)
                yield Holding(value, graph.liveness.times[producer], start, size, True)
                continue
            key = (value, target, region if by_pass else "")
            if value not in written and key not in spans:
                size = graph.values[value].num_bytes / num_shards(source, mesh.shape)
                sent[key] = start, end, size
            first, last = spans.get(key, (start, end))
            spans[key] = (min(first, start), max(last, end))
    for (value, *_), (start, end, size) in sent.items():
        yield Holding(value, start, end, size, True)
    for (value, target, _), (start, end) in spans.items():
        size = graph.values[value].num_bytes / num_shards(target, mesh.shape)
        yield Holding(value, start, end, size, True)


def in_memory(graph: Graph) -> frozenset[int]:
    """Values in memory, views of them, and state, which is updated in place. All others have to be
    written before they are sent."""
    found = {life.value for life in graph.liveness.lives}
    for node in graph.nodes:
        is_view = node.name in VIEWS or node.kind in (NodeKind.USE, NodeKind.FINISH)
        if node.region == UPDATE or (is_view and node.operands and node.operands[0] in found):
            found.update(node.results)
    return frozenset(found)
