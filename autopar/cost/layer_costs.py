"""Time and memory of a solved graph by layer: from the costs of groups to a `LayerTable`.

Nodes of one class cost the same, so costs are known by *group*: of nodes (a class at one cost), of
edges (a pair of classes, a result and an operand) and of values (a class and its result). How the
costs of groups add up in layers does not depend on the mesh. `LayerTerms` finds that once; a
sharding on a mesh then has one cost per group (`GroupCosts`), and sums of these are the table.

Time. The node that reads pays for an edge, so a layer pays for what it reads from the one before.
Costs of no layer are spread over all layers in proportion to their own. So the sum over all layers,
n · latency + once, is the solver's objective.

Memory, with forward and backward pass of a micro-batch as two programs:

    held        values made outside of the loop and alive until its end, with their copies in other
                layouts; sums over micro-batches, in full where they are reduced after the loop;
                results that replace no argument
    in flight   residuals handed to the backward program, counted in a layer that reads them;
                without values made from parameters and constants alone, which are recomputed
    working     the maximum of what else is alive while the layer runs or is updated; other forward
                values that the backward pass reads, which its program makes again for each layer

A recomputed layer stores the values that it reads from other layers; its forward time is added, and
its residuals count as working memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.cost.node_layers import BACKWARD, FORWARD, PER_STEP, NodeLayers
from autopar.cost.report import edge_weight
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.stages import LayerTable, Submesh

STATE_EDGE = -1  # the operand position of a state output that becomes the next step's input
_PHASES = 3
# Ops between a value and a sum over micro-batches.
_INTO_SUMS = {
    "add", "add_any", "max", "min", "mul", "and", "or", "xor", "convert_element_type", "transpose",
    "reshape", "squeeze", "expand_dims",
}  # fmt: skip


@dataclass(frozen=True)
class EdgeGroup:
    """Edges of one cost: the classes of both ends, the result and the operand's position."""

    source: int
    target: int
    result: int
    position: int
    deferred: bool


@dataclass(frozen=True, eq=False)
class GroupCosts:
    """The costs of every group under one sharding.

    node_s:      seconds of all runs of a node.
    edge_s:      seconds of one resharding.
    value_share: the share of a value on one device.
    copy_share:  the share of a value in a copy made along an edge; 0 if there is no copy.
    copy_layout: a number for the layout of the copy.
    """

    node_s: np.ndarray
    edge_s: np.ndarray
    value_share: np.ndarray
    copy_share: np.ndarray
    copy_layout: np.ndarray


@dataclass(frozen=True, eq=False)
class Bytes:
    """Bytes of values or copies, with their group, layer and lifetime."""

    group: np.ndarray
    layer: np.ndarray
    size: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def on_device(self, share: np.ndarray) -> np.ndarray:
        return self.size * share[self.group]

    def by_layer(self, share: np.ndarray, num_layers: int) -> np.ndarray:
        """Sums per layer; those of no layer come first."""
        return np.bincount(self.layer + 1, weights=self.on_device(share), minlength=num_layers + 1)

    def only(self, mask: np.ndarray) -> Bytes:
        return Bytes(*(x[mask] for x in (self.group, self.layer, self.size, self.start, self.end)))


class LayerTerms:
    """How the costs of groups add up in layers: arrays over all nodes, edges and values."""

    def __init__(self, graph: Graph, layers: NodeLayers, classes: Sequence[int], n: int) -> None:
        self.graph, self.layers, self.classes = graph, layers, classes
        self.num_micro_batches = n
        self.is_run_each = layers.phase != PER_STEP
        inside = np.flatnonzero(self.is_run_each)
        # Layouts, which are not known yet, decide whether a stage has something to hide.
        self.liveness = graph.liveness.least
        times = np.array(self.liveness.times)
        self.times = times
        self.loop_end = int(times[inside].max()) if len(inside) else -1
        self.node_groups: list[int] = []  # an example node of each
        self.edge_groups: list[EdgeGroup] = []
        self.value_groups: list[tuple[int, int]] = []  # (class, result)
        self._value_group_of: dict[tuple[int, int], int] = {}
        self._group_nodes()
        self._group_edges()
        self._group_values()

    # -- time

    def _slots(self, nodes: Sequence[int] | np.ndarray) -> np.ndarray:
        layer, phase = self.layers.layer[nodes], self.layers.phase[nodes]
        return (layer + 1) * _PHASES + phase

    def _group_nodes(self) -> None:
        known: dict[tuple, int] = {}
        groups = np.empty(len(self.graph.nodes), dtype=np.int64)
        for index, (owner, node) in enumerate(zip(self.classes, self.graph.nodes, strict=True)):
            key = (owner, node.touched_bytes, node.flops, node.weight, node.traffic)
            groups[index] = known.setdefault(key, len(known))
            if groups[index] == len(self.node_groups):
                self.node_groups.append(index)
        self.node_group = groups
        self.node_slot = self._slots(np.arange(len(groups)))

    def _group_edges(self) -> None:
        graph, classes, phase = self.graph, self.classes, self.layers.phase.tolist()
        known: dict[tuple, int] = {}
        groups: list[int] = []
        weights: list[float] = []
        payers: list[int] = []
        phases: list[int] = []
        copies: list[tuple[int, int, int]] = []  # (value, consumer, producer) of operand edges
        self.readers: dict[int, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            for position, value in enumerate(node.operands):
                u, result = graph.producer[value]
                key = (classes[u], classes[index], result, position, graph.values[value].deferred)
                groups.append(known.setdefault(key, len(known)))
                producer = graph.nodes[u]
                weights.append(edge_weight(producer, node))
                payers.append(index)
                phases.append(_edge_phase(producer, node, phase[u], phase[index]))
                copies.append((value, index, u))
                self.readers.setdefault(value, []).append(index)
        for i, o in graph.state:
            source = graph.outputs[o]
            if source is None:
                continue
            u, result = graph.producer[source]
            v, _ = graph.producer[graph.inputs[i]]
            if u != v:
                key = (classes[u], classes[v], result, STATE_EDGE, True)
                groups.append(known.setdefault(key, len(known)))
                weights.append(1.0)
                payers.append(u)
                phases.append(PER_STEP)
        self.edge_groups = [EdgeGroup(*key) for key in known]
        self.edge_group = np.array(groups, dtype=np.int64)
        self.edge_weight = np.array(weights)
        self.edge_slot = (self.layers.layer[payers] + 1) * _PHASES + np.array(phases)
        self._group_copies(np.array(copies, dtype=np.int64).reshape(-1, 3))

    # -- memory

    def _group_copies(self, edges: np.ndarray) -> None:
        """Copies along edges: those that outlive the loop are held, those inside it are shared by
        the readers of one pass."""
        graph, phase = self.graph, self.layers.phase
        value, consumer, producer = edges.T
        sizes = np.array([graph.values[v].num_bytes for v in value], dtype=float)
        start = self.times[consumer]
        end = np.maximum(start, np.array(self.liveness.node_ends)[consumer])
        finishes = np.array([graph.nodes[v].kind is NodeKind.FINISH for v in consumer], dtype=bool)
        end = np.where(finishes, start, end)
        start = np.where(finishes, self.times[producer], start)
        self.copies = Bytes(
            self.edge_group[: len(edges)], self.layers.layer[consumer], sizes, start, end
        )
        self.copy_value = np.where(finishes, -1 - np.arange(len(edges)), value)
        self.copy_phase = phase[consumer]
        outside = (phase[consumer] == PER_STEP) & (phase[producer] == PER_STEP)
        # Partial sums over micro-batches are there while the loop runs.
        is_there = ~finishes | (start <= self.loop_end)
        self.copy_is_held = outside & is_there & (end >= self.loop_end)

    def _value_group(self, value: int) -> int:
        node, result = self.graph.producer[value]
        key = (self.classes[node], result)
        return self._value_group_of.setdefault(key, len(self._value_group_of))

    def _bytes(self, entries: list[tuple[int, int, int, int]]) -> Bytes:
        """From (value, layer, start, end)."""
        table = np.array(entries, dtype=np.int64).reshape(-1, 4)
        groups = np.array([self._value_group(v) for v in table[:, 0]], dtype=np.int64)
        sizes = np.array([self.graph.values[v].num_bytes for v in table[:, 0]], dtype=float)
        return Bytes(groups, table[:, 1], sizes, table[:, 2], table[:, 3])

    def _group_values(self) -> None:
        graph, layer, phase = self.graph, self.layers.layer, self.layers.phase
        in_flight, boundary = self._crossing_values()
        residuals = {value for value, _ in in_flight}
        summed_at = self._summed_at()
        forward = [i for i in np.flatnonzero(phase == FORWARD) if i not in summed_at]
        forward_nodes = np.array(forward, dtype=np.int64)
        forward_end = int(self.times[forward_nodes].max(initial=-1))
        held, working, temporary, reread = [], [], [], []
        summing = {v for index in summed_at for v in graph.nodes[index].results}
        last = len(graph.nodes)
        for life in self.liveness.lives:
            node, _ = graph.producer[life.value]
            entry = (life.value, int(layer[node]), life.start, life.end)
            if phase[node] == PER_STEP:
                stays = life.end >= (last if life.start > self.loop_end else self.loop_end)
                (held if stays else temporary).append(entry)
            elif graph.nodes[node].name == "scan_stack" and life.end > self.loop_end:
                held.append(entry)
            elif life.value not in residuals and life.value not in summing:
                readers = self.readers.get(life.value, ())
                if phase[node] == FORWARD and life.start <= forward_end < life.end:
                    reread.append(entry)
                elif readers and all(r in summed_at for r in readers):
                    end = max(life.start, *(summed_at[r] for r in readers))
                    working.append((*entry[:3], end))
                else:
                    working.append(entry)
        self.held, self.working, self.temporary = map(self._bytes, (held, working, temporary))
        self.reread = self._bytes(reread)
        self.in_flight = self._bytes([(value, at, 0, 0) for value, at in in_flight])
        self.boundary = self._bytes([(value, at, 0, 0) for value, at in boundary])
        self.value_groups = list(self._value_group_of)

    def _summed_at(self) -> dict[int, int]:
        """{node that only adds to a carry: when it runs}: as soon as its term exists, although the
        program has them all at its end. They work in the carry's buffer."""
        graph, phase = self.graph, self.layers.phase
        summed_at: dict[int, int] = {}
        for index in range(len(graph.nodes) - 1, -1, -1):
            node = graph.nodes[index]
            maker = graph.nodes[graph.producer[node.operands[0]][0]] if node.operands else node
            name = maker.name if node.kind is NodeKind.FINISH else node.name
            if phase[index] == PER_STEP or name not in _INTO_SUMS:
                continue
            readers = [r for v in node.results for r in self.readers.get(v, ())]
            carried = [r < index and graph.nodes[r].kind is NodeKind.MERGE for r in readers]
            if readers and all(c or r in summed_at for c, r in zip(carried, readers, strict=True)):
                summed_at[index] = 0
        for index in sorted(summed_at):
            made = [graph.producer[v][0] for v in graph.nodes[index].operands]
            inside = [p for p in made if phase[p] != PER_STEP]
            times = (summed_at.get(p, int(self.times[p])) for p in inside)
            summed_at[index] = max(times, default=0)
        return summed_at

    def _crossing_values(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(residuals as (value, layer), values that a layer's forward pass reads from another layer
        as (value, layer)), of values that depend on the micro-batch."""
        graph, layer, phase = self.graph, self.layers.layer, self.layers.phase
        depends: set[int] = set()
        slices: set[int] = set()
        batch = {graph.inputs[i] for i in graph.batch}
        backward_readers: dict[int, set[int]] = {}
        boundary: dict[tuple[int, int], None] = {}
        for index, node in enumerate(graph.nodes):
            if node.kind is NodeKind.INPUT:
                depends.update(batch.intersection(node.results))
                continue
            if phase[index] == PER_STEP:
                if node.kind is NodeKind.MERGE or not depends.isdisjoint(node.operands):
                    depends.update(node.results)
                continue
            for value in node.operands:
                made, _ = graph.producer[value]
                if value not in depends or phase[made] != FORWARD or made in slices:
                    continue
                if phase[index] == BACKWARD:
                    backward_readers.setdefault(value, set()).add(int(layer[index]))
                elif layer[made] != layer[index]:
                    boundary[value, int(layer[index])] = None
            if not depends.isdisjoint(node.operands):
                depends.update(node.results)
                if (
                    node.name == "scan_slice"
                    and phase[graph.producer[node.operands[0]][0]] == PER_STEP
                ):
                    slices.add(index)  # of the batch, which is held anyway
        if self.layers.residuals is not None:
            residuals = [(v, at) for v, at in self.layers.residuals.items() if v in graph.producer]
            return residuals, list(boundary)
        in_flight = []
        for value, readers in backward_readers.items():
            made_in = int(layer[graph.producer[value][0]])
            in_flight.append((value, made_in if made_in in readers else min(readers)))
        return in_flight, list(boundary)

    def priced_bytes(self, num_in_flight: float) -> tuple[np.ndarray, np.ndarray]:
        """(bytes per value group, bytes per edge group) to which a memory price applies: those
        held, and those of so many micro-batches in flight."""
        count = len(self.value_groups)
        values = np.bincount(self.held.group, weights=self.held.size, minlength=count)
        values += np.bincount(self.reread.group, weights=self.reread.size, minlength=count)
        values += num_in_flight * np.bincount(
            self.in_flight.group, weights=self.in_flight.size, minlength=count
        )
        copies = self.copies.only(self.copy_is_held)
        edges = np.bincount(copies.group, weights=copies.size, minlength=len(self.edge_groups))
        return values, edges

    # -- the table

    def seconds(self, costs: GroupCosts) -> np.ndarray:
        """Seconds of a step per layer (those of no layer come first) and phase."""
        size = (self.layers.num_layers + 1) * _PHASES
        total = np.bincount(self.node_slot, weights=costs.node_s[self.node_group], minlength=size)
        edge_s = costs.edge_s[self.edge_group] * self.edge_weight
        total += np.bincount(self.edge_slot, weights=edge_s, minlength=size)
        return total.reshape(-1, _PHASES)

    def table(self, costs: GroupCosts, submesh: Submesh, mesh: LogicalMesh) -> LayerTable:
        """The costs of every layer, without recomputation."""
        count = self.layers.num_layers
        once, forward, backward = (spread_shared(x) for x in self.seconds(costs).T)
        n = self.num_micro_batches
        share = costs.value_share
        held_copies, copies, temporary = self._copies(costs)
        held = self.held.by_layer(share, count) + held_copies
        in_flight = spread_shared(self.in_flight.by_layer(share, count))
        reread = spread_shared(self.reread.by_layer(share, count))
        working = self._working(copies + self._alive(self.working, self.working.on_device(share)))
        values = self.temporary
        items = (
            np.concatenate((values.layer, temporary[0])),
            np.concatenate((values.start, temporary[1])),
            np.concatenate((values.end, temporary[2])),
            np.concatenate((values.on_device(share), temporary[3])),
        )
        updating = peak_by_layer(*items, count)
        return LayerTable(
            submesh,
            mesh.shape,
            latency_s=(forward + backward) / n,
            forward_s=forward / n,
            once_s=once,
            held_bytes=spread_shared(held),
            in_flight_bytes=in_flight,
            working_bytes=np.maximum(working + reread, updating - in_flight),
        )

    def recomputed(self, table: LayerTable, costs: GroupCosts) -> LayerTable:
        """The table with every layer recomputed whose residuals exceed its inputs."""
        share, count = costs.value_share, self.layers.num_layers
        inputs = spread_shared(self.boundary.by_layer(share, count))
        is_recomputed = table.in_flight_bytes > inputs
        return replace(
            table,
            latency_s=table.latency_s + is_recomputed * table.forward_s,
            in_flight_bytes=np.where(is_recomputed, inputs, table.in_flight_bytes),
            working_bytes=table.working_bytes + is_recomputed * table.in_flight_bytes,
            remat=True,
        )

    def _copies(self, costs: GroupCosts) -> tuple[np.ndarray, np.ndarray, tuple]:
        """(held bytes per layer, those of no layer first; bytes in the loop at every time;
        (layer, start, end, bytes) of copies outside of it). One copy serves all readers of a
        layout, in the loop those of one pass."""
        active = np.flatnonzero(costs.copy_share[self.copies.group] > 0)
        copies = self.copies.only(active)
        phase = np.where(self.copy_is_held[active], _PHASES, self.copy_phase[active])
        layout = costs.copy_layout[copies.group]
        keys = np.stack((self.copy_value[active], layout, phase))
        _, first, inverse = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        start = np.full(len(first), np.iinfo(np.int64).max)
        end = np.full(len(first), -1)
        np.minimum.at(start, inverse, copies.start)
        np.maximum.at(end, inverse, copies.end)
        size = copies.on_device(costs.copy_share)[first]
        layer, phase = copies.layer[first], phase[first]
        held = np.bincount(
            layer + 1, weights=size * (phase == _PHASES), minlength=self.layers.num_layers + 1
        )
        once = phase == PER_STEP
        outside = (layer[once], start[once], end[once], size[once])
        shared = Bytes(first, layer, size, start, end).only(
            (phase == FORWARD) | (phase == BACKWARD)
        )
        return held, self._alive(shared, shared.size), outside

    def _alive(self, items: Bytes, size: np.ndarray) -> np.ndarray:
        change = np.zeros(len(self.graph.nodes) + 3)
        np.add.at(change, items.start, size)
        np.add.at(change, items.end + 1, -size)
        return np.cumsum(change)

    def _working(self, bytes_at: np.ndarray) -> np.ndarray:
        """The maximum bytes while each layer runs."""
        peak = np.zeros(self.layers.num_layers + 1)
        inside = np.flatnonzero(self.is_run_each)
        np.maximum.at(peak, self.layers.layer[inside] + 1, bytes_at[self.times[inside]])
        return np.maximum(peak[1:], 0.0)


def spread_shared(by_layer: np.ndarray) -> np.ndarray:
    """Spreads the first entry, which belongs to no layer, over all layers in proportion to them."""
    shared, layers = by_layer[0], by_layer[1:]
    total = layers.sum()
    return layers * (1 + shared / total) if total > 0 else layers + shared / len(layers)


def peak_by_layer(
    layer: np.ndarray, start: np.ndarray, end: np.ndarray, size: np.ndarray, num_layers: int
) -> np.ndarray:
    """The maximum bytes that each layer has at a time."""
    layers = np.concatenate((layer, layer))
    times = np.concatenate((start, end + 1))
    change = np.concatenate((size, -size))
    order = np.lexsort((change, times, layers))  # ends before starts
    layers, total = layers[order], np.cumsum(change[order])
    peak = np.zeros(num_layers + 1)
    np.maximum.at(peak, layers + 1, total)  # the sum of every layer ends at zero
    return peak[1:]


def _edge_phase(producer: Node, consumer: Node, source: int, target: int) -> int:
    """The phase in which a value is resharded: by the rule of `edge_weight`, outside of a loop that
    it enters or leaves."""
    if consumer.name == "scan_slice":
        return target if source != PER_STEP else PER_STEP
    if producer.name == "scan_stack":
        return target
    return target if target != PER_STEP else source
