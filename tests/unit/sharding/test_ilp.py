from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pulp
import pytest

from autopar.errors import ArgumentError, SolverError
from autopar.sharding import ilp
from autopar.sharding.ilp import check_solver, known_solvers, solve_ilp
from autopar.sharding.reduce import PairwiseProblem


def dense_problem(num_nodes: int, num_strategies: int, seed: int = 0) -> PairwiseProblem:
    rng = np.random.default_rng(seed)
    costs = {u: rng.random(num_strategies) for u in range(num_nodes)}
    problem = PairwiseProblem(costs, constant=0.25)
    for u, v in combinations(range(num_nodes), 2):
        problem.add_edge(u, v, rng.random((num_strategies, num_strategies)))
    return problem


def test_an_unknown_solver_is_named_with_those_known() -> None:
    with pytest.raises(ArgumentError) as raised:
        check_solver("magic")
    message = str(raised.value)
    assert message.startswith("ShardingOptions(solver='magic'): no such solver.")
    assert "'highs' (bundled)" in message
    for name in known_solvers():
        assert repr(name) in message


def test_the_default_solver_is_known_and_there() -> None:
    check_solver("highs")
    assert known_solvers()[0] == "highs"
    assert [name.lower() for name in known_solvers()].count("highs") == 1


def test_a_solver_that_is_not_installed() -> None:
    installed = set(pulp.listSolvers(onlyAvailable=True))
    missing = [name for name in pulp.listSolvers() if name not in installed]
    assert missing
    with pytest.raises(SolverError, match=r"PuLP knows this solver but it is not installed"):
        check_solver(missing[0])


def test_an_empty_problem_costs_its_constant() -> None:
    result = solve_ilp(PairwiseProblem({}, constant=3.5))
    assert (result.choice, result.objective, result.lower_bound) == ({}, 3.5, 3.5)
    assert result.relaxation_integral


def test_sizes_are_those_of_the_programme() -> None:
    """x: one per strategy, y: one per pair; a row per node and two sets of marginals per edge."""
    problem = PairwiseProblem({0: np.array([1.0, 0.0]), 1: np.array([0.0, 1.0, 2.0])})
    problem.add_edge(0, 1, np.arange(6.0).reshape(2, 3))
    result = solve_ilp(problem)
    assert result.num_variables == 2 + 3 + 6
    assert result.num_constraints == 2 + 2 + 3
    assert result.choice == {0: 0, 1: 0}
    assert result.objective == 1.0


def test_all_costs_zero() -> None:
    problem = PairwiseProblem({0: np.zeros(2), 1: np.zeros(3)})
    problem.add_edge(0, 1, np.zeros((2, 3)))
    result = solve_ilp(problem)
    assert result.objective == result.lower_bound == 0


@pytest.mark.parametrize("unit", [1e-12, 1e12])
def test_costs_in_any_unit(unit: float) -> None:
    problem = dense_problem(4, 3)
    scaled = PairwiseProblem({u: unit * c for u, c in problem.costs.items()}, constant=0.25 * unit)
    for u, v in combinations(range(4), 2):
        scaled.add_edge(u, v, unit * problem.edges[u][v])
    expected = solve_ilp(problem)
    result = solve_ilp(scaled)
    assert result.choice == expected.choice
    assert result.objective == pytest.approx(unit * expected.objective, rel=1e-9)


def test_a_time_limit_gives_the_best_so_far_and_its_gap_or_says_so() -> None:
    """Far too large for a hundredth of a second. Which of the two depends on the machine."""
    problem = dense_problem(30, 6)
    try:
        result = solve_ilp(problem, time_limit_s=0.01)
    except SolverError as error:
        assert "found no sharding within 0 s" in str(error)
        assert "ShardingOptions(solver_time_limit_s=…)" in str(error)
        return
    assert result.objective == pytest.approx(problem.objective(result.choice))
    assert 0 <= result.lower_bound <= result.objective
    rng = np.random.default_rng(1)
    for _ in range(100):  # no plan may be better than the bound
        choice = {u: int(rng.integers(6)) for u in problem.costs}
        assert problem.objective(choice) >= result.lower_bound


def test_a_solver_that_proves_nothing_still_leaves_a_bound(monkeypatch) -> None:
    problem = dense_problem(4, 3)
    best = solve_ilp(problem)

    def unproven(model, *_):
        solution = np.zeros(len(model.cost))
        for node, own in model.node_slices.items():
            solution[own.start + best.choice[node]] = 1.0
        return solution, -math.inf, False

    monkeypatch.setattr(ilp, "_solve_with_highs", unproven)
    result = solve_ilp(problem)
    assert result.objective == best.objective
    assert 0.25 <= result.lower_bound < best.objective


def test_a_solver_that_finds_nothing(monkeypatch) -> None:
    class Idle(pulp.LpSolver):
        name = "Idle"

        def __init__(self, **_) -> None:
            super().__init__()

        def available(self) -> bool:
            return True

        def actualSolve(self, lp, **_) -> int:
            lp.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)
            return pulp.LpStatusNotSolved

    monkeypatch.setattr(pulp, "getSolver", lambda name, **_: Idle())
    with pytest.raises(SolverError, match=r"idle found no sharding within 7 s \(Not Solved\)"):
        solve_ilp(dense_problem(3, 2), solver="idle", time_limit_s=7.0)
