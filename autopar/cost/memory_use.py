"""Memory over time by category: from `MemoryProfile` and `Roles` to `MemoryUse`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.cost.holding import Holding
from autopar.cost.memory import MemoryProfile
from autopar.cost.parallelism_labels import op_name
from autopar.cost.roles import Roles
from autopar.ir.details import MEMORY_CATEGORIES, HeldArray, MemoryUse
from autopar.ir.graph import Graph, NodeKind
from autopar.tracer.regions import UPDATE

NUM_POINTS = 300
NUM_LARGEST = 20

_NUMBER = {name: number for number, name in enumerate(MEMORY_CATEGORIES)}


def memory_use(
    graph: Graph,
    profile: MemoryProfile,
    roles: Roles,
    seconds: Sequence[float],
    rounded: Callable[[float], float],
) -> MemoryUse:
    """`seconds`: of every node, over all its runs."""
    category = _Categories(graph, roles)
    numbers = np.array([_NUMBER[category.of(h)] for h in profile.holdings], dtype=int)
    size = np.array([h.num_bytes for h in profile.holdings])
    starts = np.array([h.start for h in profile.holdings], dtype=int)
    ends = np.array([h.end for h in profile.holdings], dtype=int)
    change = np.zeros((profile.num_times + 2, len(MEMORY_CATEGORIES)))
    if len(size):
        np.add.at(change, (starts, numbers), size)
        np.add.at(change, (ends + 1, numbers), -size)
    held = np.maximum(np.cumsum(change, axis=0)[: profile.num_times + 1], 0.0)
    spent = np.zeros(profile.num_times + 1)
    np.add.at(spent, np.asarray(graph.liveness.times, dtype=int), np.asarray(seconds))
    begins = np.cumsum(spent) - spent
    peak = profile.peak_time
    points = _points(held.sum(axis=1), peak)
    return MemoryUse(
        seconds=tuple(rounded(float(begins[p])) for p in points),
        held=tuple(tuple(map(rounded, held[p].tolist())) for p in points),
        at_peak=tuple(map(rounded, held[peak].tolist())),
        peak_s=rounded(float(begins[peak])),
        largest=tuple(
            HeldArray(category.text(h), category.module(h), category.of(h), rounded(h.num_bytes))
            for h in profile.at(peak)[:NUM_LARGEST]
        ),
    )


def _points(total: np.ndarray, peak: int) -> list[int]:
    """Times that show the curve: the first, lowest and highest points of equal spans."""
    if len(total) <= NUM_POINTS:
        return list(range(len(total)))
    points = {0, peak, len(total) - 1}
    for span in np.array_split(np.arange(len(total)), NUM_POINTS // 3 - 1):
        part = total[span]
        points |= {int(span[0]), int(span[part.argmin()]), int(span[part.argmax()])}
    return sorted(points)


class _Categories:
    def __init__(self, graph: Graph, roles: Roles) -> None:
        self.graph, self.roles = graph, roles
        self.state = {graph.inputs[i] for i, _ in graph.state}
        self.batch = {graph.inputs[i] for i in graph.batch}
        self.new_state = {graph.outputs[o]: graph.inputs[i] for i, o in graph.state}

    def of(self, holding: Holding) -> str:
        if holding.is_copy:
            return "resharded copies"
        roles, value = self.roles, self.new_state.get(holding.value, holding.value)
        if value in roles.parameters:
            return "parameters"
        if value in self.state:
            return "optimizer state"
        if value in self.batch:
            return "batch"
        if value in roles.made_of:
            return "resharded copies"
        if value in roles.gradient_of:
            return "gradients"
        node = self.graph.nodes[self.graph.producer[value][0]]
        if node.kind is NodeKind.INPUT or node.region == UPDATE:
            return "other"
        return "activations"

    def text(self, holding: Holding) -> str:
        graph, value = self.graph, holding.value
        text = self.roles.text(graph, value)
        known = graph.values[value].path is not None or value in self.roles.made_of
        if known or value in self.roles.gradient_of:
            return f"{text}, resharded" if holding.is_copy else text
        return f"{op_name(graph.nodes[self._maker(value)])}: {text}"

    def module(self, holding: Holding) -> str:
        return self.graph.nodes[self._maker(holding.value)].module

    def _maker(self, value: int) -> int:
        """The op that makes a value, skipping nodes that only stand between ops."""
        graph = self.graph
        index = graph.producer[value][0]
        for _ in range(8):
            node = graph.nodes[index]
            if node.kind in (NodeKind.OP, NodeKind.INPUT) or not node.operands:
                break
            index = graph.producer[node.operands[0]][0]
        return index
