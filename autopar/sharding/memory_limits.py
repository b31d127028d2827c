"""Memory use as linear functions of the choice: from a `ShardingProblem` to `Limit`s.

The bytes at a time are Σ over nodes of the results under their strategies, plus Σ over edges of the
copies between pairs of strategies. Lives and copies of one class are added up, so a row does not
grow with depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.cost.memory import in_memory
from autopar.ir.graph import Graph, NodeKind, Rule
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import Layout, is_slice, num_shards
from autopar.sharding.limit import Limit
from autopar.sharding.problem import ShardingProblem
from autopar.sharding.strategies import Strategy, enumerate_strategies

# A value smaller than this share of the budget gets no term; all of them together are within the
# rounding of the estimate.
_SMALLEST_SHARE = 1e-6


class Holdings:
    """Memory use over time by class: arrays over all lives and copies of the graph."""

    def __init__(self, problem: ShardingProblem, budget_bytes: float) -> None:
        self.problem = problem
        smallest = _SMALLEST_SHARE * budget_bytes
        graph, classes = problem.graph, problem.classes
        self.num_times = len(graph.nodes) + 1
        lives: list[tuple] = []
        self.groups: list[tuple[int, int]] = []  # (class, result)
        group_of: dict[tuple[int, int], int] = {}
        for life in graph.liveness.lives:
            size = graph.values[life.value].num_bytes * life.count
            if size < smallest:
                continue
            node, result = graph.producer[life.value]
            key = (classes[node], result)
            group = group_of.setdefault(key, len(group_of))
            lives.append((group, life.start, life.end, size))
        self.groups = list(group_of)
        self.lives = _columns(lives)
        copies: list[tuple] = []
        edge_of: dict[tuple[int, int, int, int, bool, bool], int] = {}
        written = in_memory(graph)
        for index, start, end, _ in graph.liveness.copy_spans():
            node = graph.nodes[index]
            finishes = node.kind is NodeKind.FINISH
            for position, value in enumerate(node.operands):
                size = graph.values[value].num_bytes
                if size < smallest:
                    continue
                producer, result = graph.producer[value]
                is_sent_alone = not finishes and value not in written
                ends = classes[producer], classes[index]
                key = (*ends, result, position, finishes, is_sent_alone)
                edge = edge_of.setdefault(key, len(edge_of))
                if finishes:  # partial sums exist until they are reduced
                    copies.append((edge, graph.liveness.times[producer], start, size))
                else:
                    copies.append((edge, start, max(start, end), size))
        self.edges = list(edge_of)
        self.copies = _columns(copies)
        self._sizes: dict[tuple[int, int], np.ndarray] = {}
        self._shares: dict[tuple, np.ndarray] = {}

    def sizes(self, group: int) -> np.ndarray:
        """The share of a result on one device, by strategy."""
        owner, result = self.groups[group]
        strategies = self.problem.strategies[owner]
        key = (id(strategies), result)
        if key not in self._sizes:
            shape = self.problem.mesh.shape
            self._sizes[key] = np.array(
                [1.0 / num_shards(s.results[result], shape) for s in strategies]
            )
        return self._sizes[key]

    def shares(self, edge: int) -> np.ndarray:
        """The share of a value in its copy, and in what is written for it alone, by the strategies
        of both ends."""
        u, v, result, position, *how = self.edges[edge]
        ups, downs = self.problem.strategies[u], self.problem.strategies[v]
        key = (id(ups), id(downs), result, position, *how)
        if key not in self._shares:
            self._shares[key] = copy_shares(
                ups, downs, result, position, *how, mesh_shape=self.problem.mesh.shape
            )
        return self._shares[key]

    def bytes_at(self, choice: Mapping[int, int]) -> np.ndarray:
        """Bytes on one device at every time."""
        change = np.zeros(self.num_times + 1)
        share = np.array([self.sizes(g)[choice[owner]] for g, (owner, _) in enumerate(self.groups)])
        copied = np.array(
            [self.shares(e)[choice[k[0]], choice[k[1]]] for e, k in enumerate(self.edges)]
        )
        for columns, part in ((self.lives, share), (self.copies, copied)):
            group, start, end, size = columns
            if not len(group):
                continue
            held = size * part[group]
            np.add.at(change, start, held)
            np.add.at(change, end + 1, -held)
        return np.cumsum(change)[: self.num_times]

    def row(self, at: int) -> Limit:
        """The bytes at one time as a linear function of the choice."""
        nodes: dict[int, np.ndarray] = {}
        for group, size in _alive(self.lives, at):
            owner, _ = self.groups[group]
            term = size * self.sizes(group)
            nodes[owner] = nodes[owner] + term if owner in nodes else term
        edges: dict[tuple[int, int], np.ndarray] = {}
        for edge, size in _alive(self.copies, at):
            u, v = self.edges[edge][:2]
            term = size * self.shares(edge)
            if not term.any():
                continue
            if u == v:
                diagonal = np.diagonal(term)
                nodes[u] = nodes[u] + diagonal if u in nodes else diagonal
                continue
            if u > v:
                u, v, term = v, u, term.T
            edges[u, v] = edges[u, v] + term if (u, v) in edges else term
        return Limit(nodes, edges)


def _columns(rows: list[tuple]) -> tuple[np.ndarray, ...]:
    table = np.array(rows, dtype=float).reshape(len(rows), 4)
    return (*(table[:, i].astype(np.int64) for i in range(3)), table[:, 3])


def _alive(columns: tuple[np.ndarray, ...], at: int) -> list[tuple[int, float]]:
    group, start, end, size = columns
    mask = (start <= at) & (at <= end)
    if not mask.any():
        return []
    total = np.bincount(group[mask], weights=size[mask])
    return [(int(g), float(total[g])) for g in np.flatnonzero(total)]


def copy_shares(
    ups: Sequence[Strategy],
    downs: Sequence[Strategy],
    result: int,
    position: int,
    finishes: bool,
    is_sent_alone: bool = False,
    *,
    mesh_shape: tuple[int, ...],
) -> np.ndarray:
    sources, rows = _numbered([s.results[result] for s in ups])
    targets, columns = _numbered([s.operands[position] for s in downs])
    return _copy_table(sources, targets, finishes, is_sent_alone, mesh_shape)[
        rows[:, None], columns
    ]


def _numbered(layouts: Sequence[Layout]) -> tuple[tuple[Layout, ...], np.ndarray]:
    """The distinct layouts, and the number of each among them."""
    numbers: dict[Layout, int] = {}
    places = [numbers.setdefault(layout, len(numbers)) for layout in layouts]
    return tuple(numbers), np.array(places, dtype=np.intp)


@lru_cache(maxsize=16384)
def _copy_table(
    sources: tuple[Layout, ...],
    targets: tuple[Layout, ...],
    finishes: bool,
    is_sent_alone: bool,
    mesh_shape: tuple[int, ...],
) -> np.ndarray:
    table = np.zeros((len(sources), len(targets)))
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            if source != target and not is_slice(source, target):
                table[i, j] = 1.0 / num_shards(source if finishes else target, mesh_shape)
                if is_sent_alone:
                    table[i, j] += 1.0 / num_shards(source, mesh_shape)
    return table


def memory_floor(graph: Graph, mesh: LogicalMesh) -> float:
    """A lower bound on the peak of every choice: every value in its smallest shard."""
    smallest: dict[tuple[Rule, int], float] = {}
    change = np.zeros(len(graph.nodes) + 2)
    for life in graph.liveness.least.lives:
        node, result = graph.producer[life.value]
        key = (graph.nodes[node].rule, result)
        if key not in smallest:
            strategies = enumerate_strategies(key[0], mesh.shape)
            max_shards = max(num_shards(s.results[result], mesh.shape) for s in strategies)
            smallest[key] = 1.0 / max_shards
        size = graph.values[life.value].num_bytes * life.count * smallest[key]
        change[life.start] += size
        change[life.end + 1] -= size
    return float(np.cumsum(change).max(initial=0.0))


@dataclass(frozen=True, eq=False)
class MemoryByRows:
    """The least that a step in micro-batches takes over time, as a function of their number: values
    that hold rows of the batch shrink with it, all others stay.

    num_micro_batches: of the graph that it was read from.
    state: bytes of the arguments on one device, as those below.
    fixed, by_rows: bytes at every time, of values without and with rows.
    """

    num_micro_batches: int
    state: float
    fixed: np.ndarray
    by_rows: np.ndarray

    def floor(self, num_micro_batches: int) -> float:
        """A lower bound on the peak of every plan on as many devices that recomputes nothing more:
        every value divided evenly. The whole batch at once needs no sums of gradients, so only the
        state counts there beside the rows."""
        ratio = self.num_micro_batches / num_micro_batches
        fixed = self.fixed if num_micro_batches > 1 else self.state
        return float((fixed + ratio * self.by_rows).max(initial=0.0))


def memory_by_rows(graph: Graph, num_micro_batches: int, num_devices: int) -> MemoryByRows:
    """`graph`: of a step that loops over so many micro-batches. What is outside of the loop, or
    what it stacks, has the rows of the whole batch, whatever their number."""
    has_rows = {
        result
        for node in graph.nodes
        if node.batch_factor is not None and node.trips >= num_micro_batches
        if node.name != "scan_stack" or node.trips > num_micro_batches
        for result, dims in zip(node.results, node.rule.results, strict=True)
        if any(dim and dim[0] == node.batch_factor for dim in dims)
    }
    changes = np.zeros((2, len(graph.nodes) + 2))
    for life in graph.liveness.least.lives:
        size = graph.values[life.value].num_bytes * life.count / num_devices
        change = changes[int(life.value in has_rows)]
        change[life.start] += size
        change[life.end + 1] -= size
    fixed, by_rows = np.cumsum(changes, axis=1)
    state = sum(graph.values[graph.inputs[i]].num_bytes for i, _ in graph.state) / num_devices
    return MemoryByRows(num_micro_batches, state, fixed, by_rows)
