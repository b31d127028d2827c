"""Folding of repeated layers: from a `Graph` to a class per node; one class is one decision.

Equal layers make a sequence of nodes that repeats with some period, forward and, in reverse,
backward. Nodes one period apart get one class, so the solver's problem does not grow with depth.
Nodes outside the runs (parameters, their optimizer updates) are classed by their neighbours: colour
refinement, with the runs' classes as fixed colours.

Folding is a restriction, not a relaxation: its objective is attained, and optimal among plans that
shard equal layers equally. A period must contain two matrix products in the forward pass, otherwise
it is doubled, so that layers may still alternate (column-, then row-split kernels).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import Graph, Node, NodeKind, Rule
from autopar.rewrite.repeats import longest_repeat

MIN_REPEATS = 4
MIN_REPEATS_IN_LARGE_GRAPHS = 2
LARGE_GRAPH = 3000  # nodes; above this, solve time matters more than freedom within pairs
_PLACED = ("slice", "pad")  # ops whose parameters say where, and whose rules say all the rest
_NEAR = 48
_FAR = 10**6
_MATCHING_SHARE = 0.7
_MAX_SWEEPS = 6


@dataclass(frozen=True)
class _Run:
    """`length` positions from `start` on that repeat with a period. Positions in `odd` do not match
    the others and stay single."""

    start: int
    length: int
    period: int
    odd: frozenset[int] = frozenset()


def fold_repeated_layers(graph: Graph) -> list[int]:
    """The class of every node; equal classes take equal strategies."""
    singles = list(range(len(graph.nodes)))
    positions = [
        i
        for i, n in enumerate(graph.nodes)
        if n.kind in (NodeKind.OP, NodeKind.FINISH) and n.region != "update"
    ]
    repeats = MIN_REPEATS if len(graph.nodes) < LARGE_GRAPH else MIN_REPEATS_IN_LARGE_GRAPHS
    rules = _rule_numbers(graph)
    runs = _find_runs(graph, positions, _tokens(graph, positions, rules), repeats)
    stretch = 1
    for run in runs:
        unit = [graph.nodes[positions[i]] for i in range(run.start, run.start + run.period)]
        products = sum(n.is_heavy for n in unit if n.region == "forward")
        if products == 1:
            stretch = 2
    runs = [r for r in runs if r.length >= repeats * stretch * r.period]
    if not runs:
        return singles
    fixed: dict[int, int] = {}
    next_class = 0
    for run in runs:
        for offset in range(run.length):
            if run.start + offset not in run.odd:
                fixed[positions[run.start + offset]] = next_class + offset % (run.period * stretch)
        next_class += run.period * stretch
    return _refine(graph, fixed, rules)


def _rule_numbers(graph: Graph) -> list[int]:
    """Per node, a number for its rule: equal rules are mostly one object, and slow to compare."""
    numbers: dict[Rule, int] = {}
    of_object: dict[int, int] = {}
    for node in graph.nodes:
        if id(node.rule) not in of_object:
            of_object[id(node.rule)] = numbers.setdefault(node.rule, len(numbers))
    return [of_object[id(node.rule)] for node in graph.nodes]


def _tokens(graph: Graph, positions: list[int], rules: list[int]) -> np.ndarray:
    """A number per node for its op and the distances to its operands."""
    place = {node: i for i, node in enumerate(positions)}
    numbers: dict[object, int] = {}
    tokens = np.empty(len(positions), dtype=np.int64)
    for i, index in enumerate(positions):
        node = graph.nodes[index]
        reads = []
        for value in node.operands:
            producer = graph.producer[value][0]
            near = producer in place and graph.nodes[producer].region == node.region
            distance = i - place[producer] if near else _FAR
            # A value computed once for all layers is ever farther from its readers.
            reads.append(distance if distance <= _NEAR else _FAR)
        # The rule too: equal equations differ in whether partial sums may flow through them.
        kind = (
            node.kind.value,
            _signature(node),
            node.name,
            rules[index],
            node.weight,
            node.chance,
            node.region,
        )
        key = (kind, tuple(reads))
        tokens[i] = numbers.setdefault(key, len(numbers))
    return tokens


def _signature(node: Node) -> object:
    """What tells ops apart beside their rules. Slices of parameters that are stacked over layers,
    and the gradients put back there, differ in their places alone."""
    return None if node.name in _PLACED else node.signature


def _find_runs(graph: Graph, positions: list[int], tokens: np.ndarray, repeats: int) -> list[_Run]:
    """Disjoint periodic stretches, longest first."""
    last_seen: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i, index in enumerate(positions):
        if graph.nodes[index].is_heavy:
            token = int(tokens[i])
            if token in last_seen:
                distances[i - last_seen[token]] += 1
            last_seen[token] = i
    candidates = [d for d, count in distances.most_common(24) if count >= repeats - 1]
    free = np.ones(len(tokens), dtype=bool)
    runs: list[_Run] = []
    while candidates:
        best: _Run | None = None
        for period in candidates:
            start, length = longest_repeat(tokens, period, free) if period < len(tokens) else (0, 0)
            if length >= repeats * period and (
                best is None or (length, -period) > (best.length, -best.period)
            ):
                best = _Run(start, length, period)
        if best is None:
            break
        unit = positions[best.start : best.start + best.period]
        if any(graph.nodes[index].is_heavy for index in unit):
            best = _extend(tokens, free, best)
            runs.append(best)
        # Otherwise it is a stretch of light nodes (additions of accumulated gradients) with another
        # period, and refinement classes it better.
        free[best.start : best.start + best.length] = False
    return runs


def _extend(tokens: np.ndarray, free: np.ndarray, run: _Run) -> _Run:
    """Extend a run by whole periods on either side that mostly match, such as a first layer that
    reads the embedding instead of a layer."""
    start, length, period, odd = run.start, run.length, run.period, set(run.odd)
    first, last = tokens[start : start + period], tokens[start + length - period : start + length]
    while start >= period and free[start - period : start].all():
        same = tokens[start - period : start] == first
        if same.mean() < _MATCHING_SHARE:
            break
        start, length = start - period, length + period
        odd.update(int(i) for i in start + np.flatnonzero(~same))
    while start + length + period <= len(tokens):
        end = start + length
        if not free[end : end + period].all():
            break
        same = tokens[end : end + period] == last
        if same.mean() < _MATCHING_SHARE:
            break
        length += period
        odd.update(int(i) for i in end + np.flatnonzero(~same))
    return _Run(start, length, period, frozenset(odd))


def _refine(graph: Graph, fixed: dict[int, int], rules: list[int]) -> list[int]:
    """Classes of all nodes, with those of the runs fixed: colour refinement in sweeps.

    A forward sweep colours a node by its operands, a backward sweep by its readers, so a few sweeps
    carry the runs' colours through the whole optimizer."""
    readers: list[list[tuple[int, int]]] = [[] for _ in graph.nodes]
    made_from: list[tuple[int, ...]] = []
    for index, node in enumerate(graph.nodes):
        made_from.append(tuple(graph.producer[v][0] for v in node.operands))
        # Gradients of layers are stacked in the order of layers, which tells them not apart.
        is_stack = node.name == "concatenate"
        for position, producer in enumerate(made_from[-1]):
            readers[producer].append((index, 0 if is_stack else position))
    becomes = {
        graph.producer[graph.inputs[i]][0]: graph.producer[value][0]
        for i, o in graph.state
        if (value := graph.outputs[o]) is not None
    }
    colours: list[int] = []
    for index, node in enumerate(graph.nodes):
        if index in fixed:
            colours.append(hash(("run", fixed[index])))
            continue
        shapes = tuple(graph.values[v].shape for v in node.results)
        signature = _signature(node)
        times = node.weight, node.chance
        kind = (node.kind.value, signature, node.name, rules[index], times, node.region)
        colours.append(hash((kind, shapes)))
    free = [(i, made_from[i], becomes.get(i, i)) for i in range(len(colours)) if i not in fixed]
    reading = [(i, *zip(*readers[i], strict=True)) for i, *_ in reversed(free) if readers[i]]
    count = len(set(colours))
    colour_of = colours.__getitem__
    for _ in range(_MAX_SWEEPS):
        for i, producers, successor in free:
            colours[i] = hash((colours[i], tuple(map(colour_of, producers)), colours[successor]))
        for i, consumers, places in reading:
            read_by = frozenset(zip(map(colour_of, consumers), places, strict=True))
            colours[i] = hash((colours[i], read_by))
        distinct = len(set(colours))
        if distinct == count:
            break
        count = distinct
    numbers: dict[int, int] = {}
    return [numbers.setdefault(c, len(numbers)) for c in colours]
