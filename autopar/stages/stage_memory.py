"""What a stage holds in memory: from the graph of its step to one with micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Life, Liveness, Node, NodeKind
from autopar.rewrite.stage_slices import StageSlice
from autopar.tracer.costs import REDUCTIONS, UNFUSED, VIEWS
from autopar.tracer.fusion import padded_operands
from autopar.tracer.regions import BACKWARD, FORWARD


def in_flight_of(
    stage: StageSlice, count: int, known: KnownInFlight | None = None
) -> Callable[[Graph], Graph]:
    """`with_in_flight` of a stage. `known`: where stages are planned again and again."""
    found = with_in_flight if known is None else known.of
    return lambda graph: found(graph, stage, count)


@dataclass
class KnownInFlight:
    """The last graph with micro-batches in flight: a stage is asked for its peak before it is
    planned, and once for each of its equals."""

    _last: tuple[Graph, StageSlice, int, Graph] | None = None

    def of(self, graph: Graph, stage: StageSlice, count: int) -> Graph:
        if self._last is not None:
            of_graph, of_stage, of_count, found = self._last
            if of_graph is graph and of_stage is stage and of_count == count:
                return found
        found = with_in_flight(graph, stage, count)
        self._last = graph, stage, count, found
        return found


def with_in_flight(graph: Graph, stage: StageSlice, count: int) -> Graph:
    """The graph with what a stage holds of `count` micro-batches in flight, and without the stacks
    of what it sends and receives, of which only single micro-batches exist.

    A residual is a result of the forward program and an argument of the backward one, so it is
    there while either runs. Gradients that arrive are read by the backward program alone: there is
    one of each."""
    return replace(
        graph, liveness=graph.liveness.having(lambda one: _in_flight(graph, one, stage, count))
    )


def _in_flight(graph: Graph, liveness: Liveness, stage: StageSlice, count: int) -> Liveness:
    body = stage.body
    inside = {r for e in body.equations for r in e.results} | set(body.inputs)
    times = [liveness.times[graph.producer[v][0]] for v in inside if v in graph.producer]
    residuals = {v for v in stage.residual_values() if v in graph.producer}
    forward = [body.equations[i] for i in stage.forward]
    kept = residuals.intersection(v for e in forward for v in (*e.inputs, *e.results))
    cut = {v for v in stage.batch_slices() if v in graph.producer}
    elsewhere = kept | cut | set(stage.stacks)
    lives = [life for life in liveness.lives if life.value not in elsewhere]
    liveness, lives = _in_two_programs(graph, liveness, stage, lives)
    lives += [Life(value, min(times), max(times), count) for value in sorted(kept - cut)]
    lives += _slices(replace(graph, liveness=liveness), stage, times, count, kept)
    lives += _padded_residuals(replace(graph, liveness=liveness), stage, kept)
    return replace(liveness, lives=tuple(lives))


def _slices(
    graph: Graph, stage: StageSlice, times: list[int], count: int, kept: set[int]
) -> list[Life]:
    """Micro-batches of the batch, all of which one program cuts before the first runs. When the
    first backward program runs, `count` forward ones have, and freed what that does not read."""
    begin, last, end = min(times), max(times), _end_of_forward(graph, stage)
    num, found = stage.step.num_micro_batches, list[Life]()
    for value in sorted(v for v in stage.batch_slices() if v in graph.producer):
        if value in kept:
            found.append(Life(value, begin, last, num))
            continue
        if begin <= end:
            found.append(Life(value, begin, end, max(1, num - count + 1)))
        if num > count and end < last:
            found.append(Life(value, end + 1, last, num - count))
    return found


def _padded_residuals(graph: Graph, stage: StageSlice, kept: set[int]) -> list[Life]:
    """Copies with zeros at the end of residuals that products read so: nothing holds the backward
    program back from making them at its beginning."""
    source = {v: v for v in kept}
    begin = 1 + _end_of_forward(graph, stage)
    found: dict[int, Life] = {}
    for index, node in enumerate(graph.nodes):
        is_view = node.name in VIEWS or node.kind in (NodeKind.USE, NodeKind.FINISH)
        if is_view and node.operands and node.operands[0] in source:
            source[node.results[0]] = source[node.operands[0]]
        for operand in padded_operands(node, graph.values) if node.region == BACKWARD else ():
            if operand in source:
                value, time = source[operand], graph.liveness.times[index]
                found[value] = Life(value, begin, max(begin, time))
    return list(found.values())


def _end_of_forward(graph: Graph, stage: StageSlice) -> int:
    """The last time of the forward program. Backward constants may be made in either."""
    made = {v for i in stage.forward for v in stage.body.equations[i].results}
    makers = [graph.producer[v][0] for v in made if v in graph.producer]
    times = [graph.liveness.times[i] for i in makers if graph.nodes[i].region == FORWARD]
    return max(times, default=-1)


def _in_two_programs(
    graph: Graph, liveness: Liveness, stage: StageSlice, lives: list[Life]
) -> tuple[Liveness, list[Life]]:
    """The lives, and copies for nodes, none of which goes on from the forward to the backward
    program: what this one does not read from the other, it makes again when it first needs it, or
    does not need."""
    graph = replace(graph, liveness=liveness)
    equations = stage.body.equations
    made = {v for i in stage.forward for v in equations[i].results if v in graph.producer}
    made_backward = {v for i in stage.backward for v in equations[i].results}
    written = {life.value for life in graph.liveness.lives}
    first = _first_needed(graph, made, made_backward)
    _with_gradients(graph, first, made, made_backward, written)
    last = _last_needed(graph, made, written)
    only_backward, end = made_backward - made, _end_of_forward(graph, stage)
    found: list[Life] = []
    for life in lives:
        if life.value not in made or not life.start <= end < life.end:
            is_backward = life.value in only_backward and life.start <= end < life.end
            found.append(replace(life, start=end + 1) if is_backward else life)
            continue
        found.append(replace(life, end=min(max(last.get(life.value, life.start), life.start), end)))
        if life.value in first:
            found.append(replace(life, start=min(max(first[life.value], end + 1), life.end)))
    return _with_copies(graph, made, first, last, end), found


def _with_copies(
    graph: Graph, made: set[int], first: Mapping[int, int], last: Mapping[int, int], end: int
) -> Liveness:
    """With copies for nodes of the forward program, which ends at `end`, until that needs none; and
    with the nodes whose results are not handed on, so that the backward program runs them again."""
    liveness = graph.liveness
    node_ends, again = list(liveness.node_ends), list[tuple[int, int, int]]()
    for index, node in enumerate(graph.nodes):
        start, until = liveness.times[index], liveness.node_ends[index]
        if made.isdisjoint(node.results) or not start <= end < until:
            continue
        node_ends[index] = min(max([start, *(last.get(v, start) for v in node.results)]), end)
        needed = [first[v] for v in node.results if v in first]
        if needed:
            again.append((index, min(max(min(needed), end + 1), until), until))
    return replace(liveness, node_ends=tuple(node_ends), again=tuple(again))


def _last_needed(graph: Graph, made: set[int], written: set[int]) -> dict[int, int]:
    """Until when the forward program, which makes these values, needs each. What is not written is
    made again by each of its readers."""
    last: dict[int, int] = {}
    finished = [n for n in graph.nodes if n.kind is NodeKind.FINISH and n.results[0] in made]
    made = made.union(node.operands[0] for node in finished)
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        if node.kind is NodeKind.MERGE or node.region != FORWARD or made.isdisjoint(node.results):
            continue
        needed = graph.liveness.times[index]
        if written.isdisjoint(node.results):
            needed = max([needed, *(last[v] for v in node.results if v in last)])
        for value in node.operands:
            last[value] = max(last.get(value, needed), needed)
    return last


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


def _with_gradients(
    graph: Graph, first: dict[int, int], made: set[int], made_backward: set[int], written: set[int]
) -> None:
    """Moves forward elementwise values that the backward program makes again, in `first`: it makes
    each with the first elementwise kernel that reads the same array, such as an activation with its
    gradient."""
    kernel: dict[int, int] = {}  # value -> when the first elementwise kernel reads it
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        if not _is_elementwise(node):
            continue
        ends = [
            graph.liveness.times[index] if v in written else kernel.get(v) for v in node.results
        ]
        is_backward = made.isdisjoint(node.results) and not made_backward.isdisjoint(node.results)
        for value in node.operands:
            for end, result in zip(ends, node.results, strict=True):
                counts = is_backward or result not in written
                if end is not None and counts and _as_large(graph, value, result):
                    kernel[value] = min(kernel.get(value, end), end)
    for value in first:
        node = graph.nodes[graph.producer[value][0]]
        frontier = [value] if value in written and value in made and _is_elementwise(node) else []
        while frontier:
            for operand in graph.nodes[graph.producer[frontier.pop()][0]].operands:
                if not _as_large(graph, operand, value):
                    continue
                if operand in written:
                    first[value] = min(first[value], kernel.get(operand, first[value]))
                elif _is_elementwise(graph.nodes[graph.producer[operand][0]]):
                    frontier.append(operand)


def _is_elementwise(node: Node) -> bool:
    return node.kind is NodeKind.OP and node.name not in UNFUSED and node.name not in REDUCTIONS


def _as_large(graph: Graph, value: int, other: int) -> bool:
    return graph.values[value].shape == graph.values[other].shape
