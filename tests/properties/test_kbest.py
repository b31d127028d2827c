"""The best few solutions, against all combinations."""

from __future__ import annotations

import time
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.mesh import LogicalMesh
from autopar.sharding.kbest import (
    best_shardings,
    covering,
    k_best,
    sharding_of,
    solutions,
    strategy_labels,
)
from autopar.sharding.known_folds import fold_graph
from autopar.sharding.problem import build_problem
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem
from autopar.sharding.solve import solve_graph
from tests.properties.test_solver_against_brute_force import stack_graph


@st.composite
def problems(draw) -> tuple[PairwiseProblem, dict[int, list[int]]]:
    """A problem of a few nodes and edges, some pairs forbidden, with labels of some nodes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    problem = PairwiseProblem({u: rng.uniform(0, 1, n) for u, n in enumerate(sizes)})
    for u, n in enumerate(sizes):
        for v, m in enumerate(sizes[:u]):
            if rng.random() < 0.7:
                matrix = rng.uniform(0, 2, (m, n))
                matrix[rng.random((m, n)) < 0.15] = FORBIDDEN
                problem.add_edge(v, u, matrix)
    nodes = draw(st.sets(st.sampled_from(range(len(sizes))), min_size=1))
    labels = {u: [int(x) for x in rng.integers(0, 3, sizes[u])] for u in sorted(nodes)}
    return problem, labels


def every_solution(problem: PairwiseProblem, labels: dict[int, list[int]]) -> dict[tuple, float]:
    """Labels of the decisions -> the least cost of a choice with them."""
    best: dict[tuple, float] = {}
    nodes = sorted(problem.costs)
    for combination in product(*(range(len(problem.costs[u])) for u in nodes)):
        choice = dict(zip(nodes, combination, strict=True))
        cost = problem.objective(choice)
        if cost < FORBIDDEN / 2:
            key = tuple(labels[u][choice[u]] for u in sorted(labels))
            best[key] = min(best.get(key, inf), cost)
    return best


@settings(deadline=None, max_examples=60)
@given(problems())
def test_all_solutions_in_order(drawn) -> None:
    problem, labels = drawn
    wanted = every_solution(problem, labels)
    found = list(solutions(problem, labels))
    assert {tuple(one.labels[u] for u in sorted(labels)) for one in found} == wanted.keys()
    assert len(found) == len(wanted)
    costs = [one.objective for one in found]
    assert costs == pytest.approx(sorted(wanted.values()), rel=1e-9)
    for one in found:
        assert problem.objective(one.choice) == pytest.approx(one.objective, rel=1e-12)
        assert all(labels[u][one.choice[u]] == label for u, label in one.labels.items())
        assert wanted[tuple(one.labels[u] for u in sorted(labels))] == pytest.approx(one.objective)


@settings(deadline=None, max_examples=30)
@given(problems(), st.integers(1, 6), st.data())
def test_a_few_with_a_label_given(drawn, num: int, data) -> None:
    problem, labels = drawn
    node = data.draw(st.sampled_from(sorted(labels)))
    label = data.draw(st.sampled_from(labels[node]))
    place = sorted(labels).index(node)
    wanted = [c for key, c in every_solution(problem, labels).items() if key[place] == label]
    found = k_best(problem, labels, num, fixed={node: label})
    assert [one.objective for one in found] == pytest.approx(sorted(wanted)[:num], rel=1e-9)
    if wanted:
        cutoff = sorted(wanted)[len(wanted) // 2]
        within = k_best(problem, labels, len(wanted), fixed={node: label}, cutoff=cutoff + 1e-9)
        assert len(within) == sum(c <= cutoff + 1e-9 for c in wanted)


@pytest.mark.ci
@settings(deadline=None, max_examples=30)
@given(problems(), st.integers(1, 30))
def test_what_covers_is_the_best_of_its_kind(drawn, num: int) -> None:
    problem, labels = drawn
    every = every_solution(problem, labels)
    found = covering(problem, labels, num)
    keys = [tuple(one.labels[u] for u in sorted(labels)) for one in found]
    assert len(keys) == len(set(keys)) <= num
    costs = [one.objective for one in found]
    assert costs == pytest.approx([every[key] for key in keys], rel=1e-9)
    assert costs == sorted(costs)
    if every:
        assert costs[0] == pytest.approx(min(every.values()), rel=1e-9)
    if num >= 30:  # enough for every label of at most 18, beside the cheapest third
        shown = {(place, key[place]) for key in keys for place in range(len(key))}
        assert shown == {(place, key[place]) for key in every for place in range(len(key))}


def test_the_deadline_ends_the_search() -> None:
    problem = PairwiseProblem({u: np.arange(4.0) for u in range(4)})
    labels = {u: list(range(4)) for u in range(4)}
    assert len(k_best(problem, labels, 100, deadline=time.monotonic() - 1)) == 1


@pytest.mark.ci
def test_shardings_of_a_graph_differ_in_their_products() -> None:
    graph = stack_graph(3, 8, 16, 32)
    mesh = LogicalMesh((2, 2))
    problem = build_problem(graph, mesh, fold_graph(graph).classes, {})
    classes = [u for u, node in problem.representative.items() if graph.nodes[node].is_heavy]
    assert classes
    labels = strategy_labels(problem, classes)
    found = best_shardings(problem, labels, 6)
    assert found[0].objective == pytest.approx(solve_graph(graph, mesh).objective, rel=1e-7)
    kinds = {tuple(labels[u][one.choice[u]] for u in classes) for one in found}
    assert len(kinds) == len(found) == 6
    again = next(solutions(problem.pairwise, labels))
    assert sharding_of(problem, again).memory.peak_bytes > 0
