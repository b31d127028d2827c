"""When a search under a memory budget ends. What it finds: tests/properties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.mesh import LogicalMesh
from autopar.sharding.budget import GOOD_GAP, Enough, is_good, solve_within_budget
from autopar.sharding.memory_limits import Holdings
from autopar.sharding.problem import ShardingProblem, build_problem
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step


@pytest.mark.parametrize(
    ("cost", "gap", "enough", "is_so"),
    [
        (1.0, GOOD_GAP, None, True),
        (1.0, 2 * GOOD_GAP, None, False),
        (1.0, 0.02, Enough(1.0, 0.05), True),
        (1.1, 0.02, Enough(1.0, 0.05), False),  # it would be the slowest stage
        (1.0, 0.06, Enough(1.0, 0.05), False),
        (9.0, 0.0, Enough(1.0, 0.05), True),  # the best there is
    ],
)
def test_what_needs_no_better(cost: float, gap: float, enough: Enough | None, is_so: bool) -> None:
    assert is_good(cost, gap, enough) is is_so


def chain_problem() -> ShardingProblem:
    def chain(w, v, x):
        return jnp.sort(jnp.tanh(x @ w) @ v, axis=0)

    arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (64, 16), (16, 64))]
    graph = build_graph(trace_step(chain, tuple(arrays)))
    mesh = LogicalMesh((2,), alpha=(0.5,), beta=(0.01,))
    return build_problem(graph, mesh, list(range(len(graph.nodes))), {})


def test_a_solution_that_is_enough_ends_the_search() -> None:
    best = solve_within_budget(chain_problem(), 1e9)
    assert best.choice is not None
    problem = chain_problem()
    peak = float(Holdings(problem, 1.0).bytes_at(best.choice).max())
    for budget in (0.6 * peak, 0.8 * peak):
        exact = solve_within_budget(chain_problem(), budget)
        anything = Enough(float("inf"), 1.0)
        first = solve_within_budget(chain_problem(), budget, enough=anything)
        assert (first.choice is None) == (exact.choice is None)
        if exact.choice is not None:
            assert first.peak_bytes <= budget
            assert first.num_solves <= exact.num_solves
            assert first.lower_bound <= exact.objective * (1 + 1e-9)
            assert first.objective >= exact.objective * (1 - GOOD_GAP)


@pytest.mark.parametrize("first_price", [1e-12, 1e-9, 0.0])
def test_what_fits_is_found_even_if_time_is_up(first_price: float) -> None:
    """A price at which nothing fits yet says nothing of higher ones."""
    best = solve_within_budget(chain_problem(), 1e9)
    assert best.choice is not None
    budget = 0.8 * float(Holdings(chain_problem(), 1.0).bytes_at(best.choice).max())
    in_time = solve_within_budget(chain_problem(), budget)
    late = solve_within_budget(chain_problem(), budget, time_limit_s=0.0, first_price=first_price)
    assert in_time.choice is not None and late.choice is not None
    assert late.peak_bytes <= budget
    assert late.lower_bound <= in_time.objective * (1 + 1e-9) <= late.objective * (1 + 1e-9)


def test_with_another_solution_at_hand_the_search_ends_when_time_is_up() -> None:
    best = solve_within_budget(chain_problem(), 1e9)
    budget = 0.8 * best.peak_bytes
    late = [
        solve_within_budget(
            chain_problem(), budget, time_limit_s=0.0, cutoff=cutoff, first_price=1e-12
        )
        for cutoff in (float("inf"), 1e12)
    ]
    assert late[0].choice is not None and late[0].num_solves > 2
    assert late[1].choice is None and late[1].num_solves == 2  # without a budget, and once more
