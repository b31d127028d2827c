"""What a stage holds in memory: from the graph of its step to one with micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir.graph import Graph, Life, NodeKind
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
    lives = _in_two_programs(graph, stage, lives)
    lives += [Life(value, min(times), max(times), count) for value in sorted(kept)]
    return replace(graph, liveness=replace(graph.liveness, lives=tuple(lives)))


def _in_two_programs(graph: Graph, stage: StageSlice, lives: list[Life]) -> list[Life]:
    """The lives, none of which goes on from the forward to the backward program: what this one does
    not read from the other, it makes again when it first needs it, or does not need. In the forward
    program such a value counts until its end."""
    equations = stage.body.equations
    made = {v for i in stage.forward for v in equations[i].results if v in graph.producer}
    first = _first_needed(graph, made, {v for i in stage.backward for v in equations[i].results})
    times = graph.liveness.times
    end = max((times[graph.producer[v][0]] for v in made), default=-1)
    found: list[Life] = []
    for life in lives:
        if life.value not in made or not life.start <= end < life.end:
            found.append(life)
            continue
        found.append(replace(life, end=end))
        if life.value in first:
            found.append(replace(life, start=min(max(first[life.value], end + 1), life.end)))
    return found


def _first_needed(graph: Graph, made: set[int], made_backward: set[int]) -> dict[int, int]:
    """When equations of the backward program alone first need a value, also through those that it
    computes again. `made`: by the forward program; `made_backward`: by the backward one."""
    only_forward, only_backward = made - made_backward, made_backward - made
    first: dict[int, int] = {}
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        if node.kind is NodeKind.MERGE or not only_forward.isdisjoint(node.results):
            continue
        needed = [first[v] for v in node.results if v in first]
        if not only_backward.isdisjoint(node.results):
            needed.append(graph.liveness.times[index])
        for value in node.operands if needed else ():
            first[value] = min(first.get(value, min(needed)), min(needed))
    return first
