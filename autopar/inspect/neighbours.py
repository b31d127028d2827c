"""The operators around an array, with reshardings: from a `GraphSharding` to `Neighbour`s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.cost.report import edge_weight
from autopar.inspect.layouts_text import layout_text, step_name
from autopar.inspect.resharding import reshard_steps
from autopar.ir.graph import OUTPUT, Graph, Node, NodeKind
from autopar.ir.spec import Layout
from autopar.ir.why import Neighbour
from autopar.sharding.solve import GraphSharding

_INDENT = "· "  # before readers of what a reader passes on
_MOST_LEVELS = 3
_PASSED_ON = ("convert_element_type", "copy", "constrain")

Uses = Mapping[int, Sequence[tuple[int, int]]]


def uses_in(graph: Graph) -> Uses:
    """Value -> (node, operand position) of its readers."""
    uses: dict[int, list[tuple[int, int]]] = {}
    for index, node in enumerate(graph.nodes):
        for position, value in enumerate(node.operands):
            uses.setdefault(value, []).append((index, position))
    return uses


def neighbours(sharding: GraphSharding, value: int, uses: Uses) -> list[Neighbour]:
    """`uses`: of the sharding's graph."""
    graph = sharding.graph
    producer, result = graph.producer[value]
    layout = sharding.layouts[producer][1][result]
    rows = []
    if graph.nodes[producer].kind is not NodeKind.INPUT:
        rows.append(_neighbour(sharding, "made by", producer, value, layout))
        rows += _summed(sharding, producer)
    for source in (graph.outputs[o] for i, o in graph.state if graph.inputs[i] == value):
        if source is None or graph.producer[source][0] == producer:
            continue
        node, position = graph.producer[source]
        made_in = sharding.layouts[node][1][position]
        role = "its next value is made by"
        rows.append(_neighbour(sharding, role, node, source, made_in, (made_in, layout), 1.0))
    return rows + _readers(sharding, value, uses, level=0)


def _summed(sharding: GraphSharding, finish: int) -> list[Neighbour]:
    """The operator whose partial sums a node completes."""
    graph = sharding.graph
    node = graph.nodes[finish]
    if node.kind is not NodeKind.FINISH:
        return []
    value = node.operands[0]
    producer, result = graph.producer[value]
    source = sharding.layouts[producer][1][result]
    ends = (source, sharding.layouts[finish][0][0])
    weight = edge_weight(graph.nodes[producer], node)
    return [_neighbour(sharding, "its sums come from", producer, value, source, ends, weight)]


def _readers(sharding: GraphSharding, value: int, uses: Uses, level: int) -> list[Neighbour]:
    """The readers of a value and, behind one that only changes its layout or type, its readers."""
    graph = sharding.graph
    producer, result = graph.producer[value]
    source = sharding.layouts[producer][1][result]
    role = _INDENT * level + "read by"
    rows = []
    for index, position in uses.get(value, ()):
        node = graph.nodes[index]
        target = sharding.layouts[index][0][position]
        weight = edge_weight(graph.nodes[producer], node)
        rows.append(_neighbour(sharding, role, index, value, target, (source, target), weight))
        is_use = node.kind is NodeKind.USE and node.name != OUTPUT
        if (is_use or node.name in _PASSED_ON) and level < _MOST_LEVELS:
            rows += _readers(sharding, node.results[0], uses, level + 1)
    return rows


def _neighbour(
    sharding: GraphSharding,
    role: str,
    index: int,
    value: int,
    layout: Layout,
    ends: tuple[Layout, Layout] | None = None,
    weight: float = 0.0,
) -> Neighbour:
    """`layout`: in which the node makes or reads the value. `ends`: the layouts between which the
    value is resharded, `weight` times per step."""
    graph, mesh = sharding.graph, sharding.mesh
    node, info = graph.nodes[index], graph.values[value]
    seconds, steps = 0.0, []
    if ends is not None and ends[0] != ends[1] and weight:
        seconds, steps = reshard_steps(mesh, graph, value, *ends)
    strategy, names = sharding.strategies[index], mesh.axis_names
    operands = _layouts_text(graph, node.operands, strategy.operands, names)
    results = _layouts_text(graph, node.results, strategy.results, names)
    return Neighbour(
        role=role,
        operator=_operator(node),
        module=node.module,
        region=node.region,
        layout=layout_text(layout, len(info.shape), names),
        strategy=f"{operands} → {results}" if operands else results,
        seconds=weight * seconds,
        steps=tuple(step_name(step, mesh) for step in steps),
        runs=node.weight,
    )


def _layouts_text(
    graph: Graph, values: Sequence[int], layouts: Sequence[Layout], axis_names: Sequence[str]
) -> str:
    return ", ".join(
        layout_text(layout, len(graph.values[value].shape), axis_names)
        for value, layout in zip(values, layouts, strict=True)
    )


def _operator(node: Node) -> str:
    return {
        NodeKind.INPUT: "the argument itself",
        NodeKind.USE: "the result itself" if node.name == OUTPUT else "all its readers",
        NodeKind.FINISH: "the end of partial sums",
        NodeKind.MERGE: "a loop's carry",
    }.get(node.kind, node.name)
