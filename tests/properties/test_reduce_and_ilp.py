"""Reductions and the integer programme, against brute force on random pairwise problems."""

from __future__ import annotations

import copy
from importlib.metadata import version
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import SolverError
from autopar.sharding.ilp import IlpResult, solve_ilp
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, reduce_problem

# PuLP 3 brings CBC along and warns that PuLP 4 leaves it out; HiGHS is there with both.
OTHER_SOLVERS = ["HiGHS", "PULP_CBC_CMD"][: 2 if version("pulp") < "4" else 1]
REL = 1e-7
pytestmark = pytest.mark.filterwarnings("ignore:PULP_CBC_CMD is deprecated:DeprecationWarning")


@st.composite
def problems(draw, max_nodes: int = 7) -> PairwiseProblem:
    """Any graph, disconnected or complete; a planted choice keeps it feasible."""
    counts = draw(st.lists(st.integers(1, 5), min_size=2, max_size=max_nodes))
    pairs = list(combinations(range(len(counts)), 2))
    edges = draw(st.just(pairs) | st.lists(st.sampled_from(pairs), unique=True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([1, 3, 1000]))  # few different costs make many ties
    forbidden = draw(st.sampled_from([0.0, 0.0, 0.2, 0.6]))
    unit = draw(st.sampled_from([1.0, 0.37, 1e-6, 1e-15, 1e9]))
    planted = [int(rng.integers(n)) for n in counts]

    def prices(shape: tuple[int, ...], keep: tuple[int, ...]) -> np.ndarray:
        prices = unit * rng.integers(0, spread + 1, shape).astype(float)
        banned = rng.random(shape) < forbidden
        banned[keep] = False
        return np.where(banned, FORBIDDEN, prices)

    problem = PairwiseProblem({u: prices((n,), (planted[u],)) for u, n in enumerate(counts)})
    for u, v in edges:
        problem.add_edge(u, v, prices((counts[u], counts[v]), (planted[u], planted[v])))
    return problem


def brute_force(problem: PairwiseProblem) -> float:
    """The least objective over all choices."""
    nodes = sorted(problem.costs)
    position = {u: i for i, u in enumerate(nodes)}
    total = np.full([len(problem.costs[u]) for u in nodes], problem.constant)
    for u in nodes:
        shape = [1] * len(nodes)
        shape[position[u]] = -1
        total = total + problem.costs[u].reshape(shape)
    for u, row in problem.edges.items():
        for v, matrix in row.items():
            if u < v:
                shape = [1] * len(nodes)
                shape[position[u]], shape[position[v]] = matrix.shape
                total = total + matrix.reshape(shape)
    return float(total.min())


def assert_optimal(problem: PairwiseProblem, choice: dict[int, int], result: IlpResult) -> None:
    expected = brute_force(problem)
    assert set(choice) == set(problem.costs)
    scale = max(expected, 1e-18)
    assert problem.objective(choice) == pytest.approx(expected, abs=REL * scale)
    assert result.objective == pytest.approx(expected, abs=REL * scale)
    assert result.lower_bound <= result.objective
    assert result.lower_bound == pytest.approx(expected, abs=REL * scale)


@settings(deadline=None, max_examples=250)
@given(problems())
def test_reduced_solved_and_restored_is_the_optimum(problem: PairwiseProblem) -> None:
    reduction = reduce_problem(copy.deepcopy(problem))
    result = solve_ilp(reduction.problem)
    assert_optimal(problem, reduction.restore(result.choice), result)


@settings(deadline=None, max_examples=100)
@given(problems())
def test_ilp_alone_finds_the_optimum(problem: PairwiseProblem) -> None:
    result = solve_ilp(problem)
    assert_optimal(problem, result.choice, result)
    assert result.num_variables == sum(map(len, problem.costs.values())) + problem.num_edge_entries


@settings(deadline=None, max_examples=100)
@given(problems())
def test_reductions_keep_the_optimum_and_only_shrink(problem: PairwiseProblem) -> None:
    reduced = reduce_problem(copy.deepcopy(problem)).problem
    best = brute_force(problem)
    left = brute_force(reduced) if reduced.costs else reduced.constant
    assert left == pytest.approx(best, abs=REL * max(best, 1e-18))
    for u, cost in reduced.costs.items():
        assert len(cost) <= len(problem.costs[u])
        assert reduced.degree(u) > 2
        assert (cost < FORBIDDEN / 2).any()
        for v, matrix in reduced.edges[u].items():
            assert matrix.shape == (len(cost), len(reduced.costs[v]))
            assert np.array_equal(matrix, reduced.edges[v][u].T)


@settings(deadline=None, max_examples=60)
@given(problems(max_nodes=6), st.data())
def test_any_choice_of_the_core_restores_to_its_own_objective(problem, data) -> None:
    """Undoing a reduction completes a choice as well as it can be completed."""
    reduction = reduce_problem(copy.deepcopy(problem))
    core = reduction.problem
    choice = {u: data.draw(st.integers(0, len(c) - 1)) for u, c in core.costs.items()}
    expected = core.objective(choice)
    if expected < FORBIDDEN / 2:
        restored = problem.objective(reduction.restore(choice))
        assert restored == pytest.approx(expected, rel=REL, abs=1e-18)


@pytest.mark.parametrize("solver", OTHER_SOLVERS)
@settings(deadline=None, max_examples=12)
@given(problem=problems(max_nodes=5))
def test_other_solvers_agree(solver: str, problem: PairwiseProblem) -> None:
    result = solve_ilp(problem, solver=solver)
    assert_optimal(problem, result.choice, result)


@pytest.mark.parametrize("length", [3, 5, 7])
def test_frustrated_odd_cycles_are_branched(length: int) -> None:
    """Neighbours want to differ. The relaxation takes half of each; one pair must agree."""
    problem = PairwiseProblem({u: np.zeros(2) for u in range(length)})
    for u in range(length):
        problem.add_edge(*sorted((u, (u + 1) % length)), np.eye(2))
    result = solve_ilp(problem)
    assert not result.relaxation_integral
    assert result.objective == problem.objective(result.choice) == 1
    assert result.lower_bound == pytest.approx(1)


@pytest.mark.parametrize("solver", ["highs", *OTHER_SOLVERS])
@pytest.mark.parametrize(("size", "colours", "agreeing"), [(4, 2, 2), (5, 2, 4), (5, 3, 2)])
def test_frustrated_cliques_survive_the_reductions(solver, size, colours, agreeing) -> None:
    """Colouring a clique with too few colours: known optimum, nothing to reduce."""
    problem = PairwiseProblem({u: np.zeros(colours) for u in range(size)})
    for u, v in combinations(range(size), 2):
        problem.add_edge(u, v, np.eye(colours))
    reduction = reduce_problem(copy.deepcopy(problem))
    assert len(reduction.problem.costs) == size
    result = solve_ilp(reduction.problem, solver=solver)
    assert not result.relaxation_integral
    assert problem.objective(reduction.restore(result.choice)) == agreeing
    assert result.objective == pytest.approx(agreeing)
    assert result.lower_bound == pytest.approx(agreeing)


def test_series_parallel_graphs_reduce_to_nothing() -> None:
    rng = np.random.default_rng(0)
    ladder = PairwiseProblem({u: rng.random(4) for u in range(12)})
    for u in range(11):
        ladder.add_edge(u, u + 1, rng.random((4, 4)))
    for u in range(0, 10, 2):
        ladder.add_edge(u, u + 2, rng.random((4, 4)))
    reduction = reduce_problem(copy.deepcopy(ladder))
    assert not reduction.problem.costs
    result = solve_ilp(reduction.problem)
    assert result.num_variables == 0
    choice = reduction.restore(result.choice)
    assert ladder.objective(choice) == pytest.approx(result.objective)


def test_parallel_edges_and_self_edges_add_up() -> None:
    problem = PairwiseProblem({0: np.zeros(2), 1: np.zeros(2)})
    problem.add_edge(0, 1, np.array([[0.0, 1.0], [2.0, 3.0]]))
    problem.add_edge(1, 0, np.array([[0.0, 10.0], [20.0, 30.0]]))
    problem.add_edge(0, 0, np.array([[5.0, 99.0], [99.0, 7.0]]))
    assert problem.objective({0: 1, 1: 0}) == 2 + 10 + 7
    assert problem.objective({0: 0, 1: 1}) == 1 + 20 + 5


@pytest.mark.parametrize("solver", ["highs", *OTHER_SOLVERS])
@pytest.mark.parametrize("size", [2, 4])
def test_forbidden_everywhere_is_an_error(solver: str, size: int) -> None:
    """Two nodes allow nothing together; the rest is a clique, so that reductions leave a core."""
    rng = np.random.default_rng(0)
    problem = PairwiseProblem({u: np.zeros(3) for u in range(size)})
    for u, v in combinations(range(size), 2):
        problem.add_edge(u, v, rng.random((3, 3)))
    problem.add_edge(0, 1, np.full((3, 3), FORBIDDEN))
    with pytest.raises(SolverError, match="no sharding satisfies the constraints"):
        solve_ilp(copy.deepcopy(problem), solver=solver)
    with pytest.raises(SolverError, match="no sharding satisfies the constraints"):
        solve_ilp(reduce_problem(problem).problem, solver=solver)
