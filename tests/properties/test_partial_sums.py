"""Sums that a loop adds up may be partial along any axes at every step: the result is the same.

The solver may keep partial sums through a loop along both mesh axes, along one, or along both for
a while and then along one. Strategies are drawn by lot among those that it may take together.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar import _jax
from autopar.ir.graph import Graph
from autopar.ir.program_sharding import ProgramSharding, UnreducedAxes
from autopar.ir.spec import PARTIAL, NodeLayouts
from autopar.lower.annotate import annotated_function
from autopar.lower.assign import assign_layouts
from autopar.lower.unreduced import partial_axes
from autopar.sharding.problem import ShardingProblem, build_problem
from autopar.sharding.reduce import FORBIDDEN
from autopar.sharding.strategies import Strategy
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step

MESH = autopar.LogicalMesh((2, 4))
RNG = np.random.default_rng(0)
XS, YS = (RNG.normal(size=(3, 8, 8)).astype(np.float32) for _ in range(2))
IDS = RNG.integers(0, 8, size=(3, 8), dtype=np.int32)


def accumulate(xs: Any, ys: Any, ids: Any) -> Any:
    """Sums over trips: of products that share their addition, of a scatter, of an inner loop, and
    of a stack that an inner loop makes."""

    def row(total: Any, pair: Any) -> Any:
        x, y = pair
        return total + jnp.outer(x.sum(0), y.sum(0)), (x * y).sum(0)

    def trip(totals: Any, batch: Any) -> Any:
        x, y, i = batch
        tied = x.T @ y + (y.T @ x).T
        looked_up = jnp.zeros((8, 8)).at[i].add(x)
        halves = x.reshape(2, 4, 8), y.reshape(2, 4, 8)
        inner, stack = lax.scan(row, jnp.zeros((8, 8)), halves)
        terms = (tied + looked_up, inner, stack, -x.sum(0), x.sum())
        return tuple(t + term for t, term in zip(totals, terms, strict=True)), None

    shapes = ((8, 8), (8, 8), (2, 8), (8,), ())
    return lax.scan(trip, tuple(jnp.zeros(s) for s in shapes), (xs, ys, ids))[0]


def drawn(problem: ShardingProblem, rng: random.Random) -> list[Strategy]:
    """A strategy for every node, partial sums where possible, by lot; whatever leads from a layout
    to one that cannot follow is drawn again."""

    def draw(node: int) -> int:
        own = problem.strategies[node]
        weights = [9 if any(PARTIAL in x for x in (*s.operands, *s.results)) else 1 for s in own]
        return rng.choices(range(len(own)), weights)[0]

    edges = problem.pairwise.edges
    choice = {node: draw(node) for node in problem.strategies}
    for _ in range(100_000):
        clashes = [
            pair
            for u, row in edges.items()
            for v, table in row.items()
            if u < v and table[choice[u], choice[v]] >= FORBIDDEN / 2
            for pair in (u, v)
        ]
        if not clashes:
            return [problem.strategies[node][choice[node]] for node in sorted(choice)]
        node = rng.choice(clashes)
        choice[node] = draw(node)
    raise AssertionError("no strategies that go together")


def layouts_by_lot(graph: Graph, seed: int) -> list[NodeLayouts]:
    problem = build_problem(graph, MESH, list(range(len(graph.nodes))), {})
    return [(s.operands, s.results) for s in drawn(problem, random.Random(seed))]


def lanes_of(sharding: ProgramSharding) -> list[tuple[UnreducedAxes, tuple[int, ...]]]:
    """(axes along which equations work lane by lane, those that their results keep)."""
    found = []
    for equation in sharding.equations:
        if equation.lanes is not None:
            found.append((equation.lanes, partial_axes(equation.results[0][-1])))
        for body in equation.bodies:
            found += lanes_of(body)
    return found


def check(seeds: Iterable[int]) -> None:
    step = trace_step(accumulate, (XS, YS, IDS), batch_argnums=())
    graph = build_graph(step)
    mesh = _jax.fresh_mesh(np.array(jax.devices()).reshape(2, 4), MESH.axis_names)
    want = jax.jit(accumulate)(XS, YS, IDS)
    met: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for seed in seeds:
        sharding = assign_layouts(step.program, graph, layouts_by_lot(graph, seed), MESH)
        met |= {(lanes.axes, kept) for lanes, kept in lanes_of(sharding)}
        got = jax.jit(annotated_function(step.program, sharding, mesh))(XS, YS, IDS)
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4, err_msg=f"seed {seed}")
    assert {((0, 1), (0, 1)), ((0,), (0,)), ((1,), (1,))} <= met
    assert any(set(kept) < set(axes) for axes, kept in met), "some lanes are summed on the way"


def test_partial_sums_in_loops() -> None:
    check((3, 5))


@pytest.mark.slow
def test_30_partial_sums_in_loops() -> None:
    check(range(30))
