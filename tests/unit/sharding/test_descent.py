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
    problem = random_problem(0)
    moved = Moved(problem, along_edges(problem))
    moved.pass_forward_and_back()
    for place, u in enumerate(moved.order):
        for v in moved.tables[u].keys() - moved.order[:place]:
            assert moved._smallest(v, u) == pytest.approx(0.0, abs=1e-12)
        moved._pass_on(u, moved._before[u], moved._after[u])
