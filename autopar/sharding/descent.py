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

import numpy as np

from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, largest_allowed

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
        moved.pass_on(order)
        moved.pass_on(order[::-1])
        is_last = number == max_passes or time.monotonic() > deadline
        if is_last or number % _PASSES_PER_CHOICE == 0:
            bound = max(bound, moved.lower_bound())
            candidate = settled(problem, moved.greedy_choice())
            choice = min(choice, candidate, key=problem.objective)
            if is_last or problem.objective(choice) <= bound * (1 + 1e-9):
                break
    return Descent(choice, bound)


class Moved:
    """Copies of the problem's tables, with costs moved between them."""

    def __init__(self, problem: PairwiseProblem, order: list[int]) -> None:
        self.constant = problem.constant
        self.order = order
        # Forbidden entries cost more than any allowed choice, yet leave digits for the rest.
        tables = [*problem.costs.values()]
        tables += [m for u, row in problem.edges.items() for v, m in row.items() if u < v]
        largest = list(map(largest_allowed, tables))
        ceiling = 10 * sum(largest) + 1.0 * (max(largest, default=0.0) == 0.0)
        self.costs = {u: np.minimum(c, ceiling) for u, c in problem.costs.items()}
        self.edges: dict[int, dict[int, np.ndarray]] = {u: {} for u in problem.costs}
        for u, row in problem.edges.items():
            for v, matrix in row.items():
                if u < v:
                    self.edges[u][v] = np.minimum(matrix, ceiling)
                    self.edges[v][u] = self.edges[u][v].T  # a view: both are one table

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
                    banned = matrix >= FORBIDDEN / 2
                    moved.add_edge(u, v, np.where(banned, FORBIDDEN, self.edges[u][v]))
        return moved

    def lower_bound(self) -> float:
        tables = [*self.costs.values()]
        tables += [m for u, row in self.edges.items() for v, m in row.items() if u < v]
        return self.constant + sum(float(np.minimum.reduce(t, axis=None)) for t in tables)

    def pass_on(self, order: list[int]) -> None:
        place = {u: i for i, u in enumerate(order)}
        for u in order:
            around = self.edges[u]
            collected = self.costs[u]
            for matrix in around.values():
                demanded = np.minimum.reduce(matrix, axis=1)
                matrix -= demanded[:, None]
                collected = collected + demanded
            later = [m for v, m in around.items() if place[v] > place[u]]
            share = collected / max(len(later), len(around) - len(later), 1)
            for matrix in later:
                matrix += share[:, None]
            self.costs[u] = collected - share * len(later)

    def greedy_choice(self) -> dict[int, int]:
        choice: dict[int, int] = {}
        for u in self.order:
            cost = self.costs[u]
            for v, matrix in self.edges[u].items():
                # At best, if the neighbour has not chosen yet.
                cost = cost + (matrix[:, choice[v]] if v in choice else matrix.min(axis=1))
            choice[u] = int(np.argmin(cost))
        return choice


def settled(problem: PairwiseProblem, choice: dict[int, int]) -> dict[int, int]:
    """The choice after changing single nodes until none helps."""
    for _ in range(_MAX_SWEEPS):
        changed = False
        for node in choice:
            cost = problem.costs[node]
            for other, matrix in problem.edges.get(node, {}).items():
                cost = cost + matrix[:, choice[other]]
            best = int(np.argmin(cost))
            if cost[best] < cost[choice[node]]:
                choice[node] = best
                changed = True
        if not changed:
            break
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
