"""Graphs that are built once for all searches of a plan."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from autopar.ir.traced_step import TracedStep
from autopar.tracer import known_graphs
from autopar.tracer.build import build_graph
from autopar.tracer.known_graphs import KnownGraphs
from autopar.tracer.trace_step import trace_step
from tests.unit.tracer.memory_graphs import array


def product() -> TracedStep:
    return trace_step(lambda w, x: jnp.tanh(x @ w), (array(8, 8), array(4, 8)))


def test_a_step_is_built_once() -> None:
    graphs, step = KnownGraphs(), product()
    assert graphs.of(step) is graphs.of(step)
    assert graphs.of(step) == build_graph(step)


def test_an_equal_step_and_another_order_have_graphs_of_their_own() -> None:
    graphs, step = KnownGraphs(), product()
    assert graphs.of(step) is not graphs.of(product())
    alone = graphs.of(step, overlaps=False)
    assert alone is not graphs.of(step)
    assert alone == build_graph(step, overlaps=False)
    assert graphs.of(step, in_stages=True) is not graphs.of(step)


def test_the_graphs_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_graphs, "_MOST", 2)
    graphs, steps = KnownGraphs(), [product() for _ in range(3)]
    first, second = graphs.of(steps[0]), graphs.of(steps[1])
    assert graphs.of(steps[0]) is first  # now the second is the oldest
    graphs.of(steps[2])
    assert graphs.of(steps[0]) is first
    assert graphs.of(steps[1]) is not second
