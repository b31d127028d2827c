"""Repeated layers, found in the graph itself and tied to one decision.

A model of equal layers makes a node sequence that repeats with some period, forward and, in
reverse, backward. Nodes one period apart get one class, and a class is one decision: the solver's
problem does not grow with depth. Nodes outside the runs (parameters, their optimizer updates) are
classed by what they touch: colour refinement, with the runs' classes as fixed colours.

Tying is a restriction, not a relaxation: the objective it gives is attained, and optimal among
plans that treat equal layers alike. A period must hold two matrix products in the forward pass,
else it is doubled, so that layers may still alternate (column-, then row-split kernels).
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from autopar.ir.graph import Graph, NodeKind

MIN_REPEATS = 4
_FAR = 10**6
_ROUNDS = 12


def fold_repeated_layers(graph: Graph) -> list[int]:
    """The class of every node; equal classes take equal strategies."""
    singles = list(range(len(graph.nodes)))
    positions = [
        i for i, n in enumerate(graph.nodes) if n.kind in (NodeKind.OP, NodeKind.FINISH)
    ]
    tokens = _tokens(graph, positions)
    runs = _find_runs(graph, positions, tokens)
    if not runs:
        return singles
    stretch = 1
    for start, length, period in runs:
        unit = [graph.nodes[positions[i]] for i in range(start, start + period)]
        forward_products = sum(n.is_heavy for n in unit if n.region == "forward")
        if any(n.region == "forward" and n.is_heavy for n in unit) and forward_products < 2:
            stretch = 2
    runs = [r for r in runs if r[1] >= MIN_REPEATS * stretch * r[2]]
    if not runs:
        return singles
    fixed: dict[int, int] = {}
    next_class = 0
    for start, length, period in runs:
        for offset in range(length):
            fixed[positions[start + offset]] = next_class + offset % (period * stretch)
        next_class += period * stretch
    return _refine(graph, fixed)


def _tokens(graph: Graph, positions: list[int]) -> np.ndarray:
    """A number per node that says what it does and from how far back it reads."""
    place = {node: i for i, node in enumerate(positions)}
    numbers: dict[object, int] = {}
    tokens = np.empty(len(positions), dtype=np.int64)
    for i, index in enumerate(positions):
        node = graph.nodes[index]
        reads = []
        for value in node.operands:
            producer = graph.producer[value][0]
            near = producer in place and graph.nodes[producer].region == node.region
            reads.append(i - place[producer] if near else _FAR)
        key = (node.kind, node.signature, node.name, node.weight, node.region, tuple(reads))
        tokens[i] = numbers.setdefault(key, len(numbers))
    return tokens


def _find_runs(
    graph: Graph, positions: list[int], tokens: np.ndarray
) -> list[tuple[int, int, int]]:
    """Disjoint periodic stretches as (start, length, period), the longest first."""
    heavy = [i for i, index in enumerate(positions) if graph.nodes[index].is_heavy]
    last_seen: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for i in heavy:
        token = int(tokens[i])
        if token in last_seen:
            distances[i - last_seen[token]] += 1
        last_seen[token] = i
    candidates = [d for d, count in distances.most_common(24) if count >= MIN_REPEATS - 1]
    free = np.ones(len(tokens), dtype=bool)
    runs: list[tuple[int, int, int]] = []
    while candidates:
        best: tuple[int, int, int] | None = None
        for period in candidates:
            start, length = _longest_run(tokens, free, period)
            if length >= MIN_REPEATS * period and (
                best is None or (length, -period) > (best[1], -best[2])
            ):
                best = (start, length, period)
        if best is None:
            break
        runs.append(best)
        free[best[0] : best[0] + best[1]] = False
    return runs


def _longest_run(tokens: np.ndarray, free: np.ndarray, period: int) -> tuple[int, int]:
    if period >= len(tokens):
        return 0, 0
    same = (tokens[:-period] == tokens[period:]) & free[:-period] & free[period:]
    padded = np.concatenate(([0], same.astype(np.int8), [0]))
    edges = np.diff(padded)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if not len(starts):
        return 0, 0
    best = int(np.argmax(ends - starts))
    return int(starts[best]), int(ends[best] - starts[best]) + period


def _refine(graph: Graph, fixed: dict[int, int]) -> list[int]:
    """Colour refinement of the nodes outside the runs."""
    readers: list[set[tuple[int, int]]] = [set() for _ in graph.nodes]
    state_of = {graph.producer[graph.inputs[i]][0]: graph.outputs[o] for i, o in graph.state}
    for index, node in enumerate(graph.nodes):
        for position, value in enumerate(node.operands):
            readers[graph.producer[value][0]].add((index, position))
    numbers: dict[object, int] = {}
    colours: list[int] = []
    for index, node in enumerate(graph.nodes):
        shape = tuple(graph.values[v].shape for v in node.results)
        key: object = ("run", fixed.get(index))
        if index not in fixed:
            key = (node.kind, node.signature, node.name, node.weight, node.region, shape)
        colours.append(numbers.setdefault(key, len(numbers)))
    count = len(numbers)
    for _ in range(_ROUNDS):
        numbers = {}
        updated = []
        for index, node in enumerate(graph.nodes):
            key = ("run", colours[index])
            if index not in fixed:
                made_from = tuple(colours[graph.producer[v][0]] for v in node.operands)
                read_by = tuple(sorted({(colours[r], k) for r, k in readers[index]}))
                out = state_of.get(index)
                becomes = colours[graph.producer[out][0]] if out is not None else -1
                key = (colours[index], made_from, read_by, becomes)
            updated.append(numbers.setdefault(key, len(numbers)))
        colours = updated
        if len(numbers) == count:
            break
        count = len(numbers)
    return colours
