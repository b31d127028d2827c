"""What a stage holds in memory: from the graph of its step to one with micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.graph import Graph, Life
from autopar.rewrite.stage_slices import StageSlice


def in_flight_of(stage: StageSlice, count: int) -> Callable[[Graph], Graph]:
    return lambda graph: with_in_flight(graph, stage, count)


def with_in_flight(graph: Graph, stage: StageSlice, count: int) -> Graph:
    """The graph with what a stage holds of `count` micro-batches in flight, and without the stacks
    of what it sends and receives, of which only single micro-batches exist.

    A residual is a result of the forward program and an argument of the backward one, so it is
    there while either runs. Gradients that arrive are read by the backward program alone: there is
    one of each."""
    body = stage.body
    inside = {r for e in body.equations for r in e.results} | set(body.inputs)
    times = [graph.liveness.times[graph.producer[v][0]] for v in inside if v in graph.producer]
    residuals = {v for v in stage.residual_values() if v in graph.producer}
    forward = [body.equations[i] for i in stage.forward]
    kept = residuals.intersection(v for e in forward for v in (*e.inputs, *e.results))
    lives = [
        life
        for life in graph.liveness.lives
        if life.value not in stage.stacks and life.value not in kept
    ]
    lives += [Life(value, min(times), max(times), count) for value in sorted(kept)]
    return replace(graph, liveness=replace(graph.liveness, lives=tuple(lives)))
