"""Graphs of equal stages are read off one that is known, and are what `build_graph` makes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.ir.graph import Graph, check_graph
from autopar.rewrite.step_source import StepSource
from autopar.stages.looped import StageSpec, find_looped, slice_into
from autopar.tracer import equal_graphs
from autopar.tracer.build import build_graph
from autopar.tracer.equal_graphs import EqualGraphs
from autopar.tracer.trace import StepOptions
from examples.models import build


def _stage_steps(step: Any, args: tuple[Any, ...], num_stages: int) -> list[Any]:
    source = StepSource.of(step, args, {}, StepOptions())
    looped = find_looped(source.as_loop(4), autopar.AutoLayers(num_stages))
    specs = [StageSpec((k, k + 1), (1, 2)) for k in range(len(looped.layers))]
    return [cut.step for cut in slice_into(looped, specs).stages]


def _assert_equal(one: Graph, other: Graph) -> None:
    for part in fields(Graph):
        assert getattr(one, part.name) == getattr(other, part.name), part.name


def plain_step(weights: Any, batch: Any) -> tuple[Any, Any]:
    def loss(weights: Any) -> Any:
        x = batch["x"]
        for number, (up, down) in enumerate(weights):
            with jax.named_scope(f"layer_{number}"):
                x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def _plain() -> tuple[Any, tuple[Any, ...]]:
    up, down = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 64), (64, 16)))
    batch = {"x": jax.ShapeDtypeStruct((64, 16), jnp.float32)}
    return plain_step, ([(up, down)] * 6, batch)


def _gpt() -> tuple[Any, tuple[Any, ...]]:
    example = build("gpt-tiny", 16)
    return example.train_step, (example.abstract_state(), example.abstract_batch())


@pytest.mark.parametrize(("make", "num_stages"), [(_plain, 6), (_gpt, 4)])
def test_every_stage_has_the_graph_that_is_built_of_it(
    make: Any, num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args = make()
    steps = _stage_steps(step, args, num_stages)
    built: list[Any] = []

    def counted(step: Any, **options) -> Graph:
        built.append(step)
        return build_graph(step, **options)

    monkeypatch.setattr(equal_graphs, "build_graph", counted)
    graphs = EqualGraphs()
    for stage in [*steps, *steps[::-1]]:
        graph = graphs.of(stage)
        check_graph(graph)
        _assert_equal(graph, build_graph(stage))
    if make is _plain:
        assert len(built) < len(steps)


def test_values_may_be_added_to_the_program_later() -> None:
    """Stages share one list of values, and a layer that is recomputed adds some."""
    step, args = _plain()
    stages = _stage_steps(step, args, 6)
    graphs = EqualGraphs()
    for stage in stages:
        _assert_equal(graphs.of(stage), build_graph(stage))
        stage.program.avals.extend(stage.program.avals[:3])


def test_a_constant_that_is_zero_makes_another_graph() -> None:
    """A loop that starts at zero only adds up; one that starts at one does not."""

    def step_from(start: float) -> Any:
        def step(w: Any, batch: Any) -> Any:
            sums, _ = jax.lax.scan(
                lambda total, x: (total + x.T @ x, None), jnp.full((8, 8), start), batch
            )
            return w + sums

        w, batch = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 8), (4, 16, 8)))
        return StepSource.of(step, (w, batch), {}, StepOptions()).whole

    graphs = EqualGraphs()
    for start in (0.0, 1.0, 0.0):
        _assert_equal(graphs.of(step_from(start)), build_graph(step_from(start)))


def test_a_stage_has_another_graph_than_the_same_step_as_a_whole() -> None:
    step, args = _plain()
    (stage, *_) = _stage_steps(step, args, 6)
    graphs = EqualGraphs()
    whole = replace(stage, is_stage=False)
    assert graphs.of(stage) is not graphs.of(whole)
    _assert_equal(graphs.of(whole), build_graph(whole))
