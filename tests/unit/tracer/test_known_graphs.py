"""Graphs that are built once for all searches of a plan."""

from __future__ import annotations

from dataclasses import replace

import jax
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


def micro_batches() -> TracedStep:
    """A loop that copies its slices, which a stage's trips do not hide."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def trip(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(lambda w: jnp.tanh(rows.T @ jnp.tanh(rows @ w)).sum())(w), None

        return jax.lax.scan(trip, jnp.zeros_like(w), x)[0]

    return trace_step(step, (array(64, 64), array(4, 64, 64)))


@pytest.mark.parametrize("stage_first", [False, True])
def test_a_stage_and_the_whole_step_share_all_but_lives(
    stage_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, step = KnownGraphs(), micro_batches()
    first = graphs.of(step, in_stages=stage_first)
    with monkeypatch.context() as patch:
        patch.delattr(known_graphs, "build")  # nothing is built again
        second = graphs.of(step, in_stages=not stage_first)
        assert graphs.of(step, in_stages=stage_first) is first
    assert second.nodes is first.nodes
    stage, whole = (first, second) if stage_first else (second, first)
    assert whole == build_graph(step)
    assert stage == build_graph(replace(step, is_stage=True))
    assert stage.liveness != whole.liveness


def test_the_other_graph_of_an_older_step_is_built() -> None:
    """What lives follow from is kept of one step alone."""
    graphs, step = KnownGraphs(), micro_batches()
    graphs.of(step)
    graphs.of(product())
    assert graphs.of(step, in_stages=True) == build_graph(replace(step, is_stage=True))


def test_the_graphs_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_graphs, "_MOST", 2)
    graphs, steps = KnownGraphs(), [product() for _ in range(3)]
    first, second = graphs.of(steps[0]), graphs.of(steps[1])
    assert graphs.of(steps[0]) is first  # now the second is the oldest
    graphs.of(steps[2])
    assert graphs.of(steps[0]) is first
    assert graphs.of(steps[1]) is not second
