"""Message passing: costs move, the cost of every choice does not."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from autopar.sharding.descent import Moved, along_edges, descend
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem

COUNTS = (3, 2, 4, 3)


def random_problem(seed: int) -> PairwiseProblem:
    """A ring with a chord, one entry of which is forbidden."""
    rng = np.random.default_rng(seed)
    problem = PairwiseProblem({u: rng.random(count) for u, count in enumerate(COUNTS)})
    for u, v in ((0, 1), (1, 2), (2, 3), (0, 3), (0, 2)):
        problem.add_edge(u, v, rng.random((COUNTS[u], COUNTS[v])))
    forbidden = problem.edges[0][2].copy()
    forbidden[0, 0] = FORBIDDEN
    problem.edges[0][2], problem.edges[2][0] = forbidden, forbidden.T
    return problem


def choices() -> list[dict[int, int]]:
    return [dict(enumerate(c)) for c in product(*map(range, COUNTS))]


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_changes_its_cost(seed: int) -> None:
    problem = random_problem(seed)
    moved = Moved(problem, along_edges(problem))
    for _ in range(3):
        moved.pass_forward_and_back()
    after = moved.problem(problem)
    for choice in choices():
        before = problem.objective(choice)
        if before < FORBIDDEN / 2:
            assert after.objective(choice) == pytest.approx(before, rel=1e-9)
        else:
            assert after.objective(choice) >= FORBIDDEN / 2


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_rises_to_at_most_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    best = min(map(problem.objective, choices()))
    moved = Moved(problem, along_edges(problem))
    bounds = [moved.lower_bound()]
    for _ in range(20):
        moved.pass_forward_and_back()
        bounds.append(moved.lower_bound())
    assert bounds[-1] <= best * (1 + 1e-9)
    assert bounds[-1] > bounds[0]
    assert all(b >= a - 1e-9 for a, b in pairwise(bounds))
    found = descend(problem)
    assert best * (1 - 1e-9) <= problem.objective(found.choice) < FORBIDDEN / 2


def test_a_later_pass_collects_what_the_first_one_would() -> None:
    """Edges to nodes still to come have nothing new after the first pass."""
    moved = Moved(random_problem(0), along_edges(random_problem(0)))
    moved.pass_forward_and_back()
    for level, step in enumerate(moved._forward):
        middle, end = moved.flat.half_edge[2 * level + 1 : 2 * level + 3]
        after = moved.flat.rows(slice(middle, end))
        assert moved._smallest(after) == pytest.approx(
            np.zeros(after.stop - after.start), abs=1e-12
        )
        moved._pass_on(step)


class NodeByNode:
    """Message passing as its definition says it, for a problem without forbidden entries."""

    def __init__(self, problem: PairwiseProblem, order: list[int]) -> None:
        self.edges, self.order = problem.edges, order
        self.costs = dict(problem.costs)
        self.by = {
            u: {v: np.zeros(len(m)) for v, m in row.items()} for u, row in self.edges.items()
        }

    def smallest(self, u: int, v: int) -> np.ndarray:
        return (self.edges[u][v] + self.by[v][u]).min(axis=1) + self.by[u][v]

    def pass_on(self, order: list[int]) -> None:
        for place, u in enumerate(order):
            targets = [v for v in self.edges[u] if v in order[place + 1 :]]
            collected = self.costs[u]
            for v in self.edges[u]:
                demanded = self.smallest(u, v)
                self.by[u][v] = self.by[u][v] - demanded
                collected = collected + demanded
            share = collected / max(len(targets), len(self.edges[u]) - len(targets), 1)
            for v in targets:
                self.by[u][v] = self.by[u][v] + share
            self.costs[u] = collected - share * len(targets)

    def greedy_choice(self) -> dict[int, int]:
        choice: dict[int, int] = {}
        for u in self.order:
            cost = self.costs[u]
            for v, table in self.edges[u].items():
                known = v in choice
                cost = cost + (
                    table[:, choice[v]] + self.by[u][v] if known else self.smallest(u, v)
                )
            choice[u] = int(np.argmin(cost))
        return choice


def sparse_problem(seed: int) -> PairwiseProblem:
    """Thirty nodes and two edges each on average, so that many have the same level."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5, 30).tolist()
    problem = PairwiseProblem({u: rng.random(count) for u, count in enumerate(counts)})
    for u, v in rng.integers(0, 30, (60, 2)).tolist():
        if u != v:
            problem.add_edge(u, v, rng.random((counts[u], counts[v])))
    for u in range(30):
        problem.edges.setdefault(u, {})
    return problem


@pytest.mark.parametrize("seed", range(5))
def test_levels_at_once_do_what_nodes_do_one_by_one(seed: int) -> None:
    problem = sparse_problem(seed)
    order = along_edges(problem)
    moved, one_by_one = Moved(problem, order), NodeByNode(problem, order)
    assert len(moved.flat.level_node) - 1 < len(order) / 2
    for _ in range(3):
        moved.pass_forward_and_back()
        one_by_one.pass_on(order)
        one_by_one.pass_on(order[::-1])
        after = moved.problem(problem)
        for u in order:
            assert after.costs[u] == pytest.approx(one_by_one.costs[u], abs=1e-12)
        bound = sum(float(cost.min()) for cost in one_by_one.costs.values())
        for u, row in problem.edges.items():
            bound += sum(float(one_by_one.smallest(u, v).min()) for v in row if u < v)
        assert moved.lower_bound() == pytest.approx(bound)
        assert moved.greedy_choice() == one_by_one.greedy_choice()
