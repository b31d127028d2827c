"""A choice for a pairwise problem by local search, for a solver that ran out of time without one.

From a `PairwiseProblem` to a strategy per node: first greedily, node by node along the edges, each
taking what is cheapest beside the neighbours that have chosen; then in sweeps, each node taking
what is cheapest beside all its neighbours (iterated conditional modes, Besag 1986), until none
changes. The total falls with every change, so it ends. Nothing is proven about how good it is.
"""

from __future__ import annotations

import numpy as np

from autopar.sharding.reduce import PairwiseProblem

_MAX_SWEEPS = 1000


def descend(problem: PairwiseProblem) -> dict[int, int]:
    """A strategy index for every node of the problem."""
    choice: dict[int, int] = {}
    for node in _along_edges(problem):
        cost = problem.costs[node]
        for other, matrix in problem.edges.get(node, {}).items():
            chosen = choice.get(other)
            # What the neighbour would at best add, as long as it has not chosen.
            cost = cost + (matrix.min(axis=1) if chosen is None else matrix[:, chosen])
        choice[node] = int(np.argmin(cost))
    for _ in range(_MAX_SWEEPS):
        if not any([_settle(problem, choice, node) for node in choice]):
            break
    return choice


def _settle(problem: PairwiseProblem, choice: dict[int, int], node: int) -> bool:
    """Give one node what is cheapest beside its neighbours; True if that changed anything."""
    cost = problem.costs[node]
    for other, matrix in problem.edges.get(node, {}).items():
        cost = cost + matrix[:, choice[other]]
    best = int(np.argmin(cost))
    if not cost[best] < cost[choice[node]]:
        return False
    choice[node] = best
    return True


def _along_edges(problem: PairwiseProblem) -> list[int]:
    """All nodes, each component from its node of most neighbours outwards."""
    order: list[int] = []
    seen: set[int] = set()
    for start in sorted(problem.costs, key=lambda u: (-problem.degree(u), u)):
        if start in seen:
            continue
        seen.add(start)
        queue = [start]
        for node in queue:
            found = [v for v in sorted(problem.edges.get(node, ())) if v not in seen]
            seen.update(found)
            queue += found
        order += queue
    return order
