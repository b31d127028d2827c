from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pulp
import pytest

from autopar.errors import ArgumentError, SolverError
from autopar.sharding import ilp
from autopar.sharding.descent import Descent, descend
from autopar.sharding.ilp import check_solver, known_solvers, solve_ilp
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem


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


def test_a_time_limit_gives_the_best_so_far_and_its_gap() -> None:
    """Far too large for a hundredth of a second: at best the relaxation is done by then."""
    problem = dense_problem(30, 6)
    result = solve_ilp(problem, time_limit_s=0.01)
    assert not result.relaxation_integral
    assert result.lower_bound < result.objective
    assert result.objective == pytest.approx(problem.objective(result.choice))
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


def test_where_a_solver_finds_nothing_local_search_does(monkeypatch) -> None:
    monkeypatch.setattr(ilp, "_solve_with_pulp", lambda *_: (None, -math.inf, False))
    problem = dense_problem(5, 3)
    result = solve_ilp(problem, solver="idle", time_limit_s=7.0)
    assert result.objective == problem.objective(result.choice)
    best = solve_ilp(problem).objective
    assert problem.constant < result.lower_bound <= best <= result.objective


def test_where_nothing_is_found_the_error_does_not_say_that_nothing_is_there(monkeypatch) -> None:
    problem = dense_problem(4, 3)
    monkeypatch.setattr(ilp, "_solve_with_highs", lambda *_: (None, -math.inf, False))
    worst = {u: 0 for u in problem.costs}
    monkeypatch.setattr(ilp, "descend", lambda *_: Descent(worst, 0.0))
    problem.add_edge(0, 1, np.diag([FORBIDDEN, 0.0, 0.0]))
    with pytest.raises(SolverError, match=r"found no sharding within 0\.5 s.*solver_time_limit_s"):
        solve_ilp(problem, time_limit_s=0.5)


def test_where_nothing_is_below_a_cutoff_what_is_allowed_is_found(monkeypatch) -> None:
    """Of three nodes that had better differ two are alike, though by halves all differ: so the
    relaxation is at the cutoff. Local search is as unlucky as it can be."""
    costs = {u: np.array([0.0, 0.0, FORBIDDEN]) for u in range(3)}
    problem = PairwiseProblem(costs, {u: {} for u in range(3)})
    for u, v in combinations(range(3), 2):
        problem.add_edge(u, v, np.eye(3))
    unlucky = Descent(dict.fromkeys(range(3), 2), 0.0)
    monkeypatch.setattr(ilp, "descend", lambda *_: unlucky)
    result = solve_ilp(problem, cutoff=0.0)
    assert result.objective == problem.objective(result.choice) == 1.0


def test_local_search_takes_nothing_that_is_forbidden() -> None:
    """What is cheapest by itself may be forbidden beside what a neighbour takes."""
    problem = PairwiseProblem({u: np.array([0.0, 1.0]) for u in range(6)})
    apart = np.array([[FORBIDDEN, 0.0], [0.0, FORBIDDEN]])
    for u in range(5):
        problem.add_edge(u, u + 1, apart)
    choice = descend(problem).choice
    assert problem.objective(choice) == 3.0
    assert all(choice[u] != choice[u + 1] for u in range(5))


@pytest.mark.parametrize("seed", range(5))
def test_local_search_ends_where_no_single_change_helps(seed: int) -> None:
    problem = dense_problem(8, 4, seed)
    found = descend(problem)
    choice, best = found.choice, problem.objective(found.choice)
    for node in choice:
        for other in range(4):
            assert problem.objective({**choice, node: other}) >= best - 1e-12


@pytest.mark.parametrize("seed", range(8))
def test_local_search_bounds_from_below_what_the_solver_proves(seed: int) -> None:
    """Some pairs are forbidden; the bound must not count on their price."""
    problem = dense_problem(7, 4, seed)
    rng = np.random.default_rng(seed)
    for u, v in combinations(range(7), 2):
        forbidden = np.where(rng.random((4, 4)) < 0.2, FORBIDDEN, 0.0)
        problem.add_edge(u, v, forbidden)
    before = {u: c.copy() for u, c in problem.costs.items()}
    best = solve_ilp(problem)
    assert best.lower_bound == best.objective
    found = descend(problem)
    assert ilp.floor_of(problem) < found.lower_bound <= best.objective * (1 + 1e-9)
    assert best.objective <= problem.objective(found.choice) * (1 + 1e-9)
    assert all((problem.costs[u] == c).all() for u, c in before.items())


def test_on_a_tree_local_search_proves_the_optimum() -> None:
    rng = np.random.default_rng(0)
    problem = PairwiseProblem({u: rng.random(4) for u in range(9)}, constant=2.0)
    for u in range(1, 9):
        problem.add_edge(u // 2, u, rng.random((4, 4)))
    found = descend(problem)
    assert problem.objective(found.choice) == pytest.approx(solve_ilp(problem).objective)
    assert found.lower_bound == pytest.approx(problem.objective(found.choice))


@pytest.mark.parametrize("seed", range(4))
def test_message_passing_first_finds_the_same_optimum(monkeypatch, seed: int) -> None:
    """On a chain with a few chords it proves the optimum; where it does not, the solver does."""
    problem = dense_problem(9, 4, seed)
    for u, v in combinations(range(9), 2):
        if v > u + 1 and (u + v) % 5:
            problem.remove_edge(u, v)
    expected = solve_ilp(problem)
    monkeypatch.setattr(ilp, "_LARGE", 0)
    found = solve_ilp(problem)
    assert found.objective == pytest.approx(expected.objective)
    assert found.lower_bound == pytest.approx(expected.objective)
    sizes = (found.num_variables, found.num_constraints)
    assert sizes == (expected.num_variables, expected.num_constraints)


def test_where_message_passing_proves_an_optimum_no_solver_is_asked(monkeypatch) -> None:
    problem = dense_problem(2, 5)
    expected = solve_ilp(problem).objective
    monkeypatch.setattr(ilp, "_LARGE", 0)
    monkeypatch.setattr(ilp, "_model", None)
    assert solve_ilp(problem).objective == pytest.approx(expected)


def test_a_gap_that_is_near_enough_ends_the_search(monkeypatch) -> None:
    """The strategies that the relaxation uses have a solution near the bound."""
    problem = dense_problem(6, 4, seed=2)
    exact = solve_ilp(problem)
    assert not exact.relaxation_integral
    rough = solve_ilp(problem, gap=0.5)
    assert exact.objective <= rough.objective * (1 + 1e-9)
    assert rough.lower_bound <= exact.objective * (1 + 1e-9)
    assert rough.objective - rough.lower_bound <= 0.5 * rough.objective
