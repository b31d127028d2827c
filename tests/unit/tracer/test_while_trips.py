"""How many trips a while loop is priced as."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.errors import ArgumentError
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

X = np.ones((8, 16), np.float32)


def loops(fn: Any) -> list[tuple[int, str]]:
    graph = build_graph(trace_step(fn, (X,), batch_argnums=()))
    return [(loop.trips, loop.kind) for loop in graph.while_loops]


def weight(fn: Any, name: str) -> float:
    graph = build_graph(trace_step(fn, (X,), batch_argnums=()))
    (node,) = (n for n in graph.nodes if n.name == name)
    return node.weight


def counted(goes_on: Any, start: Any = 0, step: Any = 1) -> Any:
    return lambda x: lax.while_loop(goes_on, lambda c: (jnp.tanh(c[0]), c[1] + step), (x, start))[0]


def by_data(x: Any) -> Any:
    return lax.while_loop(lambda x: x.sum() > 1, jnp.tanh, x)


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        (counted(lambda c: c[1] < 7), (7, "known")),
        (counted(lambda c: c[1] <= 7), (8, "known")),
        (counted(lambda c: c[1] < 7, 1, 2), (3, "known")),
        (counted(lambda c: c[1] > 0, 9, -1), (9, "known")),
        (counted(lambda c: (c[0].sum() > 1) & (c[1] < 7) & (c[1] < 5)), (5, "at most")),
        (counted(lambda c: (c[0].sum() > 1) | (c[1] < 7)), (1, "unknown")),
        (counted(lambda c: c[1] > 7), (1, "unknown")),
        (counted(lambda c: (c[0].sum() > 1) & (c[1] < 2**31 - 1)), (1, "unknown")),
        (counted(lambda c: (c[0].sum() > 1) & (c[1] < jnp.inf), 0.0, 1.0), (1, "unknown")),
        (by_data, (1, "unknown")),
    ],
)
def test_a_counter_bounds_the_trips(loop: Any, found: tuple[int, str]) -> None:
    assert loops(loop) == [found]
    assert weight(loop, "tanh") == found[0]


def test_the_user_knows_better() -> None:
    def fn(x):
        with autopar.expected_trips(20):
            return counted(lambda c: (c[0].sum() > 1) & (c[1] < 100))(x)

    assert loops(fn) == [(20, "expected")]
    assert loops(lambda x: jax.vmap(fn)(x[None])[0]) == [(20, "expected")]
    assert loops(lambda x: jax.jvp(fn, (x,), (x,))[1]) == [(20, "expected")]
    assert loops(lambda x: jax.jit(fn)(x)) == [(20, "expected")]
    assert np.array_equal(fn(X), counted(lambda c: (c[0].sum() > 1) & (c[1] < 100))(X))


def test_a_loop_inside_has_expectations_of_its_own() -> None:
    def outer(inner):
        def fn(x):
            with autopar.expected_trips(3):
                return lax.while_loop(lambda x: x.sum() > 1, inner, x)

        return fn

    def expected(x):
        with autopar.expected_trips(5):
            return by_data(x)

    assert loops(outer(by_data)) == [(3, "expected"), (1, "unknown")]
    assert weight(outer(by_data), "tanh") == 3
    assert weight(outer(expected), "tanh") == 15


def test_the_plan_names_loops_that_end_by_the_data() -> None:
    def plan_of(loop: Any) -> autopar.ParallelPlan:
        def step(state, batch):
            return state + loop(batch), batch.sum()

        cluster = autopar.ClusterSpec(1, 1, "h100-sxm")
        return autopar.plan(step, X, X, cluster=cluster, method=autopar.ShardParallel((1,)))

    (warning,) = plan_of(by_data).warnings
    assert "test_while_trips.py" in warning and "one trip" in warning
    assert "autopar.expected_trips(n)" in " ".join(plan_of(by_data).explain().split())
    (warning,) = plan_of(counted(lambda c: (c[0].sum() > 1) & (c[1] < 7))).warnings
    assert "priced as the 7 it may take" in warning

    def told(x):
        with autopar.expected_trips(20):
            return by_data(x)

    assert plan_of(told).warnings == ()
    assert plan_of(told).estimated_step_s > 5 * plan_of(by_data).estimated_step_s


@pytest.mark.parametrize("trips", [0, -1, 2.5, True, "20"])
def test_trips_are_a_whole_number(trips: Any) -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        autopar.expected_trips(trips)


def test_names_of_modules_do_not_show_it() -> None:
    def step(state, batch):
        with jax.named_scope("Solver"), autopar.expected_trips(4):
            return state + by_data(batch)

    graph = build_graph(trace_step(step, (X, X)))
    assert {node.module for node in graph.nodes if node.name == "tanh"} == {"Solver"}
