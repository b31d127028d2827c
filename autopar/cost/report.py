"""Costs of a solved graph by module and collective: from a `Graph` and layouts to a `CostReport`.

Users read these costs; the solver's objective is their sum.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from autopar.cost.compute import compute_s, exact_s
from autopar.cost.convolution_patches import patches_s
from autopar.cost.halo import halo_steps
from autopar.cost.measured_ops import measured_op_s
from autopar.cost.reshard import value_table
from autopar.ir.graph import Graph, Node, NodeKind, Value
from autopar.ir.mesh import LogicalMesh
from autopar.ir.plan import ModuleCost
from autopar.ir.spec import PARTIAL, WHOLE, Layout, NodeLayouts, num_shards


@dataclass(frozen=True)
class CostReport:
    modules: tuple[ModuleCost, ...]
    compute_s: float
    communication_s: float
    communication_bytes: float


_ROUNDING = 1e-6  # of averages over branches


@dataclass(frozen=True)
class Step:
    """One collective: its kind, its mesh axes, and the bytes that each device sends."""

    kind: str
    axes: tuple[int, ...]
    sent_bytes: float


def edge_weight(producer: Node, consumer: Node) -> float:
    """How often a value is resharded on average: at a loop's border, as often as the outside runs;
    at that of a branch, if it is taken."""
    if consumer.name == "scan_slice":
        return producer.weight if producer.name != "scan_stack" else consumer.weight
    if producer.name == "scan_stack":
        return consumer.weight
    return max(producer.trips, consumer.trips) * min(producer.chance, consumer.chance)


def describe_step(mesh: LogicalMesh, before: Layout, after: Layout, num_bytes: float) -> Step:
    """Name the collective between two neighbouring layouts of a resharding path."""
    axes = tuple(a for a, (b, c) in enumerate(zip(before, after, strict=True)) if b != c)
    source, target = before[axes[0]], after[axes[0]]
    ranks = 1
    for a in axes:
        ranks *= mesh.shape[a]
    local = num_bytes / num_shards(before, mesh.shape)
    ring = (ranks - 1) / ranks
    if source == WHOLE:
        return Step("slice", axes, 0.0)
    if source == PARTIAL:
        if target == WHOLE:
            return Step("all-reduce", axes, 2 * ring * local)
        return Step("reduce-scatter", axes, ring * local)
    if target == WHOLE:
        return Step("all-gather", axes, ring * local * ranks)
    return Step("all-to-all", axes, ring * local)


class Move(NamedTuple):
    """A value that a node reads in another layout than it is made in, or state that returns to its
    stored layout (`to_state`). `weight`: how often; `seconds`: each time."""

    producer: int
    consumer: int
    value: int
    source: Layout
    target: Layout
    to_state: bool
    weight: float
    seconds: float
    steps: tuple[TimedStep, ...]


class TimedStep(NamedTuple):
    """A collective on the way from one layout to another; free slices do not count."""

    step: Step
    before: Layout
    after: Layout
    seconds: float


def moves(graph: Graph, mesh: LogicalMesh, layouts: Sequence[NodeLayouts]) -> Iterator[Move]:
    """All movement between devices, except the rows of split windows."""
    paths: dict[tuple, tuple[float, tuple[TimedStep, ...]]] = {}
    for u, v, value, source, target, deferred in _edges(graph, layouts):
        if source == target:
            continue
        info = graph.values[value]
        key = (info.shape, info.num_bytes, info.order, deferred, source, target)
        if key not in paths:
            paths[key] = _path(mesh, info, deferred, source, target)
        seconds, steps = paths[key]
        to_state = graph.nodes[v].kind is NodeKind.INPUT
        weight = 1.0 if to_state else edge_weight(graph.nodes[u], graph.nodes[v])
        yield Move(
            producer=u,
            consumer=v,
            value=value,
            source=source,
            target=target,
            to_state=to_state,
            weight=weight,
            seconds=seconds,
            steps=steps,
        )


def _path(
    mesh: LogicalMesh, value: Value, deferred: bool, source: Layout, target: Layout
) -> tuple[float, tuple[TimedStep, ...]]:
    partial = PARTIAL in source or PARTIAL in target
    table = value_table(mesh, value, partial, deferred)
    steps, here = [], source
    for layout in table.path(source, target):
        step = describe_step(mesh, here, layout, float(value.num_bytes))
        if step.kind != "slice":
            steps.append(TimedStep(step, here, layout, table.cost(here, layout)))
        here = layout
    return table.cost(source, target), tuple(steps)


def cost_report(
    graph: Graph,
    mesh: LogicalMesh,
    layouts: Sequence[NodeLayouts],
    node_s: Sequence[float] | None = None,
    moved: Sequence[Move] | None = None,
) -> CostReport:
    """`node_s`, `moved`: what `compute_seconds` and `moves` say, if that is known."""
    node_s = compute_seconds(graph, mesh, layouts) if node_s is None else node_s
    moved = list(moves(graph, mesh, layouts)) if moved is None else moved
    compute: dict[tuple[str, str], float] = defaultdict(float)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    sent: dict[tuple[str, str], float] = defaultdict(float)
    kinds: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for node, node_layouts, own_s in zip(graph.nodes, layouts, node_s, strict=True):
        key = (node.module, node.region)
        compute[key] += own_s
        if not node.rule.halos:
            continue
        halos = halo_steps(node, graph.values, mesh, node_layouts[0])
        for axes, shift_s, sent_bytes, shifts in halos:
            seconds[key] += node.weight * shift_s
            sent[key] += node.weight * sent_bytes
            names = ",".join(mesh.axis_names[a] for a in axes)
            kinds[key][f"shift({names})"] += ceil(node.weight - _ROUNDING) * shifts
    owners = _owners(graph)
    for move in moved:
        owner = graph.nodes[move.producer if move.to_state else owners[move.consumer]]
        key = (owner.module, owner.region)
        seconds[key] += move.weight * move.seconds
        if not graph.values[move.value].shape:
            continue
        for step, *_ in move.steps:
            names = ",".join(mesh.axis_names[a] for a in step.axes)
            kinds[key][f"{step.kind}({names})"] += ceil(move.weight - _ROUNDING)
            sent[key] += move.weight * step.sent_bytes
    keys = [k for k in dict.fromkeys([*compute, *seconds]) if compute[k] or seconds[k]]
    modules = tuple(
        ModuleCost(
            module,
            region,
            compute[module, region],
            seconds[module, region],
            sent[module, region],
            tuple(sorted(kinds[module, region].items())),
        )
        for module, region in keys
    )
    return CostReport(
        modules,
        sum(compute.values()),
        sum(seconds.values()),
        sum(sent.values()),
    )


def _owners(graph: Graph) -> list[int]:
    """The node whose module pays for the operands of each node: the node itself, or the first
    equation behind a node between equations (a shared use, a loop's carry)."""
    first_reader: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        for value in node.operands:
            first_reader.setdefault(value, index)
    owners = []
    for index in range(len(graph.nodes)):
        here, seen = index, set()
        while graph.nodes[here].kind in (NodeKind.USE, NodeKind.MERGE) and here not in seen:
            seen.add(here)
            here = first_reader.get(graph.nodes[here].results[0], here)
        owners.append(here)
    return owners


def compute_seconds(
    graph: Graph,
    mesh: LogicalMesh,
    layouts: Sequence[NodeLayouts],
    node_class: Sequence[int] | None = None,
) -> list[float]:
    """Seconds of every node, as `node_compute_s` has them. `node_class`: a class for every node;
    nodes of one class have equal shardings."""
    known: dict[tuple, float] = {}
    seconds = []
    for index, node in enumerate(graph.nodes):
        owner = index if node_class is None else node_class[index]
        key = owner, node.touched_bytes, node.traffic
        if key not in known:
            known[key] = node_compute_s(graph, mesh, node, layouts[index])
        seconds.append(known[key])
    return seconds


def node_compute_s(graph: Graph, mesh: LogicalMesh, node: Node, layouts: NodeLayouts) -> float:
    """Seconds of all runs of a node in a step; 0 on a mesh that prices no compute."""
    if mesh.device is None or node.kind is not NodeKind.OP:
        return 0.0
    values = (*node.operands, *node.results)
    all_layouts = (*layouts[0], *layouts[1])
    ways = parallelism(layouts, mesh)
    if mesh.profile is not None:
        return node.weight * measured_op_s(node, graph.values, mesh, all_layouts, ways)
    moved = sum(
        touched / num_shards(layout, mesh.shape)
        for touched, layout in zip(node.touched_bytes, all_layouts, strict=True)
    )
    dtype = graph.values[values[0]].dtype
    seconds = compute_s(mesh.device, node.flops / ways, moved, dtype)
    seconds = max(seconds, exact_s(mesh.device, node, ways))
    return node.weight * (seconds + patches_s(node, graph.values, mesh, all_layouts, ways))


def parallelism(layouts: NodeLayouts, mesh: LogicalMesh) -> int:
    """The number of devices that divide a node's work: over axes that split any of its arrays."""
    ways = 1
    for axis, size in enumerate(mesh.shape):
        if any(layout[axis] >= 0 for layout in (*layouts[0], *layouts[1])):
            ways *= size
    return ways


def _edges(
    graph: Graph, layouts: Sequence[NodeLayouts]
) -> Iterator[tuple[int, int, int, Layout, Layout, bool]]:
    """(producer, consumer, value, layout it is made in, layout it is read in, deferred)."""
    for index, node in enumerate(graph.nodes):
        for position, value in enumerate(node.operands):
            u, result = graph.producer[value]
            source, target = layouts[u][1][result], layouts[index][0][position]
            yield u, index, value, source, target, graph.values[value].deferred
    for i, o in graph.state:
        value = graph.outputs[o]
        if value is None:
            continue
        u, result = graph.producer[value]
        v, _ = graph.producer[graph.inputs[i]]
        if u != v:
            source, target = layouts[u][1][result], layouts[v][1][0]
            yield u, v, value, source, target, True
