"""The best plan's cost with a value in each layout, against pins and all combinations."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.errors import SolverError
from autopar.ir.graph import Graph, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.sharding.known_folds import fold_graph
from autopar.sharding.marginals import layouts_of, min_marginals
from autopar.sharding.problem import build_problem
from autopar.sharding.solve import solve_graph
from tests.properties.test_solver_against_brute_force import (
    brute_force,
    graphs,
    meshes,
    stack_graph,
)

MOST_COMBINATIONS = 50_000


@settings(deadline=None, max_examples=15)
@given(graphs(), meshes(), st.data())
def test_equal_to_all_combinations_with_the_layout(graph: Graph, mesh: LogicalMesh, data) -> None:
    nodes = list(range(len(graph.nodes)))
    problem = build_problem(graph, mesh, nodes, {})
    node = data.draw(st.sampled_from(nodes))
    assume(prod(len(problem.strategies[n]) for n in nodes) <= MOST_COMBINATIONS)
    found = min_marginals(problem, {node: 0}, max_solved=100)
    assert {one.layout for one in found} == set(layouts_of(problem, {node: 0}))
    costs = [one.lower_bound if one.sharding is None else one.sharding.objective for one in found]
    assert costs == sorted(costs)
    for one in found:
        strategies = [list(problem.strategies[n]) for n in nodes]
        strategies[node] = [s for s in strategies[node] if s.results[0] == one.layout]
        least = brute_force(graph, mesh, strategies)
        if one.sharding is None:
            assert least >= 1e17  # nothing goes with it
            continue
        assert one.sharding.objective == pytest.approx(least, rel=1e-7)
        assert one.sharding.layouts[node][1][0] == one.layout
        assert one.sharding.gap == 0


@settings(deadline=None, max_examples=15)
@given(graphs(), meshes(), st.data())
def test_equal_to_solving_with_a_pin(graph: Graph, mesh: LogicalMesh, data) -> None:
    classes = fold_graph(graph).classes
    problem = build_problem(graph, mesh, classes, {})
    values = [v for v in graph.inputs if graph.values[v].shape]
    value = data.draw(st.sampled_from(values))
    node, result = graph.producer[value]
    for one in min_marginals(problem, {classes[node]: result}, max_solved=100):
        try:
            pinned = solve_graph(graph, mesh, pins={value: one.layout}).objective
        except SolverError:
            pinned = np.inf
        found = np.inf if one.sharding is None else one.sharding.objective
        assert found == pytest.approx(pinned, rel=1e-7)


def test_equal_layers_move_together() -> None:
    graph = stack_graph(6, 8, 16, 32)
    mesh = LogicalMesh((2, 2))
    problem = build_problem(graph, mesh, fold_graph(graph).classes, {})
    values = [v for v in graph.inputs if graph.values[v].shape == (16, 32)]
    classes = {problem.classes[graph.producer[v][0]] for v in values}
    assert len(classes) < len(values)  # else nothing is tied
    for one in min_marginals(problem, dict.fromkeys(classes, 0)):
        assert one.sharding is not None
        assert {one.sharding.layouts[graph.producer[v][0]][1][0] for v in values} == {one.layout}
        pinned = solve_graph(graph, mesh, pins=dict.fromkeys(values, one.layout))
        assert one.sharding.objective == pytest.approx(pinned.objective, rel=1e-7)


def test_of_many_layouts_some_are_bounded() -> None:
    graph = stack_graph(2, 8, 16, 32)
    mesh = LogicalMesh((2, 2))
    problem = build_problem(graph, mesh, list(range(len(graph.nodes))), {})
    node = next(i for i, n in enumerate(graph.nodes) if n.kind is NodeKind.INPUT)
    exact = {one.layout: one for one in min_marginals(problem, {node: 0}, max_solved=100)}
    last = min_marginals(problem, {node: 0}, max_solved=100)[-1].layout
    some = min_marginals(problem, {node: 0}, max_solved=2, always=(last,))
    assert sum(one.sharding is not None for one in some) == 2
    assert next(one for one in some if one.layout == last).sharding is not None
    for one in some:
        full = exact[one.layout].sharding
        assert full is not None and one.lower_bound <= full.objective * (1 + 1e-9)


def test_a_budget_marks_what_breaks_it() -> None:
    graph = stack_graph(2, 8, 64, 256)
    mesh = LogicalMesh((4,))
    problem = build_problem(graph, mesh, list(range(len(graph.nodes))), {})
    node = next(i for i, n in enumerate(graph.nodes) if n.kind is NodeKind.INPUT)
    free = {one.layout: one.sharding for one in min_marginals(problem, {node: 0})}
    split, whole = free[(0,)], free[(-1,)]
    assert split is not None and whole is not None
    budget = split.memory.peak_bytes
    assert whole.memory.peak_bytes > budget
    within = {one.layout: one for one in min_marginals(problem, {node: 0}, budget_bytes=budget)}
    for one in within.values():
        assert one.sharding is not None
        assert one.fits == (one.sharding.memory.peak_bytes <= budget)
        before = free[one.layout]
        assert before is not None and one.sharding.objective >= before.objective * (1 - 1e-9)
    without = min_marginals(problem, {node: 0}, budget_bytes=budget, budget_time_s=-1.0)
    assert {one.layout for one in without if one.sharding is None} <= {(-1,), (1,)}


def test_no_layout_may_be_had() -> None:
    """Splits that divide no dimension are not layouts."""
    graph = stack_graph(2, 3, 5, 7)
    problem = build_problem(graph, LogicalMesh((2,)), list(range(len(graph.nodes))), {})
    node = next(i for i, n in enumerate(graph.nodes) if n.kind is NodeKind.INPUT)
    assert layouts_of(problem, {node: 0}) == [(-1,)]
    (only,) = min_marginals(problem, {node: 0})
    assert only.sharding is not None
    assert only.sharding.objective == pytest.approx(
        solve_graph(graph, LogicalMesh((2,)), fold=False).objective, rel=1e-7
    )
