"""The collectives of a resharding, and how those of two `GraphSharding`s of one graph differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil

from autopar.cost.halo import halo_steps
from autopar.cost.report import Step, describe_step, edge_weight
from autopar.cost.reshard import value_table
from autopar.inspect.layouts_text import step_name
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import PARTIAL, Layout
from autopar.sharding.solve import GraphSharding


def reshard_steps(
    mesh: LogicalMesh, graph: Graph, value: int, source: Layout, target: Layout
) -> tuple[float, list[Step]]:
    """(seconds, collectives) from one layout of a value to another."""
    info = graph.values[value]
    partial = PARTIAL in source or PARTIAL in target
    table = value_table(mesh, info, partial)
    steps, here = [], source
    for layout in table.path(source, target):
        steps.append(describe_step(mesh, here, layout, float(info.num_bytes)))
        here = layout
    return table.cost(source, target), steps


def changed_collectives(before: GraphSharding, after: GraphSharding) -> tuple[Counter[str], float]:
    """(additional collectives by name, additional bytes sent per device) of `after`, per step. Both
    shard the same graph."""
    changed = [
        a is not b and (a.operands != b.operands or a.results != b.results)
        for a, b in zip(before.strategies, after.strategies, strict=True)
    ]
    counts: Counter[str] = Counter()
    sent_bytes = 0.0
    for sharding, sign in ((before, -1), (after, 1)):
        for name, count, num_bytes in _collectives(sharding, changed):
            counts[name] += sign * count
            sent_bytes += sign * num_bytes
    return counts, sent_bytes


def _collectives(
    sharding: GraphSharding, wanted: Sequence[bool]
) -> Iterator[tuple[str, int, float]]:
    """(name, count, bytes sent) of the collectives next to the nodes that are wanted."""
    graph, mesh = sharding.graph, sharding.mesh
    for value, source, target, times in _reshardings(sharding, wanted):
        if source == target or not graph.values[value].shape:
            continue
        for step in reshard_steps(mesh, graph, value, source, target)[1]:
            if step.kind != "slice":
                yield step_name(step, mesh), int(times), times * step.sent_bytes
    for index, node in enumerate(graph.nodes):
        if not wanted[index] or not node.rule.halos:
            continue
        operands = sharding.strategies[index].operands
        for axes, _, num_bytes, shifts in halo_steps(node, graph.values, mesh, operands):
            name = f"shift({','.join(mesh.axis_names[a] for a in axes)})"
            yield name, ceil(node.weight - 1e-6) * shifts, node.weight * num_bytes


def _reshardings(
    sharding: GraphSharding, wanted: Sequence[bool]
) -> Iterator[tuple[int, Layout, Layout, float]]:
    """(value, source, target, times per step) of edges and state next to the wanted nodes."""
    graph, strategies = sharding.graph, sharding.strategies
    for index, node in enumerate(graph.nodes):
        for position, value in enumerate(node.operands):
            u, result = graph.producer[value]
            if wanted[u] or wanted[index]:
                source, target = strategies[u].results[result], strategies[index].operands[position]
                yield value, source, target, edge_weight(graph.nodes[u], node)
    for i, o in graph.state:
        value = graph.outputs[o]
        if value is None:
            continue
        u, result = graph.producer[value]
        v, _ = graph.producer[graph.inputs[i]]
        if u != v and (wanted[u] or wanted[v]):
            yield value, strategies[u].results[result], strategies[v].results[0], 1.0
