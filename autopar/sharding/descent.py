"""A choice and a lower bound without a solver: from a `PairwiseProblem` to a `Descent`.

*Bound.* The sum of the smallest entries of all tables is a lower bound. It grows when costs move
between nodes and edges in ways that leave the cost of every choice unchanged. Each node in turn
collects the minimal costs of its edges and distributes them over the edges to nodes still to come,
first forward through the graph and then back (sequential tree-reweighted message passing,
Kolmogorov 2006).

*Choice.* On the moved costs, choosing the cheapest strategy node by node is a good start. Then, on
the original costs, each node takes the strategy that is cheapest given its neighbours (iterated
conditional modes, Besag 1986). The total falls with every change, so this ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.sharding.flat_tables import FlatTables, first_smallest, smallest_of
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem

_MAX_PASSES = 30  # forward and backward
_PASSES_PER_CHOICE = 5
_MAX_SWEEPS = 1000


@dataclass(frozen=True)
class Descent:
    choice: dict[int, int]
    lower_bound: float


def descend(
    problem: PairwiseProblem, time_limit_s: float = 1.0, max_passes: int = _MAX_PASSES
) -> Descent:
    order = along_edges(problem)
    moved = Moved(problem, order)
    choice, bound = settled(problem, moved.greedy_choice()), moved.lower_bound()
    deadline = time.monotonic() + time_limit_s
    for number in range(1, max_passes + 1):
        moved.pass_forward_and_back()
        is_last = number == max_passes or time.monotonic() > deadline
        if is_last or number % _PASSES_PER_CHOICE == 0:
            bound = max(bound, moved.lower_bound())
            candidate = settled(problem, moved.greedy_choice())
            choice = min(choice, candidate, key=problem.objective)
            if is_last or problem.objective(choice) <= bound * (1 + 1e-9):
                break
    return Descent(choice, bound)


@dataclass(frozen=True, eq=False)
class _LevelStep:
    """The nodes of a level in one direction of a pass. Numbers of strategies count from the first
    of the level."""

    strategies: slice
    rows: slice  # of edges that they collect from
    order: np.ndarray | None  # of those rows, in which they are added up, if it is another
    places: np.ndarray  # all strategies, then of each row the one to which it is added
    target_rows: slice  # of edges that they distribute over
    target_places: np.ndarray
    num_targets: np.ndarray  # by strategy
    num_shares: np.ndarray


class Moved:
    """The problem's tables, with costs moved between them.

    An edge's table never changes but by a vector along each of its sides, so these are kept beside
    it: moved(u, v) = table(u, v) + moved_by(u, v)[:, None] + moved_by(v, u)[None, :]. All of them
    are one vector here (`FlatTables`), and a level of nodes is passed on at once.
    """

    def __init__(self, problem: PairwiseProblem, order: list[int]) -> None:
        self.constant = problem.constant
        self.order = order
        self.flat = flat = FlatTables(problem, order)
        costs, tables = flat.costs(problem), flat.tables(problem)
        # Forbidden entries cost more than any allowed choice, yet leave digits for the rest.
        largest = flat.largest_allowed(costs, tables)
        ceiling = 10 * sum(largest) + 1.0 * (max(largest, default=0.0) == 0.0)
        self.costs, self.tables = np.minimum(costs, ceiling), np.minimum(tables, ceiling)
        self.moved_by = np.zeros(len(self.flat.row_edge))
        self._first: list[_LevelStep] = []
        self._forward: list[_LevelStep] = []
        self._backward: list[_LevelStep] = []
        self._find_steps()
        self._is_first = True

    def _find_steps(self) -> None:
        """Of the first way forward, of the later ones, and of the way back."""
        flat = self.flat
        for level, (low, high) in enumerate(pairwise(flat.level_node)):
            start, middle, end = flat.half_edge[2 * level : 2 * level + 3]
            nodes, before, after = slice(low, high), slice(start, middle), slice(middle, end)
            self._first.append(self._step(nodes, slice(start, end), after, flat.num_after))
            self._forward.append(self._step(nodes, before, after, flat.num_after))
            self._backward.insert(0, self._step(nodes, after, before, flat.num_before))

    def _step(
        self, nodes: slice, sources: slice, targets: slice, num_targets: np.ndarray
    ) -> _LevelStep:
        flat = self.flat
        start, end = int(flat.node_strategy[nodes.start]), int(flat.node_strategy[nodes.stop])
        rows, target_rows = flat.rows(sources), flat.rows(targets)
        order, places = None, flat.row_strategy[rows] - start
        if sources.start < targets.start < sources.stop:  # two kinds of edges, one after the other
            order = np.argsort(flat.among[flat.row_edge[rows]], kind="stable")
            places = places[order]
        to, around = num_targets[nodes], (flat.num_before + flat.num_after)[nodes]
        sizes = np.diff(flat.node_strategy[nodes.start : nodes.stop + 1])
        return _LevelStep(
            slice(start, end),
            rows,
            order,
            np.concatenate((np.arange(end - start), places)),
            target_rows,
            flat.row_strategy[target_rows] - start,
            np.repeat(to, sizes),
            np.repeat(np.maximum(np.maximum(to, around - to), 1), sizes),
        )

    def problem(self, original: PairwiseProblem) -> PairwiseProblem:
        """The original with moved costs: the cost of every choice is unchanged."""
        flat = self.flat
        by_node = np.split(self.costs, flat.node_strategy[1:-1])
        costs = {
            u: np.where(cost >= FORBIDDEN / 2, FORBIDDEN, by_node[flat.number[u]])
            for u, cost in original.costs.items()
        }
        moved = PairwiseProblem(costs, {}, self.constant)
        for u, row in original.edges.items():
            for v, matrix in row.items():
                if u < v:
                    table = flat.table_of(u, v, self.tables) + self._by(u, v)[:, None]
                    table += self._by(v, u)
                    moved.add_edge(u, v, np.where(matrix >= FORBIDDEN / 2, FORBIDDEN, table))
        return moved

    def _by(self, u: int, v: int) -> np.ndarray:
        """What u moved to its edge to v, by its strategies."""
        return self.moved_by[self.flat.rows_of(u, v)]

    def lower_bound(self) -> float:
        smallest = self.flat.by_node(self.costs) + self.flat.by_edge(self._smallest())
        return self.constant + sum(smallest)

    def pass_forward_and_back(self) -> None:
        """Each node collects from its edges and distributes, in order and in reverse order. Edges
        to nodes still to come have nothing new for it, except at the very first."""
        for step in self._first if self._is_first else self._forward:
            self._pass_on(step)
        self._is_first = False
        for step in self._backward:
            self._pass_on(step)

    def _pass_on(self, step: _LevelStep) -> None:
        collected = self.costs[step.strategies]
        if step.rows.start < step.rows.stop:
            demanded = self._smallest(step.rows)
            self.moved_by[step.rows] -= demanded
            collected = _added(collected, demanded, step)
        share = collected / step.num_shares
        self.moved_by[step.target_rows] += share[step.target_places]
        self.costs[step.strategies] = collected - share * step.num_targets

    def _smallest(self, rows: slice | None = None) -> np.ndarray:
        """The smallest entry of every row."""
        flat = self.flat
        if rows is None:
            rows = slice(0, len(self.moved_by))
        starts = flat.row_entry[rows.start : rows.stop + 1]
        entries = slice(starts[0], starts[-1])
        moved = self.moved_by.take(flat.theirs[entries], mode="clip")  # the fastest
        moved += self.tables[entries]
        return smallest_of(moved, starts - starts[0]) + self.moved_by[rows]

    def greedy_choice(self) -> dict[int, int]:
        """Of every node, in order, the cheapest strategy given those chosen before."""
        flat = self.flat
        chosen = np.zeros(len(flat.nodes), np.intp)
        cost = self._smallest()  # at best, if the neighbour has not chosen yet
        for level, step in enumerate(self._first):
            start, middle = flat.half_edge[2 * level : 2 * level + 2]
            before = flat.rows(slice(start, middle))
            entries = flat.row_entry[before] + chosen[flat.others[flat.row_edge[before]]]
            cost[before] = self.tables[entries] + self.moved_by[before]
            total = self.costs[step.strategies]
            if step.rows.start < step.rows.stop:
                total = _added(total, cost[step.rows], step)
            nodes = slice(flat.level_node[level], flat.level_node[level + 1])
            starts = flat.node_strategy[nodes.start : nodes.stop + 1] - step.strategies.start
            chosen[nodes] = first_smallest(total, starts)
        by_node = dict(zip(flat.nodes, chosen.tolist(), strict=True))
        return {u: by_node[u] for u in self.order}


def _added(costs: np.ndarray, rows: np.ndarray, step: _LevelStep) -> np.ndarray:
    """Costs by strategy, and what is in the rows of each, added up one after the other."""
    return np.bincount(
        step.places, np.concatenate((costs, rows if step.order is None else rows[step.order]))
    )


def settled(problem: PairwiseProblem, choice: dict[int, int]) -> dict[int, int]:
    """The choice after changing single nodes until none helps. A node is looked at again only once
    a neighbour has changed."""
    waiting = set(choice)
    for _ in range(_MAX_SWEEPS):
        if not waiting:
            break
        for node in choice:
            if node not in waiting:
                continue
            waiting.discard(node)
            cost, around = problem.costs[node], problem.edges.get(node, {})
            for other, matrix in around.items():
                cost = cost + matrix[:, choice[other]]
            best = int(cost.argmin())
            if cost[best] < cost[choice[node]]:
                choice[node] = best
                waiting.update(around)
    return choice


def along_edges(problem: PairwiseProblem) -> list[int]:
    """All nodes, each component from its node with most neighbours outwards."""
    order: list[int] = []
    seen: set[int] = set()
    for start in sorted(problem.costs, key=lambda u: (-problem.degree(u), u)):
        if start in seen:
            continue
        seen.add(start)
        queue = [start]
        for node in queue:
            new = [v for v in sorted(problem.edges.get(node, ())) if v not in seen]
            seen.update(new)
            queue += new
        order += queue
    return order
