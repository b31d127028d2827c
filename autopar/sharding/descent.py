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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, largest_allowed

_MAX_PASSES = 30  # forward and backward
_PASSES_PER_CHOICE = 5
_MAX_SWEEPS = 1000


# Of a node's edge: its table, by the neighbour's strategies, what was moved there by the neighbour,
# room for their sum, and what was moved by the node.
_Edge = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


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


class Moved:
    """The problem's tables, with costs moved between them.

    An edge's table never changes but by a vector along each of its sides, so these are kept beside
    it: moved(u, v) = table(u, v) + moved_by[u][v][:, None] + moved_by[v][u][None, :].
    """

    def __init__(self, problem: PairwiseProblem, order: list[int]) -> None:
        self.constant = problem.constant
        self.order = order
        # Forbidden entries cost more than any allowed choice, yet leave digits for the rest.
        tables = [*problem.costs.values()]
        tables += [m for u, row in problem.edges.items() for v, m in row.items() if u < v]
        largest = list(map(largest_allowed, tables))
        ceiling = 10 * sum(largest) + 1.0 * (max(largest, default=0.0) == 0.0)
        self.costs = {u: np.minimum(c, ceiling) for u, c in problem.costs.items()}
        # Both ways round, each by rows: the smallest of every column is soon found.
        self.tables: dict[int, dict[int, np.ndarray]] = {u: {} for u in problem.costs}
        self.moved_by: dict[int, dict[int, np.ndarray]] = {u: {} for u in problem.costs}
        for u, row in problem.edges.items():
            for v, matrix in row.items():
                self.tables[u][v] = np.minimum(matrix, ceiling, order="C")
                self.moved_by[u][v] = np.zeros(len(matrix))
        shapes = {m.shape for row in self.tables.values() for m in row.values()}
        room = np.empty(max((prod(shape) for shape in shapes), default=0))
        rooms = {shape: room[: prod(shape)].reshape(shape) for shape in shapes}
        # Of every edge, what passes read and write, found once: a step of theirs is short.
        self._edges: dict[int, dict[int, _Edge]] = {
            u: {v: self._edge(u, v, rooms) for v in row} for u, row in self.tables.items()
        }
        place = {u: i for i, u in enumerate(order)}
        self._before: dict[int, list[_Edge]] = {u: [] for u in order}
        self._after: dict[int, list[_Edge]] = {u: [] for u in order}
        for u, row in self._edges.items():
            for v, edge in row.items():
                (self._before if place[v] < place[u] else self._after)[u].append(edge)
        self._is_first = True

    def _edge(self, u: int, v: int, rooms: dict[tuple[int, ...], np.ndarray]) -> _Edge:
        table = self.tables[v][u]
        return table, self.moved_by[v][u][:, None], rooms[table.shape], self.moved_by[u][v]

    def problem(self, original: PairwiseProblem) -> PairwiseProblem:
        """The original with moved costs: the cost of every choice is unchanged."""
        costs = {
            u: np.where(original.costs[u] >= FORBIDDEN / 2, FORBIDDEN, cost)
            for u, cost in self.costs.items()
        }
        moved = PairwiseProblem(costs, {}, self.constant)
        for u, row in original.edges.items():
            for v, matrix in row.items():
                if u < v:
                    table = self.tables[u][v] + self.moved_by[u][v][:, None]
                    table += self.moved_by[v][u]
                    moved.add_edge(u, v, np.where(matrix >= FORBIDDEN / 2, FORBIDDEN, table))
        return moved

    def lower_bound(self) -> float:
        smallest = [float(cost.min()) for cost in self.costs.values()]
        for u, row in self.tables.items():
            smallest += [float(self._smallest(v, u).min()) for v in row if u < v]
        return self.constant + sum(smallest)

    def pass_forward_and_back(self) -> None:
        """Each node collects from its edges and distributes, in order and in reverse order. Edges
        to nodes still to come have nothing new for it, except at the very first."""
        for u in self.order:
            is_first, edges = self._is_first, self._edges[u]
            self._pass_on(u, edges.values() if is_first else self._before[u], self._after[u])
        self._is_first = False
        for u in reversed(self.order):
            self._pass_on(u, self._after[u], self._before[u])

    def _pass_on(self, u: int, sources: Iterable[_Edge], targets: Sequence[_Edge]) -> None:
        collected = self.costs[u]
        for table, theirs, room, ours in sources:
            np.add(table, theirs, room)
            demanded = np.minimum.reduce(room, 0)
            demanded += ours
            ours -= demanded
            collected = collected + demanded
        num_targets = len(targets)
        share = collected / max(num_targets, len(self._edges[u]) - num_targets, 1)
        for _, _, _, ours in targets:
            ours += share
        self.costs[u] = collected - share * num_targets

    def _smallest(self, v: int, u: int) -> np.ndarray:
        """For every strategy of u, the smallest entry of its edge to v."""
        table, theirs, room, ours = self._edges[u][v]
        np.add(table, theirs, room)
        return np.minimum.reduce(room, 0) + ours

    def greedy_choice(self) -> dict[int, int]:
        choice: dict[int, int] = {}
        for u in self.order:
            cost = self.costs[u]
            for v in self.tables[u]:
                if v in choice:
                    cost = cost + (self.tables[v][u][choice[v]] + self.moved_by[u][v])
                else:  # at best, if the neighbour has not chosen yet
                    cost = cost + self._smallest(v, u)
            choice[u] = int(np.argmin(cost))
        return choice


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
            best = int(np.argmin(cost))
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
