"""Every node of a graph to a layer and a phase: from the layers of equations to `NodePlaces`.

Equations have layers already, or none where several share them. Nodes that stand for no equation,
and equations of no layer, follow by data flow:

- a carry belongs where its sum is made, an argument where the result that replaces it is made or,
  if there is none, where it is first read;
- what is computed from one layer's values alone belongs to it, and anything else to the first
  layer that reads it.

What is left, since nobody reads it, is *shared*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import Graph, Node, NodeKind

SHARED = -1
ONCE, FORWARD, BACKWARD = range(3)


@dataclass(frozen=True, eq=False)
class NodePlaces:
    """Per node its layer (`SHARED` for none) and its phase: once per step, or in the forward or
    backward pass of every micro-batch. `kept`: forward value that is kept for the backward pass ->
    the layer that keeps it; None for all that backward equations read."""

    layer: np.ndarray
    phase: np.ndarray
    num_layers: int
    kept: Mapping[int, int] | None = None


def place_nodes(
    graph: Graph,
    equation_layers: Sequence[int],
    is_backward: Mapping[int, bool],
    num_layers: int,
) -> NodePlaces:
    """`equation_layers`: per equation, numbered as in `Node.equation`, its layer or `SHARED`;
    `is_backward`: of those that every micro-batch runs, whether they are of the backward pass."""
    return _Places(graph, equation_layers, is_backward, num_layers).found()


class _Places:
    def __init__(
        self,
        graph: Graph,
        equation_layers: Sequence[int],
        is_backward: Mapping[int, bool],
        num_layers: int,
    ) -> None:
        self.graph = graph
        self.equation_layers, self.is_backward = equation_layers, is_backward
        self.num_layers = num_layers
        self.layer = [SHARED] * len(graph.nodes)
        self.phase = [ONCE] * len(graph.nodes)
        self.readers: list[list[int]] = [[] for _ in graph.nodes]
        self.made_from: list[list[int]] = []
        for index, node in enumerate(graph.nodes):
            self.made_from.append([graph.producer[v][0] for v in node.operands])
            for producer in self.made_from[-1]:
                self.readers[producer].append(index)

    def found(self) -> NodePlaces:
        nodes = self.graph.nodes
        for index, node in enumerate(nodes):
            if node.equation is not None:
                self.layer[index] = self.equation_layers[node.equation]
                if node.equation in self.is_backward:
                    backward = self.is_backward[node.equation]
                    self.phase[index] = BACKWARD if backward else FORWARD
        self.place_structure()
        self.place_floating()
        for index, node in enumerate(nodes):
            if node.kind is NodeKind.MERGE and self.layer[index] == SHARED:
                later = [p for p in self.made_from[index] if p > index]
                self.layer[index] = next((self.layer[p] for p in later), SHARED)
        for index, node in enumerate(nodes):
            if self.layer[index] == SHARED and self.phase[index] == ONCE:
                self.follow_operands(index, node)
        updated_by = {
            self.graph.producer[self.graph.inputs[i]][0]: self.graph.producer[value][0]
            for i, o in self.graph.state
            if (value := self.graph.outputs[o]) is not None
        }
        for index in range(len(nodes) - 1, -1, -1):
            if self.layer[index] != SHARED:
                continue
            update = updated_by.get(index, index)
            if self.layer[update] != SHARED:
                self.layer[index] = self.layer[update]
            else:
                found = [self.layer[r] for r in self.readers[index]]
                self.layer[index] = min((x for x in found if x != SHARED), default=SHARED)
        for index, before in enumerate(self.made_from):  # what nobody reads
            if before and self.layer[index] == SHARED:
                self.layer[index] = self.layer[before[0]]
        return NodePlaces(np.array(self.layer), np.array(self.phase), self.num_layers)

    def place_structure(self) -> None:
        """Steps that stand for no equation but run for every micro-batch: those between the
        equations that do, and the slices and stacks of the loop around these."""
        nodes = self.graph.nodes
        inside = [i for i, phase in enumerate(self.phase) if phase != ONCE]
        if not inside:
            return
        first, last = inside[0], inside[-1]

        def is_run_each(index: int) -> bool:
            node = nodes[index]
            if node.equation is not None or node.kind is NodeKind.INPUT:
                return False
            return first < index < last or node.name in ("scan_slice", "scan_stack")

        steps = [i for i in range(len(nodes)) if is_run_each(i)]
        for order, served in ((steps[::-1], self.readers), (steps, self.made_from)):
            for index in order:
                found = [i for i in served[index] if self.phase[i] != ONCE]
                if self.phase[index] == ONCE and found:
                    self.layer[index], self.phase[index] = (
                        self.layer[found[0]],
                        self.phase[found[0]],
                    )

    def place_floating(self) -> None:
        """What micro-batches run and no layer has is made by its readers: in the pass of the first
        of them."""
        for index in range(len(self.graph.nodes) - 1, -1, -1):
            if self.phase[index] != ONCE and self.layer[index] == SHARED:
                found = [self.phase[r] for r in self.readers[index] if self.phase[r] != ONCE]
                self.phase[index] = min(found, default=self.phase[index])

    def follow_operands(self, index: int, node: Node) -> None:
        """Outside of the loop: the one layer that all operands have, if there is one."""
        if node.kind is NodeKind.INPUT:
            return
        found = {self.layer[p] for p in self.made_from[index] if p < index} - {SHARED}
        if len(found) == 1:
            (self.layer[index],) = found
