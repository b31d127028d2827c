"""Reductions of a `PairwiseProblem`: what is found for many at once is what each has by itself."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, _beats, reduce_problem


def normalised(matrix: np.ndarray) -> np.ndarray:
    matrix = matrix - matrix.min(axis=1)[:, None]
    return matrix - matrix.min(axis=0)


def never_costs_more(cost: np.ndarray, matrices: list[np.ndarray]) -> np.ndarray:
    count = len(cost)
    beats = np.zeros((count, count), dtype=bool)
    for t in range(count):
        for s in range(count):
            most = cost[t] - cost[s] + sum(float((m[t] - m[s]).max()) for m in matrices)
            beats[t, s] = t != s and most <= 0
    return beats


def test_a_strategy_beats_another_if_it_never_costs_more() -> None:
    how_many = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        cost = rng.integers(0, 6, 4).astype(float)
        matrices = [normalised(rng.integers(0, 6, (4, n)).astype(float)) for n in (2, 3)]
        expected = never_costs_more(cost, matrices)
        beats = _beats(cost, matrices, 0.0)
        assert (beats is None) == (not expected.any())
        assert beats is None or np.array_equal(beats, expected)
        how_many.add(int(expected.sum()))
    assert how_many >= {0, 1, 2}


@pytest.mark.parametrize("seed", range(5))
def test_edges_of_a_reduced_problem_are_normalised_and_the_costs_of_choices_unchanged(
    seed: int,
) -> None:
    """A complete graph of six nodes, in which nothing is eliminated."""
    rng = np.random.default_rng(seed)
    counts = [3, 2, 3, 2, 3, 3]
    problem = PairwiseProblem({u: rng.random(n) for u, n in enumerate(counts)})
    for u, height in enumerate(counts):
        for v in range(u + 1, len(counts)):
            problem.add_edge(u, v, rng.random((height, counts[v])))
    problem.edges[0][2] = problem.edges[0][2].copy()
    problem.edges[0][2][0, 0] = FORBIDDEN
    problem.edges[2][0] = problem.edges[0][2].T
    before = problem.copy()
    reduction = reduce_problem(problem, spared=range(len(counts)))
    for row in reduction.problem.edges.values():
        for matrix in row.values():
            assert not matrix.min(axis=0).any() and not matrix.min(axis=1).any()
    for _ in range(50):
        choice = {u: int(rng.integers(n)) for u, n in enumerate(counts)}
        assert reduction.problem.objective(choice) == pytest.approx(before.objective(choice))
