"""Contraction by bounds gives the optimum that brute force and the integer programme give."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import SolverError
from autopar.ir.mesh import ClusterSpec, mesh_of_cluster
from autopar.sharding import contract
from autopar.sharding.contract import solve_contracted
from autopar.sharding.descent import Moved, along_edges
from autopar.sharding.ilp import solve_ilp
from autopar.sharding.known_folds import fold_graph
from autopar.sharding.problem import problem_on_mesh
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, reduce_problem
from autopar.sharding.solve import solve_graph
from tests.properties.test_reduce_and_ilp import assert_optimal, brute_force, problems
from tests.unit.sharding.test_blocks import graph_of

REL = 1e-9


@pytest.mark.ci
@settings(deadline=None, max_examples=80)
@given(problems())
def test_contracted_is_the_optimum(problem: PairwiseProblem) -> None:
    """Of the problem as it is, and of what reductions leave of it."""
    result = solve_contracted(copy.deepcopy(problem), small=0)
    assert_optimal(problem, result.choice, result)
    reduction = reduce_problem(copy.deepcopy(problem))
    result = solve_contracted(reduction.problem, small=0)
    assert_optimal(problem, reduction.restore(result.choice), result)


@settings(deadline=None, max_examples=60)
@given(problems(), st.floats(0.0, 2.0), st.sampled_from([0, contract.SMALL]))
def test_below_a_cutoff_it_is_the_optimum(
    problem: PairwiseProblem, share: float, small: int
) -> None:
    """At or above it, the choice is any, and the bound is still one."""
    best = brute_force(problem)
    result = solve_contracted(copy.deepcopy(problem), small=small, cutoff=share * best)
    scale = max(abs(best), 1e-18)
    assert result.objective == pytest.approx(problem.objective(result.choice))
    assert result.lower_bound <= best + 1e-7 * scale <= result.objective + 2e-7 * scale
    if best < share * best:
        assert result.objective == pytest.approx(best, abs=1e-7 * scale)
    elif result.objective > best + 1e-7 * scale:
        assert result.lower_bound >= share * best


@settings(deadline=None, max_examples=60)
@given(problems(), st.integers(1, 4))
def test_moved_costs_leave_every_choice_what_it_cost(problem: PairwiseProblem, passes: int) -> None:
    """The bound is below the optimum, and so is the bound of every strategy that is in one."""
    moved = Moved(problem, along_edges(problem))
    for _ in range(passes):
        moved.pass_forward_and_back()
    again = moved.problem(problem)
    best = brute_force(problem)
    scale = max(best, 1e-18)
    assert brute_force(again) == pytest.approx(best, abs=1e-7 * scale)
    assert moved.lower_bound() <= best + 1e-7 * scale
    rng = np.random.default_rng(passes)
    for _ in range(5):
        choice = {u: int(rng.integers(len(c))) for u, c in problem.costs.items()}
        cost = problem.objective(choice)
        if cost < FORBIDDEN / 2:
            assert again.objective(choice) == pytest.approx(cost, abs=1e-7 * max(cost, 1e-18))


@pytest.mark.parametrize("length", [5, 7])
def test_what_no_bound_proves_is_left_to_the_programme(length: int, monkeypatch) -> None:
    """Neighbours of an odd cycle want to differ, and its hub makes it irreducible: the bound of
    message passing stays below the optimum."""
    problem = PairwiseProblem({u: np.zeros(2) for u in range(length)})
    problem.costs[length] = np.zeros(2)
    for u in range(length):
        problem.add_edge(*sorted((u, (u + 1) % length)), np.eye(2))
        problem.add_edge(u, length, np.eye(2) / 4)
    asked = []
    monkeypatch.setattr(
        contract,
        "solve_ilp",
        lambda left, **options: asked.append(len(left.costs)) or solve_ilp(left, **options),
    )
    result = solve_contracted(copy.deepcopy(problem), small=0)
    assert asked and max(asked) > 0
    assert_optimal(problem, result.choice, result)


def test_forbidden_everywhere_is_an_error() -> None:
    rng = np.random.default_rng(0)
    problem = PairwiseProblem({u: np.zeros(3) for u in range(4)})
    for u in range(4):
        for v in range(u):
            problem.add_edge(v, u, rng.random((3, 3)))
    problem.add_edge(0, 1, np.full((3, 3), FORBIDDEN))
    with pytest.raises(SolverError, match="no sharding satisfies the constraints"):
        solve_contracted(problem, small=0)


def test_near_enough_is_told_as_it_is() -> None:
    rng = np.random.default_rng(3)
    problem = PairwiseProblem({u: rng.random(4) for u in range(7)})
    for u in range(7):
        for v in range(u):
            problem.add_edge(v, u, rng.random((4, 4)))
    exact = solve_contracted(copy.deepcopy(problem), small=0)
    near = solve_contracted(copy.deepcopy(problem), small=0, gap=0.5)
    assert near.lower_bound <= exact.objective <= near.objective <= 2 * near.lower_bound
    assert problem.objective(near.choice) == pytest.approx(near.objective)


MODELS = ["moe-tiny", "gpt-tiny", "llama-tiny", "wresnet-tiny", "bert-tiny"]
SHAPES = [(2, 4), (8,)]
FAST = ("llama-tiny", (8,))
CASES = [(model, shape) for model in MODELS for shape in SHAPES]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "shape"),
    [pytest.param(*c, marks=[] if c == FAST else pytest.mark.slow) for c in CASES],
)
def test_real_steps_have_one_optimum(model: str, shape: tuple[int, ...]) -> None:
    """With contraction, without it, and the very same choice: no tie is broken otherwise."""
    graph = graph_of(model)
    mesh = mesh_of_cluster(ClusterSpec(1, 8, "h100-sxm"), shape)
    plain = solve_graph(graph, mesh, contract=False)
    pairwise = problem_on_mesh(fold_graph(graph), mesh, {}).pairwise
    reduction = reduce_problem(pairwise.copy())
    result = solve_contracted(reduction.problem, small=0)
    choice = reduction.restore(result.choice)
    assert result.lower_bound == result.objective
    assert result.objective == pytest.approx(plain.objective, rel=REL)
    assert pairwise.objective(choice) == pytest.approx(plain.objective, rel=REL)
    assert choice == plain.choice
