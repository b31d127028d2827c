"""The leading strategy combinations of a segment on a mesh: `SegmentPart` to `SegmentSpace`.

A segment's space is the product of the strategies of its blocks' entries. The cost model prunes it:

- for each layout of the activations at its boundaries, the best combinations with that layout
  (`sharding.kbest`): neighbours that agree need no resharding, others pay a known price;
- for some of these layouts, the best in which one forward product is split differently, for each
  product and way to split it; dependent products follow (the other half of a tensor parallel pair);
- the solver's choice for the segment in its best plan of the whole step, so that the search
includes
  that plan.

Then the next best follow, up to the wanted number.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from math import prod

from autopar.cost.report import cost_report
from autopar.ir.blocks import Blocks
from autopar.ir.graph import Graph, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import WHOLE, NodeLayouts, all_layouts, spec_to_text, to_partition_spec
from autopar.measure.segments.cut import SegmentPart
from autopar.measure.segments.files import Combination, SegmentSpace
from autopar.sharding.blocks import find_blocks, is_entry
from autopar.sharding.kbest import Solution, solutions_of_each, strategy_labels
from autopar.sharding.problem import FoldedGraph, ShardingProblem, problem_on_mesh

TOP = 12
_FAR = 10.0  # combinations beyond this factor of the best are left out
_BOUNDARIES = 3  # cheapest ones, beside the replicated one, to vary decisions in
_Factors = tuple[tuple[int, ...], ...]


def part_problem(part: SegmentPart, mesh: LogicalMesh) -> ShardingProblem:
    """The segment as a sharding problem. Partial sums do not leave a segment."""
    graph = part.graph
    allowed = {
        value: frozenset(all_layouts(graph.values[value].shape, mesh.shape))
        for value in (_made(part, v) for v in part.sent)
        if graph.values[value].shape
    }
    return problem_on_mesh(FoldedGraph(graph, list(range(len(graph.nodes)))), mesh, allowed)


def layouts_of(problem: ShardingProblem, factors: _Factors) -> tuple[NodeLayouts, ...] | None:
    """(operand layouts, result layouts) of every node; None if the problem has no such
    combination."""
    if len(factors) != len(problem.strategies):
        return None
    layouts = []
    for node, node_factors in enumerate(factors):
        strategy = next((s for s in problem.strategies[node] if s.factors == node_factors), None)
        if strategy is None:
            return None
        layouts.append((strategy.operands, strategy.results))
    return tuple(layouts)


def segment_space(
    parts: Sequence[SegmentPart],
    numbers: Sequence[int],
    mesh: LogicalMesh,
    top: int,
    given: Sequence[_Factors],
    time_limit_s: float = 30.0,
) -> SegmentSpace:
    """`numbers`: of its occurrences among the parts; `given`: combinations of the best plan of the
    step; `time_limit_s`: for finding others."""
    part = parts[numbers[0]]
    problem = part_problem(part, mesh)
    blocks = find_blocks(problem)
    entries = _entries(part.graph, problem, blocks)
    known = [factors for factors in given if layouts_of(problem, factors) is not None]
    reasons = dict.fromkeys(known, "best plan of the step")
    seen = {_inside(part.graph, factors) for factors in known}
    for factors, why in _leading(part, problem, time_limit_s):
        if len(reasons) >= top:
            break
        inside = _inside(part.graph, factors)
        if inside not in seen:
            seen.add(inside)
            reasons[factors] = why
    described = [_described(part, problem, mesh, factors, why) for factors, why in reasons.items()]
    return SegmentSpace(
        name=part.name,
        key=part.key,
        parts=tuple(numbers),
        num_equations=part.program.num_equations(),
        num_nodes=len(part.nodes),
        num_blocks=len(blocks.sequence),
        entries=entries,
        num_strategies=float(prod(count for _, count in entries)),
        combinations=tuple(sorted(described, key=lambda c: c.symbolic_s)),
    )


def _leading(
    part: SegmentPart, problem: ShardingProblem, time_limit_s: float
) -> Iterator[tuple[_Factors, str]]:
    """The best of every boundary; then, for the cheapest boundaries in turns, the best with another
    decision; then the next best of every boundary in turns."""
    ends = time.monotonic() + time_limit_s
    graph = part.graph
    crossing = {
        node: [s.results[r] for s in problem.strategies[node]]
        for node, r in _boundary_nodes(part).items()
    }
    inside = strategy_labels(problem, [i for i in _decisions(graph) if i not in crossing])
    shared = [set(layouts) for layouts in crossing.values()]
    layouts = sorted(set.intersection(*shared)) if shared else []
    boundaries = [dict.fromkeys(crossing, layout) for layout in layouts] or [{}]
    pairs = [(node, label) for node, labels in inside.items() for label in dict.fromkeys(labels)]
    wanted = [{**fixed, node: label} for node, label in pairs for fixed in boundaries]
    every = solutions_of_each(problem.pairwise, {**inside, **crossing}, [*boundaries, *wanted])
    mesh_shape = problem.mesh.shape
    ways, others = every[: len(boundaries)], every[len(boundaries) :]
    first = _next_of(ways, ends)
    if not first:
        return
    limit = _FAR * first[0][0].objective
    near = [(solution, n) for solution, n in first if solution.objective <= limit]
    for solution, _ in near:
        yield _factors(problem, solution.choice), "best with its boundary"
    whole = [n for _, n in near if set(boundaries[n].values()) == {(WHOLE,) * len(mesh_shape)}]
    turns = []
    for number in dict.fromkeys([*(n for _, n in near[:_BOUNDARIES]), *whole]):
        (best,) = (solution for solution, n in near if n == number)
        new = [at for at, (node, label) in enumerate(pairs) if best.labels[node] != label]
        mine = [others[at * len(boundaries) + number] for at in new]
        share_s = max(0.0, ends - time.monotonic()) / (_BOUNDARIES + 1)
        turns.append([solution for solution, _ in _next_of(mine, time.monotonic() + share_s)])
    for row in zip_longest(*turns):
        for solution in row:
            if solution is not None and solution.objective <= limit:
                yield _factors(problem, solution.choice), "best with a product split differently"
    while near and time.monotonic() < ends:
        near = [(s, near[n][1]) for s, n in _next_of([ways[n] for _, n in near], ends)]
        near = [(solution, n) for solution, n in near if solution.objective <= limit]
        for solution, _ in near:
            yield _factors(problem, solution.choice), "next in cost"


def _next_of(ways: Sequence[Iterator[Solution]], ends: float) -> list[tuple[Solution, int]]:
    """The next solution of each iterator with its number, the cheapest first, until the
    deadline."""
    solutions = []
    for number, way in enumerate(ways):
        if solutions and time.monotonic() > ends:
            break
        solution = next(way, None)
        if solution is not None:
            solutions.append((solution, number))
    return sorted(solutions, key=lambda entry: entry[0].objective)


def _decisions(graph: Graph) -> list[int]:
    """The nodes in which combinations differ: forward products, or block entries without any."""
    products = [i for i, n in enumerate(graph.nodes) if n.is_heavy and n.region == "forward"]
    return products or [i for i, n in enumerate(graph.nodes) if is_entry(n)]


def _inside(graph: Graph, factors: _Factors) -> object:
    """Equal for combinations that differ only in their boundaries, which a resharding can change.
    Without decisions, the boundaries count."""
    return tuple(factors[i] for i in _decisions(graph)) or factors


def _factors(problem: ShardingProblem, choice: Mapping[int, int]) -> _Factors:
    return tuple(
        problem.strategies[node][choice[node]].factors for node in range(len(problem.strategies))
    )


def _boundary_nodes(part: SegmentPart) -> dict[int, int]:
    """Node -> result that crosses the boundaries in the most frequent shape by bytes: activations
    and their cotangents."""
    graph = part.graph
    crossing = [(port.node, 0) for port in part.ports]
    crossing += [graph.producer[_made(part, value)] for value in part.sent]
    sizes: Counter[tuple[int, ...]] = Counter()
    for node, result in crossing:
        value = graph.values[graph.nodes[node].results[result]]
        sizes[value.shape] += value.num_bytes
    if not sizes:
        return {}
    shape, _ = max(sizes.items(), key=lambda item: item[1])
    return {
        node: result
        for node, result in crossing
        if shape and graph.values[graph.nodes[node].results[result]].shape == shape
    }


def _made(part: SegmentPart, value: int) -> int:
    """The graph's value of a sent value of the program."""
    at = part.program.outputs.index(value)
    graph_value = part.graph.outputs[at]
    assert graph_value is not None
    return graph_value


def _entries(graph: Graph, problem: ShardingProblem, blocks: Blocks) -> tuple[tuple[str, int], ...]:
    """Block entries with more than one strategy."""
    entries = []
    for block in blocks.sequence:
        node, count = graph.nodes[block.entry], len(problem.strategies[block.entry])
        if count > 1 and node.kind is NodeKind.OP:
            name = f"{node.name} of {node.module}" if node.module else node.name
            entries.append((f"{name} ({node.region})", count))
    return tuple(entries)


def _described(
    part: SegmentPart, problem: ShardingProblem, mesh: LogicalMesh, factors: _Factors, why: str
) -> Combination:
    layouts = layouts_of(problem, factors)
    assert layouts is not None
    report = cost_report(part.graph, mesh, layouts)
    return Combination(
        factors=factors,
        symbolic_s=report.compute_s + report.communication_s,
        communication_s=report.communication_s,
        boundary=_boundary_text(part, mesh, layouts),
        words=_words(part.graph, mesh, layouts),
        why=why,
    )


def _boundary_text(part: SegmentPart, mesh: LogicalMesh, layouts: Sequence[NodeLayouts]) -> str:
    specs = [
        _spec(part.graph, mesh, layouts, node, result)
        for node, result in _boundary_nodes(part).items()
    ]
    return ", ".join(dict.fromkeys(specs)) or "-"


def _spec(
    graph: Graph, mesh: LogicalMesh, layouts: Sequence[NodeLayouts], node: int, result: int
) -> str:
    value = graph.values[graph.nodes[node].results[result]]
    layout = layouts[node][1][result]
    if min(layout, default=0) < -1:
        return "partial"
    return spec_to_text(to_partition_spec(layout, len(value.shape), mesh.axis_names))


def _words(graph: Graph, mesh: LogicalMesh, layouts: Sequence[NodeLayouts]) -> str:
    """The specs of the forward products, as `P('x'): qkv, out`."""
    names_by_spec: dict[str, list[str]] = {}
    for index, node in enumerate(graph.nodes):
        if not node.is_heavy or node.region != "forward":
            continue
        name = node.module.rsplit("/", 1)[-1] or node.name
        names = names_by_spec.setdefault(_spec(graph, mesh, layouts, index, 0), [])
        if name not in names:
            names.append(name)
    return "; ".join(f"{spec}: {', '.join(names)}" for spec, names in names_by_spec.items())
