"""The layer and phase of every node: from a `Graph` and the layers of equations to `NodeLayers`.

Equations have layers already, unless several layers share them. Nodes without an equation, and
equations without a layer, follow by data flow:

- a carry belongs to the layer that makes its sum; an argument to the layer that makes the result
  that replaces it or, without one, to the first layer that reads it;
- a value computed from one layer's values alone belongs to that layer, any other to the first layer
  that reads it.

Values that nobody reads are *shared*.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.graph import Graph, Node, NodeKind

SHARED = -1
PER_STEP, FORWARD, BACKWARD = range(3)


@dataclass(frozen=True, eq=False)
class NodeLayers:
    """layer:     of each node, or `SHARED`.
    phase:     of each node: once per step, or in the forward or backward pass of a micro-batch.
    residuals: forward value stored for the backward pass -> the layer that stores it; None for
               all values that backward equations read."""

    layer: np.ndarray
    phase: np.ndarray
    num_layers: int
    residuals: Mapping[int, int] | None = None


def place_nodes(
    graph: Graph,
    equation_layers: Sequence[int],
    is_backward: Mapping[int, bool],
    num_layers: int,
) -> NodeLayers:
    """`equation_layers`: the layer of every equation, numbered as in `Node.equation`, or `SHARED`;
    `is_backward`: equation that every micro-batch runs -> whether it is in the backward pass."""
    return _Placer(graph, equation_layers, is_backward, num_layers).placed()


class _Placer:
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
        self.phase = [PER_STEP] * len(graph.nodes)
        self.readers: list[list[int]] = [[] for _ in graph.nodes]
        self.made_from: list[list[int]] = []
        for index, node in enumerate(graph.nodes):
            self.made_from.append([graph.producer[v][0] for v in node.operands])
            for producer in self.made_from[-1]:
                self.readers[producer].append(index)

    def placed(self) -> NodeLayers:
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
            if self.layer[index] == SHARED and self.phase[index] == PER_STEP:
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
                reader_layers = [self.layer[r] for r in self.readers[index]]
                self.layer[index] = min((x for x in reader_layers if x != SHARED), default=SHARED)
        for index, before in enumerate(self.made_from):  # values that nobody reads
            if before and self.layer[index] == SHARED:
                self.layer[index] = self.layer[before[0]]
        return NodeLayers(np.array(self.layer), np.array(self.phase), self.num_layers)

    def place_structure(self) -> None:
        """Places nodes without an equation that run for every micro-batch: those between equations
        that do, and the slices and stacks of the loop around these."""
        nodes = self.graph.nodes
        inside = [i for i, phase in enumerate(self.phase) if phase != PER_STEP]
        if not inside:
            return
        first, last = inside[0], inside[-1]

        def is_run_each(index: int) -> bool:
            node = nodes[index]
            if node.equation is not None or node.kind is NodeKind.INPUT:
                return False
            return first < index < last or node.name in ("scan_slice", "scan_stack")

        steps = [i for i in range(len(nodes)) if is_run_each(i)]
        for order, neighbours in ((steps[::-1], self.readers), (steps, self.made_from)):
            for index in order:
                placed = [i for i in neighbours[index] if self.phase[i] != PER_STEP]
                if self.phase[index] == PER_STEP and placed:
                    self.layer[index] = self.layer[placed[0]]
                    self.phase[index] = self.phase[placed[0]]

    def place_floating(self) -> None:
        """Puts equations that micro-batches run but no layer has into the pass of their first
        reader."""
        for index in range(len(self.graph.nodes) - 1, -1, -1):
            if self.phase[index] != PER_STEP and self.layer[index] == SHARED:
                phases = [self.phase[r] for r in self.readers[index] if self.phase[r] != PER_STEP]
                self.phase[index] = min(phases, default=self.phase[index])

    def follow_operands(self, index: int, node: Node) -> None:
        """Outside of the loop: takes the layer of all operands, if they have only one."""
        if node.kind is NodeKind.INPUT:
            return
        operand_layers = {self.layer[p] for p in self.made_from[index] if p < index} - {SHARED}
        if len(operand_layers) == 1:
            (self.layer[index],) = operand_layers
