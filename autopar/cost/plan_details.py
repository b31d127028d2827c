"""What a plan says of itself: from a sharded graph to `PlanDetails`.

Sums over operators are those of `cost_report`. Compute is an operator's own. What is moved is
charged to the operator that reads it, the reduction of partial sums to the product that leaves
them, and state on its way back to where it is kept to the operator that made it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from autopar.cost.halo import halo_steps
from autopar.cost.memory import MemoryProfile
from autopar.cost.memory_use import memory_use
from autopar.cost.module_names import with_module_names
from autopar.cost.parallelism_labels import Factors, NodeLayouts, ParallelismLabels, op_name
from autopar.cost.report import Move, moves, node_compute_s, parallelism
from autopar.cost.roles import Roles, find_roles
from autopar.ir.details import (
    OTHER_LAYOUT,
    PARTIAL_SUMS,
    STATE,
    WINDOWS,
    CollectiveCost,
    OpRow,
    PlanDetails,
    op_table,
)
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import PARTIAL, WHOLE, Layout, to_partition_spec

_NO_FIGURES = (0, 0.0, 0.0)  # count, bytes, seconds
_PRODUCTS = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")


def plan_details(
    graph: Graph,
    mesh: LogicalMesh,
    layouts: Sequence[NodeLayouts],
    factors: Sequence[Factors],
    memory: MemoryProfile,
    sources: Sequence[str],
    recomputed: Collection[int] = (),
    alike: Sequence[int] | None = None,
) -> PlanDetails:
    """`factors`: on each axis, of every node. `sources`: the user's line of every equation, by the
    number that nodes have; `recomputed`: equations that are computed a second time. `alike`: a
    class for every node; nodes of one class are sharded alike."""
    roles = find_roles(graph, recomputed, alike)
    graph = with_module_names(graph, roles)
    words = ParallelismLabels(graph, mesh, layouts, factors, roles, recomputed)
    charges = _Charges(graph, mesh, layouts, roles)
    rows = []
    seconds = [0.0] * len(graph.nodes)
    flops = 0.0
    known: dict[tuple, tuple] = {}
    for index, node in enumerate(graph.nodes):
        moved_s, moved_bytes = charges.of_node.get(index, (0.0, 0.0))
        if node.kind is not NodeKind.OP and not moved_s:
            continue
        key = (roles.alike[index], node.touched_bytes, node.traffic)
        if key not in known:
            known[key] = _figures(graph, mesh, node, layouts[index])
        compute_s, own_flops, array, spec, runs = known[key]
        flops += own_flops
        seconds[index] = compute_s + moved_s
        rows.append(
            OpRow(
                node.name,
                node.module,
                node.region,
                array,
                spec,
                words.of_node(index),
                "" if node.equation is None else sources[node.equation],
                runs,
                rounded(own_flops),
                rounded(compute_s),
                rounded(moved_s),
                rounded(moved_bytes),
            )
        )
    return PlanDetails(
        flops=rounded(flops),
        model_flops=rounded(sum(_model_flops(node, recomputed) for node in graph.nodes)),
        ops=op_table(rows),
        collectives=charges.collectives(),
        memory=memory_use(graph, memory, roles, seconds, rounded),
        parallelism=words.parallelism(),
    )


def _figures(
    graph: Graph, mesh: LogicalMesh, node: Node, own: NodeLayouts
) -> tuple[float, float, str, str, float]:
    """Seconds and flops of an op, its first result and the spec of it as text, and its runs."""
    result = graph.values[node.results[0]]
    return (
        node_compute_s(graph, mesh, node, own),
        node.weight * node.flops / parallelism(node, own, mesh),
        f"{result.dtype}[{','.join(map(str, result.shape))}]",
        spec_text(own[1][0], len(result.shape), mesh.axis_names),
        rounded(node.weight),
    )


def whole_on_one_device(graph: Graph, num_axes: int) -> tuple[list[NodeLayouts], list[Factors]]:
    """Layouts and factors of a graph on a mesh of a single device."""
    one = ((WHOLE,) * num_axes,)
    layouts = [(one * len(n.operands), one * len(n.results)) for n in graph.nodes]
    return layouts, [(-1,) * num_axes] * len(graph.nodes)


@lru_cache(maxsize=65536)
def rounded(value: float) -> float:
    """To four digits, which is more than a prediction is worth."""
    return float(f"{value:.3e}") if value else 0.0


def _model_flops(node: Node, recomputed: Collection[int]) -> float:
    is_product = node.is_heavy or node.name in _PRODUCTS
    return node.weight * node.flops if is_product and node.equation not in recomputed else 0.0


@lru_cache(maxsize=4096)
def spec_text(layout: Layout, ndim: int, axis_names: tuple[str, ...]) -> str:
    """`P('x', None)`, and `P() with partial sums along x`."""
    partial = [name for name, entry in zip(axis_names, layout, strict=True) if entry == PARTIAL]
    whole = tuple(max(entry, WHOLE) for entry in layout)
    text = str(to_partition_spec(whole, ndim, axis_names)).replace("PartitionSpec", "P")
    return f"{text} with partial sums along {', '.join(partial)}" if partial else text


class _Charges:
    """Collectives, and which operator pays for each."""

    def __init__(
        self,
        graph: Graph,
        mesh: LogicalMesh,
        layouts: Sequence[NodeLayouts],
        roles: Roles,
    ) -> None:
        self.graph, self.mesh, self.roles = graph, mesh, roles
        self.first_reader: dict[int, int] = {}
        for index, node in enumerate(graph.nodes):
            for value in node.operands:
                self.first_reader.setdefault(value, index)
        self.of_node: dict[int, tuple[float, float]] = {}
        # what tells collectives apart, without figures -> count, bytes, seconds
        self.found: dict[CollectiveCost, list[float]] = {}
        for index, node in enumerate(graph.nodes):
            if node.rule.halos:
                self._windows(index, node, layouts[index])
        for move in moves(graph, mesh, layouts):
            if move.seconds:
                self._move(move)

    def collectives(self) -> tuple[CollectiveCost, ...]:
        return tuple(
            replace(what, count=int(count), num_bytes=rounded(sent), seconds=rounded(seconds))
            for what, (count, sent, seconds) in self.found.items()
        )

    def _charge(self, index: int, num_bytes: float, seconds: float) -> None:
        before_s, before_bytes = self.of_node.get(index, (0.0, 0.0))
        self.of_node[index] = (before_s + seconds, before_bytes + num_bytes)

    def _add(self, what: CollectiveCost, count: float, num_bytes: float, seconds: float) -> None:
        own = self.found.setdefault(what, [0.0, 0.0, 0.0])
        own[0] += count
        own[1] += num_bytes
        own[2] += seconds

    def _windows(self, index: int, node: Node, own: NodeLayouts) -> None:
        graph, mesh = self.graph, self.mesh
        for axes, seconds, num_bytes, shifts in halo_steps(node, graph.values, mesh, own[0]):
            weight = node.weight
            self._charge(index, weight * num_bytes, weight * seconds)
            value = node.operands[node.rule.halos[0].operand]
            spec = self._spec(own[0][node.rule.halos[0].operand], value)
            producer = self._name(self._maker(graph.producer[value][0]))
            names = tuple(mesh.axis_names[a] for a in axes)
            what = CollectiveCost(
                "shift",
                names,
                WINDOWS,
                node.module,
                node.region,
                self.roles.text(graph, value),
                producer,
                op_name(node),
                spec,
                spec,
                *_NO_FIGURES,
            )
            self._add(what, weight * shifts, weight * num_bytes, weight * seconds)

    def _move(self, move: Move) -> None:
        graph = self.graph
        maker, reader = self._maker(move.producer), self._reader(move.consumer)
        consumer = graph.nodes[move.consumer]
        if move.to_state or graph.nodes[reader].kind is not NodeKind.OP:
            owner = maker  # state, a result: nothing of the program reads it
        elif consumer.kind is NodeKind.FINISH and graph.nodes[maker].kind is NodeKind.OP:
            owner = maker
        else:
            owner = reader
        node = graph.nodes[owner]
        reads = graph.values[graph.nodes[move.consumer].results[0]].path if move.to_state else None
        ends = (self._name(maker), reads or self._name(reader))
        for step, before, after, seconds in move.steps:
            partial = any(before[a] == PARTIAL for a in step.axes)
            cause = PARTIAL_SUMS if partial else STATE if move.to_state else OTHER_LAYOUT
            names = tuple(self.mesh.axis_names[a] for a in step.axes)
            what = CollectiveCost(
                step.kind,
                names,
                cause,
                node.module,
                node.region,
                self.roles.text(graph, move.value),
                *ends,
                self._spec(before, move.value),
                self._spec(after, move.value),
                *_NO_FIGURES,
            )
            weight = move.weight
            self._add(what, weight, weight * step.sent_bytes, weight * seconds)
            self._charge(owner, weight * step.sent_bytes, weight * seconds)

    def _maker(self, index: int) -> int:
        """The op behind a node: itself, or what a step between ops takes its value from."""
        seen = set()
        while index not in seen:
            node = self.graph.nodes[index]
            if node.kind in (NodeKind.OP, NodeKind.INPUT) or not node.operands:
                break
            seen.add(index)
            # Of a loop's carry, what the body gives; of all others the only operand.
            index = self.graph.producer[node.operands[-1]][0]
        return index

    def _reader(self, index: int) -> int:
        """The first op that reads what a step between ops hands on."""
        seen = set()
        while index not in seen:
            node = self.graph.nodes[index]
            if node.kind in (NodeKind.OP, NodeKind.INPUT):
                break
            seen.add(index)
            index = self.first_reader.get(node.results[0], index)
        return index

    def _name(self, index: int) -> str:
        node = self.graph.nodes[index]
        if node.kind is NodeKind.OP:
            return op_name(node)
        path = self.graph.values[node.results[0]].path
        return path or ("a result" if node.kind is NodeKind.USE else node.name)

    def _spec(self, layout: Layout, value: int) -> str:
        return spec_text(layout, len(self.graph.values[value].shape), self.mesh.axis_names)
