"""The tables of a `PairwiseProblem` in one vector: `FlatTables`, on which message passing works.

Tables are small and many, so a call for each would cost more than its arithmetic. Every table lies
here twice, by the rows of either end. A *row* is a strategy of a node and an edge of that node.
Nodes that wait for equally many others, one after another, have no edges between them: a *level*,
whose nodes pass on together. A level's rows are together, those of edges to nodes before it first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem


class FlatTables:
    """
    nodes:         all nodes, level by level.
    node_strategy: of each node, its first strategy; then the number of all.
    edges:         (u, v) and (v, u) of every edge, by level of the first.
    among:         of each edge, its position among those of its first node.
    edge_row:      of each edge, its first row; then the number of all.
    row_entry:     of each row, its first entry; then the number of all.
    row_strategy:  of each row, the strategy that it belongs to.
    row_edge:      of each row, its edge.
    theirs:        of each entry, the row of the other end that it is in.
    level_node:    of each level, its first node; then the number of all.
    half_edge:     of each level, its first edge to nodes before it, and its first to nodes after.
    """

    def __init__(self, problem: PairwiseProblem, order: Sequence[int]) -> None:
        place = {u: i for i, u in enumerate(order)}
        level = _levels(problem, order, place)
        self.nodes = sorted(order, key=level.__getitem__)  # a stable sort
        self.number = {u: i for i, u in enumerate(self.nodes)}
        found = [
            (level[u], place[v] > place[u], i, among, self.number[v])
            for i, u in enumerate(self.nodes)
            for among, v in enumerate(problem.edges.get(u, ()))
        ]
        found.sort()
        levels, is_after, ends, self.among, others = np.array(found, np.intp).reshape(-1, 5).T
        self.edges = [(self.nodes[u], self.nodes[v]) for _, _, u, _, v in found]
        self.edge_number = {pair: i for i, pair in enumerate(self.edges)}
        self.others = others
        counts = np.array([len(problem.costs[u]) for u in self.nodes], np.intp)
        self.node_strategy = starts_of(counts)
        self.heights, self.widths = counts[ends], counts[others]
        self.edge_row = starts_of(self.heights)
        self._find_rows(ends)
        self.num_before = np.bincount(ends[is_after == 0], minlength=len(counts))
        self.num_after = np.bincount(ends[is_after == 1], minlength=len(counts))
        num_levels = 1 + max(level.values(), default=-1)
        node_levels = np.array([level[u] for u in self.nodes], np.intp)
        self.level_node = np.searchsorted(node_levels, np.arange(num_levels + 1)).tolist()
        halves = np.arange(2 * num_levels + 1)
        self.half_edge = np.searchsorted(2 * levels + is_after, halves).tolist()
        # In the problem's own order, in which numbers are summed up.
        self.nodes_in_order = [self.number[u] for u in problem.costs]
        self.edges_in_order = [
            self.edge_number[u, v] for u, row in problem.edges.items() for v in row if u < v
        ]

    def _find_rows(self, ends: np.ndarray) -> None:
        self.row_edge = np.repeat(np.arange(len(self.heights)), self.heights)
        in_edge = np.arange(len(self.row_edge)) - self.edge_row[self.row_edge]
        self.row_strategy = self.node_strategy[ends[self.row_edge]] + in_edge
        lengths = self.widths[self.row_edge]
        self.row_entry = starts_of(lengths)
        number = self.edge_number
        backward = np.array([number[v, u] for u, v in self.edges], np.intp)
        first = self.edge_row[backward[self.row_edge]] - self.row_entry[:-1]
        self.theirs = np.arange(self.row_entry[-1]) + np.repeat(first, lengths)

    def costs(self, problem: PairwiseProblem) -> np.ndarray:
        return np.concatenate([np.zeros(0), *(problem.costs[u] for u in self.nodes)])

    def tables(self, problem: PairwiseProblem) -> np.ndarray:
        """All entries, row by row."""
        return np.concatenate([np.zeros(0), *(problem.edges[u][v].ravel() for u, v in self.edges)])

    def rows(self, edges: slice) -> slice:
        return slice(int(self.edge_row[edges.start]), int(self.edge_row[edges.stop]))

    def rows_of(self, u: int, v: int) -> slice:
        edge = self.edge_number[u, v]
        return self.rows(slice(edge, edge + 1))

    def table_of(self, u: int, v: int, tables: np.ndarray) -> np.ndarray:
        """The table of an edge among all entries, by the strategies of u and v."""
        rows, edge = self.rows_of(u, v), self.edge_number[u, v]
        entries = tables[self.row_entry[rows.start] : self.row_entry[rows.stop]]
        return entries.reshape(self.heights[edge], self.widths[edge])

    def largest_allowed(self, costs: np.ndarray, tables: np.ndarray) -> list[float]:
        """Of every table, in the problem's order, the largest entry that is not forbidden, or 0."""
        of_nodes = largest_of(costs, self.node_strategy)[self.nodes_in_order]
        of_edges = largest_of(tables, self.row_entry[self.edge_row])[self.edges_in_order]
        return [*of_nodes.tolist(), *of_edges.tolist()]

    def by_node(self, values: np.ndarray) -> list[float]:
        """The smallest of every node's values, one per strategy, in the problem's order."""
        return smallest_of(values, self.node_strategy)[self.nodes_in_order].tolist()

    def by_edge(self, values: np.ndarray) -> list[float]:
        """The smallest of every edge's values, one per row, in the problem's order."""
        return smallest_of(values, self.edge_row)[self.edges_in_order].tolist()


def _levels(
    problem: PairwiseProblem, order: Sequence[int], place: dict[int, int]
) -> dict[int, int]:
    level: dict[int, int] = {}
    for u in order:
        before = [level[v] for v in problem.edges.get(u, ()) if place[v] < place[u]]
        level[u] = 1 + max(before, default=-1)
    return level


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Where each begins that follows the one before; then where the last ends."""
    return np.concatenate((np.zeros(1, np.intp), np.cumsum(lengths)))


def smallest_of(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The smallest value of each stretch."""
    if len(starts) == 1:
        return np.zeros(0)
    return np.minimum.reduceat(values, starts[:-1])


def largest_of(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The largest value of each stretch that is not forbidden; 0 if there is none above."""
    if len(starts) == 1:
        return np.zeros(0)
    allowed = np.where(values < FORBIDDEN / 2, values, 0.0)
    return np.maximum(np.maximum.reduceat(allowed, starts[:-1]), 0.0)


def first_smallest(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The position of each stretch's smallest value, the first if there are several."""
    smallest = np.repeat(smallest_of(values, starts), np.diff(starts))
    found = np.flatnonzero(values == smallest)
    return found[np.searchsorted(found, starts[:-1])] - starts[:-1]
