"""Details of a plan for its readers: from a sharded `Graph` to `PlanDetails`.

Sums over operators equal those of `cost_report`. A movement is charged to the operator that reads
the value, except that a reduction of partial sums is charged to the product that leaves them, and
state that returns to its stored layout to the operator that made it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from autopar.cost.halo import halo_steps
from autopar.cost.memory import MemoryProfile
from autopar.cost.memory_use import memory_use
from autopar.cost.module_names import with_module_names
from autopar.cost.parallelism_labels import Factors, ParallelismLabels, op_name
from autopar.cost.report import Move, parallelism
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
from autopar.ir.spec import PARTIAL, WHOLE, Layout, NodeLayouts, to_partition_spec

_NO_COSTS: Any = {"count": 0, "num_bytes": 0.0, "seconds": 0.0}
_PRODUCTS = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")


def plan_details(
    graph: Graph,
    mesh: LogicalMesh,
    layouts: Sequence[NodeLayouts],
    factors: Sequence[Factors],
    memory: MemoryProfile,
    sources: Sequence[str],
    recomputed: Collection[int] = (),
    node_class: Sequence[int] | None = None,
    *,
    node_s: Sequence[float],
    moved: Sequence[Move],
) -> PlanDetails:
    """`factors`: of every node, on each axis. `sources`: the user's line of every equation,
    numbered as in `Node.equation`; `recomputed`: equations that repeat others. `node_class`: a
    class for every node; nodes of one class have equal shardings. `node_s`, `moved`: what
    `compute_seconds` and `moves` say."""
    roles = find_roles(graph, recomputed, node_class)
    graph = with_module_names(graph, roles)
    labels = ParallelismLabels(graph, mesh, layouts, factors, roles, recomputed)
    charges = _Charges(graph, mesh, layouts, roles, moved)
    rows = []
    seconds = [0.0] * len(graph.nodes)
    flops = 0.0
    known: dict[tuple, tuple] = {}
    for index, node in enumerate(graph.nodes):
        moved_s, moved_bytes = charges.of_node.get(index, (0.0, 0.0))
        if node.kind is not NodeKind.OP and not moved_s:
            continue
        key = (roles.node_class[index], node.touched_bytes, node.traffic)
        if key not in known:
            known[key] = _op_costs(graph, mesh, node, layouts[index])
        op_flops, array, spec, runs = known[key]
        compute_s = node_s[index]
        flops += op_flops
        seconds[index] = compute_s + moved_s
        rows.append(
            OpRow(
                name=node.name,
                module=node.module,
                region=node.region,
                array=array,
                spec=spec,
                words=labels.of_node(index),
                source="" if node.equation is None else sources[node.equation],
                runs=runs,
                flops=rounded(op_flops),
                compute_s=rounded(compute_s),
                communication_s=rounded(moved_s),
                communication_bytes=rounded(moved_bytes),
            )
        )
    return PlanDetails(
        flops=rounded(flops),
        model_flops=rounded(sum(_model_flops(node, recomputed) for node in graph.nodes)),
        ops=op_table(rows),
        collectives=charges.collectives(),
        memory=memory_use(graph, memory, roles, seconds, rounded),
        parallelism=labels.parallelism(),
    )


def _op_costs(
    graph: Graph, mesh: LogicalMesh, node: Node, layouts: NodeLayouts
) -> tuple[float, str, str, float]:
    """(flops, first result as text, its spec as text, runs) of an op."""
    result = graph.values[node.results[0]]
    return (
        node.weight * node.flops / parallelism(layouts, mesh),
        f"{result.dtype}[{','.join(map(str, result.shape))}]",
        spec_text(layouts[1][0], len(result.shape), mesh.axis_names),
        rounded(node.weight),
    )


def single_device_layouts(graph: Graph, num_axes: int) -> tuple[list[NodeLayouts], list[Factors]]:
    """Layouts and factors of a graph on a mesh of a single device."""
    one = ((WHOLE,) * num_axes,)
    layouts = [(one * len(n.operands), one * len(n.results)) for n in graph.nodes]
    return layouts, [(-1,) * num_axes] * len(graph.nodes)


@lru_cache(maxsize=65536)
def rounded(value: float) -> float:
    """The value to four digits, more than a prediction is worth."""
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
    """The collectives, and the operator that each is charged to."""

    def __init__(
        self,
        graph: Graph,
        mesh: LogicalMesh,
        layouts: Sequence[NodeLayouts],
        roles: Roles,
        moved: Sequence[Move],
    ) -> None:
        self.graph, self.mesh, self.roles = graph, mesh, roles
        self.first_reader: dict[int, int] = {}
        for index, node in enumerate(graph.nodes):
            for value in node.operands:
                self.first_reader.setdefault(value, index)
        self.of_node: dict[int, tuple[float, float]] = {}
        # collective without its costs -> count, bytes, seconds
        self.costs: dict[CollectiveCost, list[float]] = {}
        for index, node in enumerate(graph.nodes):
            if node.rule.halos:
                self._windows(index, node, layouts[index][0])
        for move in moved:
            if move.seconds:
                self._move(move)

    def collectives(self) -> tuple[CollectiveCost, ...]:
        return tuple(
            replace(what, count=int(count), num_bytes=rounded(sent), seconds=rounded(seconds))
            for what, (count, sent, seconds) in self.costs.items()
        )

    def _charge(self, index: int, num_bytes: float, seconds: float) -> None:
        before_s, before_bytes = self.of_node.get(index, (0.0, 0.0))
        self.of_node[index] = (before_s + seconds, before_bytes + num_bytes)

    def _add(self, what: CollectiveCost, count: float, num_bytes: float, seconds: float) -> None:
        total = self.costs.setdefault(what, [0.0, 0.0, 0.0])
        total[0] += count
        total[1] += num_bytes
        total[2] += seconds

    def _windows(self, index: int, node: Node, operands: Sequence[Layout]) -> None:
        graph, mesh = self.graph, self.mesh
        for axes, seconds, num_bytes, shifts in halo_steps(node, graph.values, mesh, operands):
            weight = node.weight
            self._charge(index, weight * num_bytes, weight * seconds)
            value = node.operands[node.rule.halos[0].operand]
            spec = self._spec(operands[node.rule.halos[0].operand], value)
            producer = self._name(self._maker(graph.producer[value][0]))
            names = tuple(mesh.axis_names[a] for a in axes)
            what = CollectiveCost(
                kind="shift",
                axes=names,
                cause=WINDOWS,
                module=node.module,
                region=node.region,
                value=self.roles.text(graph, value),
                producer=producer,
                consumer=op_name(node),
                before=spec,
                after=spec,
                **_NO_COSTS,
            )
            self._add(what, weight * shifts, weight * num_bytes, weight * seconds)

    def _move(self, move: Move) -> None:
        graph = self.graph
        maker, reader = self._maker(move.producer), self._reader(move.consumer)
        consumer = graph.nodes[move.consumer]
        if move.to_state or graph.nodes[reader].kind is not NodeKind.OP:
            owner = maker  # state or a result: nothing in the program reads it
        elif consumer.kind is NodeKind.FINISH and graph.nodes[maker].kind is NodeKind.OP:
            owner = maker
        else:
            owner = reader
        node = graph.nodes[owner]
        reads = graph.values[graph.nodes[move.consumer].results[0]].path if move.to_state else None

        for step, before, after, seconds in move.steps:
            partial = any(before[a] == PARTIAL for a in step.axes)
            cause = PARTIAL_SUMS if partial else STATE if move.to_state else OTHER_LAYOUT
            names = tuple(self.mesh.axis_names[a] for a in step.axes)
            what = CollectiveCost(
                kind=step.kind,
                axes=names,
                cause=cause,
                module=node.module,
                region=node.region,
                value=self.roles.text(graph, move.value),
                producer=self._name(maker),
                consumer=reads or self._name(reader),
                before=self._spec(before, move.value),
                after=self._spec(after, move.value),
                **_NO_COSTS,
            )
            weight = move.weight
            self._add(what, weight, weight * step.sent_bytes, weight * seconds)
            self._charge(owner, weight * step.sent_bytes, weight * seconds)

    def _maker(self, index: int) -> int:
        """The op that makes a node's value: itself, or the op before a node between ops."""
        seen = set()
        while index not in seen:
            node = self.graph.nodes[index]
            if node.kind in (NodeKind.OP, NodeKind.INPUT) or not node.operands:
                break
            seen.add(index)
            # The body's result for a loop's carry; the only operand for others.
            index = self.graph.producer[node.operands[-1]][0]
        return index

    def _reader(self, index: int) -> int:
        """The first op that reads a node's value: itself, or the op after a node between ops."""
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
