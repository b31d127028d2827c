"""The solver under a memory budget, against trying every choice."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.ir.mesh import LogicalMesh
from autopar.sharding.budget import GOOD_GAP, solve_within_budget
from autopar.sharding.combine import at_price, combined
from autopar.sharding.ilp import solve_with_limits
from autopar.sharding.limit import Limit
from autopar.sharding.memory_limits import Holdings
from autopar.sharding.problem import build_problem
from autopar.sharding.reduce import PairwiseProblem
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def chain(w, x):
    return jnp.sort(jnp.tanh(x @ w), axis=0)


def gradient(w, x):
    return w - jax.grad(lambda w: jnp.sum(x @ w))(w)


STEPS = {
    "product": (lambda w, x: x @ w, (array(8, 64), array(16, 8))),
    "chain": (chain, (array(64, 16), array(16, 64))),
    "update": (gradient, (array(32, 16), array(64, 32))),
}


def problem_of(name: str, mesh: LogicalMesh):
    fn, args = STEPS[name]
    graph = build_graph(trace_step(fn, args))
    return build_problem(graph, mesh, list(range(len(graph.nodes))), {})


def every_choice(problem):
    nodes = list(problem.strategies)
    counts = [len(problem.strategies[u]) for u in nodes]
    assert np.prod(counts) < 300_000
    for indices in product(*map(range, counts)):
        yield dict(zip(nodes, indices, strict=True))


@pytest.mark.representatives("chain", "product", slow=["update"])
@pytest.mark.parametrize("name", STEPS)
def test_no_choice_that_fits_is_cheaper(name: str) -> None:
    problem = problem_of(name, LogicalMesh((2,), alpha=(0.5,), beta=(0.01,)))
    holdings = Holdings(problem, 1.0)
    table = [
        (problem.pairwise.objective(c), float(holdings.bytes_at(c).max()))
        for c in every_choice(problem)
    ]
    peaks = sorted({peak for _, peak in table})
    for budget in (peaks[0], peaks[len(peaks) // 2], peaks[-1]):
        best = min(cost for cost, peak in table if peak <= budget)
        result = solve_within_budget(problem, budget)
        assert result.choice is not None
        assert result.peak_bytes <= budget
        assert result.objective == pytest.approx(best, rel=1e-6)
        assert result.lower_bound <= best * (1 + 1e-9)
    result = solve_within_budget(problem, peaks[0] - 1)
    assert result.choice is None
    assert result.peak_bytes == pytest.approx(peaks[0])


@pytest.mark.parametrize("name", STEPS)
def test_rows_are_the_bytes_at_their_time(name: str) -> None:
    problem = problem_of(name, LogicalMesh((2, 2)))
    holdings = Holdings(problem, 1.0)
    rng = np.random.default_rng(0)
    rows = {at: holdings.row(at) for at in range(holdings.num_times)}
    for _ in range(20):
        choice = {u: int(rng.integers(len(s))) for u, s in problem.strategies.items()}
        bytes_at = holdings.bytes_at(choice)
        for at, row in rows.items():
            assert row.value(choice) == pytest.approx(bytes_at[at])
            assert row.floor() <= row.value(choice) + 1e-6


@st.composite
def limited_problems(draw):
    number = st.integers(0, 9).map(float)
    counts = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))

    def table(*shape: int) -> np.ndarray:
        size = int(np.prod(shape))
        return np.array(draw(st.lists(number, min_size=size, max_size=size))).reshape(shape)

    costs = {u: table(n) for u, n in enumerate(counts)}
    problem = PairwiseProblem(costs)
    pairs = [(u, v) for u in costs for v in costs if u < v]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=3))
    for u, v in chosen:
        problem.add_edge(u, v, table(counts[u], counts[v]))
    limits = [
        Limit(
            {u: table(counts[u]) for u in draw(st.sets(st.sampled_from(list(costs))))},
            {(u, v): table(counts[u], counts[v]) for u, v in chosen if draw(st.booleans())},
            draw(number),
        )
        for _ in range(draw(st.integers(1, 2)))
    ]
    return problem, limits, draw(st.integers(0, 40).map(float))


@pytest.mark.ci
@settings(max_examples=60, deadline=None)
@given(limited_problems())
def test_limits_are_kept_exactly(case) -> None:
    problem, limits, bound = case
    choices = [
        dict(enumerate(indices))
        for indices in product(*(range(len(c)) for c in problem.costs.values()))
    ]
    objective = {tuple(c.values()): problem.objective(c) for c in choices}
    largest = {tuple(c.values()): max(x.value(c) for x in limits) for c in choices}
    fitting = [key for key in objective if largest[key] <= bound + 1e-9]
    found = solve_with_limits(problem.copy(), limits, bound, time_limit_s=10)
    if not fitting:
        assert found is None
    else:
        assert found is not None
        key = tuple(found[u] for u in sorted(found))
        assert largest[key] <= bound + 1e-6
        best = min(objective[k] for k in fitting)
        assert objective[key] == pytest.approx(best, rel=2e-4, abs=1e-3)
    smallest = solve_with_limits(problem.copy(), limits, None, time_limit_s=10)
    assert smallest is not None
    key = tuple(smallest[u] for u in sorted(smallest))
    assert largest[key] == pytest.approx(min(largest.values()), rel=2e-4, abs=1e-3)


def exchanges(problem, limits, one, two):
    """Choices that take nodes of the second, as long as no edge joins a taken node with one that is
    not and differs."""
    edges = [(u, v) for u, row in problem.edges.items() for v in row]
    edges += [edge for x in limits for edge in x.edges]
    differing = [u for u in one if one[u] != two[u]]
    for taken in product((False, True), repeat=len(differing)):
        in_two = dict(zip(differing, taken, strict=True))
        if any(in_two[u] != in_two[v] for u, v in edges if u in in_two and v in in_two):
            continue
        yield {u: two[u] if in_two.get(u) else s for u, s in one.items()}


@settings(max_examples=80, deadline=None)
@given(limited_problems(), st.randoms(use_true_random=False))
def test_combined_choices_fit_and_are_the_best_of_their_groups(case, random) -> None:
    problem, limits, bound = case
    one, two = ({u: random.randrange(len(c)) for u, c in problem.costs.items()} for _ in range(2))
    bound = max(bound, *(x.value(one) for x in limits))
    best = problem.objective(one)
    for choice in exchanges(problem, limits, one, two):
        if all(x.value(choice) <= bound for x in limits):
            best = min(best, problem.objective(choice))
    found = combined(problem, limits, bound, one, two)
    assert all(x.value(found) <= bound + 1e-6 for x in limits)
    assert problem.objective(found) == pytest.approx(best, rel=2e-4, abs=1e-6)


@settings(max_examples=80, deadline=None)
@given(limited_problems(), st.randoms(use_true_random=False), st.floats(0.0, 10.0))
def test_exchanges_at_a_price_are_the_best_of_their_groups(case, random, price) -> None:
    problem, (limit, *_), _ = case
    one, two = ({u: random.randrange(len(c)) for u, c in problem.costs.items()} for _ in range(2))

    def priced(choice) -> float:
        return problem.objective(choice) + price * limit.value(choice)

    best = min(map(priced, exchanges(problem, (limit,), one, two)))
    found = at_price(problem, limit, price, one, two)
    assert priced(found) == pytest.approx(best, rel=1e-9, abs=1e-6)


def test_what_was_tried_before_does_not_mislead() -> None:
    """Budgets in any order, on one problem that remembers and on new ones."""
    mesh = LogicalMesh((2,), alpha=(0.5,), beta=(0.01,))
    remembering = problem_of("chain", mesh)
    holdings = Holdings(remembering, 1.0)
    peaks = sorted({float(holdings.bytes_at(c).max()) for c in every_choice(remembering)})
    for budget in (peaks[-1], peaks[0], peaks[len(peaks) // 2], peaks[0], peaks[-2]):
        again = solve_within_budget(remembering, budget)
        anew = solve_within_budget(problem_of("chain", mesh), budget)
        assert again.peak_bytes <= budget and anew.peak_bytes <= budget
        assert again.objective == pytest.approx(anew.objective, rel=GOOD_GAP)
        assert again.lower_bound <= anew.objective * (1 + 1e-9)
