"""From a `Graph` and a mesh to a `ShardingProblem`: strategies and their costs per node and edge.

Node costs are compute; edge costs are resharding, including the reduction of partial sums
(resharding from a partial layout). Nodes of one class (see `fold`) share one decision, so the costs
of all members add up. What runs under compute is taken off (`overlap`), if that is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.cost.compute import exact_s, rates, tie_break_s
from autopar.cost.convolution_patches import patches_s
from autopar.cost.halo import halo_s
from autopar.cost.layer_costs import STATE_EDGE
from autopar.cost.measured_ops import measured_op_s
from autopar.cost.report import edge_weight
from autopar.cost.reshard import value_table
from autopar.errors import SolverError
from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import PARTIAL, WHOLE, Layout, num_shards
from autopar.sharding.limit import Limit
from autopar.sharding.overlap import Hideable, hidden, hideable, hides_collectives, rooms
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem
from autopar.sharding.strategies import Strategy, enumerate_strategies

Allowed = Mapping[int, frozenset[Layout]]  # value -> layouts that its producer may give it
# From a node and its strategies to the indices of those that it may use.
StrategyFilter = Callable[[Node, tuple[Strategy, ...]], list[int]]


@dataclass
class Tried:
    """Choices that searches under a memory budget met, and the price per byte they ended with."""

    choices: list[dict[int, int]] = field(default_factory=list)
    price: float = 0.0


@dataclass(frozen=True, eq=False)
class ShardingProblem:
    graph: Graph
    mesh: LogicalMesh
    classes: list[int]
    representative: dict[int, int]  # class -> one of its nodes
    strategies: dict[int, list[Strategy]]  # class -> strategies
    pairwise: PairwiseProblem
    # What was tried under memory budgets, for the same problem with another budget or other lives.
    tried: Tried = field(default_factory=Tried)
    hidden: Limit | None = None  # seconds under compute, taken off `pairwise`; None if not asked

    @property
    def work_s(self) -> float:
        """Seconds of all operators if each were divided evenly over all devices, as its cheapest
        strategy runs. No plan on these devices takes less, whether on one mesh or as a pipeline."""
        num_devices = self.mesh.num_devices
        return sum(
            float(np.min(cost * [s.parallelism for s in self.strategies[owner]])) / num_devices
            for owner, cost in self.pairwise.costs.items()
        )


@dataclass(frozen=True, eq=False)
class FoldedGraph:
    """A graph and its classes, with cached data that does not depend on the mesh, for solving the
    graph on several meshes."""

    graph: Graph
    classes: list[int]

    def of_lives(self, graph: Graph) -> FoldedGraph:
        """The same of a graph that has other lives alone, on which none of this depends."""
        other = FoldedGraph(graph, self.classes)
        shared = ("members", "_priced", "edges")
        other.__dict__.update({name: getattr(self, name) for name in shared})
        return other

    @cached_property
    def members(self) -> dict[int, list[int]]:
        members: dict[int, list[int]] = {}
        for index, owner in enumerate(self.classes):
            members.setdefault(owner, []).append(index)
        return members

    @property
    def prices(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """{class: (price, count) for each group of members with equal costs}. A price is a number
        of `examples`, and ops of several classes may have it."""
        return self._priced[0]

    @property
    def examples(self) -> list[Node]:
        """A node for each price."""
        return self._priced[1]

    @cached_property
    def _priced(self) -> tuple[dict[int, tuple[tuple[int, int], ...]], list[Node]]:
        numbers: dict[tuple, int] = {}
        examples: list[Node] = []
        prices: dict[int, tuple[tuple[int, int], ...]] = {}
        for owner, indices in self.members.items():
            groups: dict[tuple, list[Node]] = {}
            for i in indices:
                node = self.graph.nodes[i]
                groups.setdefault(_price_key(node), []).append(node)
            found = []
            for key, nodes in groups.items():
                number = numbers.setdefault((key, self._cost_key(nodes[-1])), len(examples))
                if number == len(examples):
                    examples.append(nodes[-1])
                found.append((number, len(nodes)))
            prices[owner] = tuple(found)
        return prices, examples

    def _cost_key(self, node: Node) -> tuple:
        """Nodes of any class with equal keys, here and by `_price_key`, cost the same."""
        values = [self.graph.values[v] for v in (*node.operands, *node.results)]
        # Equal rules are mostly one object.
        return (
            (node.kind.value, node.name, id(node.rule), node.signature, node.work),
            (node.part_bytes, node.passes, node.batch_factor, len(node.operands)),
            tuple((value.shape, value.dtype, value.num_bytes, value.deferred) for value in values),
        )

    @cached_property
    def edges(self) -> dict[tuple[int, int, int, int, bool], float]:
        """{(class, class, result, operand position, deferred): how often it is resharded}."""
        graph, classes = self.graph, self.classes
        counts: dict[tuple[int, int, int, int, bool], float] = defaultdict(float)
        for index, node in enumerate(graph.nodes):
            for position, value in enumerate(node.operands):
                u, result = graph.producer[value]
                weight = edge_weight(graph.nodes[u], node)
                info = graph.values[value]
                counts[classes[u], classes[index], result, position, info.deferred] += weight
        # State leaves the step in the layout in which it entered.
        for i, o in graph.state:
            source, target = graph.outputs[o], graph.inputs[i]
            assert source is not None
            u, result = graph.producer[source]
            v, _ = graph.producer[target]
            if u != v:
                counts[classes[u], classes[v], result, STATE_EDGE, True] += 1.0
        return counts

    @cached_property
    def hideable(self) -> list[tuple[tuple[int, int, int, int, bool], Hideable]]:
        """(an edge, a collective of one of its members that may run under compute)."""
        graph, classes = self.graph, self.classes
        found = []
        for one in hideable(graph):
            u, result = graph.producer[graph.nodes[one.node].operands[one.position]]
            found.append(((classes[u], classes[one.node], result, one.position, True), one))
        return found


def build_problem(
    graph: Graph,
    mesh: LogicalMesh,
    classes: list[int],
    allowed: Allowed,
    keep: StrategyFilter | None = None,
) -> ShardingProblem:
    return problem_on_mesh(FoldedGraph(graph, classes), mesh, allowed, keep)


def problem_on_mesh(
    folded: FoldedGraph,
    mesh: LogicalMesh,
    allowed: Allowed,
    keep: StrategyFilter | None = None,
    overlaps: bool = False,
) -> ShardingProblem:
    """`overlaps`: collectives run under compute, where the devices allow it."""
    graph = folded.graph
    strategies, costs = _strategies_and_costs(folded, mesh, allowed, keep)
    room: dict[tuple[int, int, int, int, bool], list[float]] = defaultdict(list)
    if overlaps := overlaps and hides_collectives(mesh):
        seconds = rooms(graph, mesh, [one for _, one in folded.hideable])
        for (key, _), room_s in zip(folded.hideable, seconds, strict=True):
            room[key].append(room_s)
    pairwise, taken_off = PairwiseProblem(costs), PairwiseProblem({})
    scaled: dict[tuple[int, float], np.ndarray] = {}
    for key, matrix, weight in _edges(folded, mesh, strategies):
        u, v, *_ = key
        together = scaled.get((id(matrix), weight))
        if together is None:
            together = scaled[id(matrix), weight] = matrix * weight
        pairwise.add_edge(u, v, together)
        under_compute = hidden(matrix, room[key]) if key in room else None
        if under_compute is not None:
            pairwise.add_edge(u, v, -under_compute)
            taken_off.costs.setdefault(u, np.zeros(len(strategies[u])))
            taken_off.add_edge(u, v, under_compute)
    representative = {owner: indices[0] for owner, indices in folded.members.items()}
    return ShardingProblem(
        graph,
        mesh,
        folded.classes,
        representative,
        strategies,
        pairwise,
        hidden=_limit(taken_off) if overlaps else None,
    )


def _strategies_and_costs(
    folded: FoldedGraph, mesh: LogicalMesh, allowed: Allowed, keep: StrategyFilter | None
) -> tuple[dict[int, list[Strategy]], dict[int, np.ndarray]]:
    """Of every class."""
    graph = folded.graph
    strategies: dict[int, list[Strategy]] = {}
    costs: dict[int, np.ndarray] = {}
    cache: dict[tuple, tuple[list[Strategy], np.ndarray]] = {}
    cost_of: dict[tuple, np.ndarray] = {}
    for owner, indices in folded.members.items():
        node = graph.nodes[indices[0]]
        pinned: frozenset[tuple[int, frozenset[Layout]]] = frozenset()
        if allowed:
            pinned = frozenset(
                (r, allowed[v])
                for i in indices
                for r, v in enumerate(graph.nodes[i].results)
                if v in allowed
            )
        # Equal rules are mostly one object, whose hash is its address.
        key = node.kind.value, node.name, id(node.rule), node.batch_factor, node.region, pinned
        known = cache.get(key)
        if known is None:
            chosen = _allowed(graph, node, mesh, pinned, keep)
            known = cache[key] = chosen, _shards(chosen, mesh.shape)
        strategies[owner], shards = known
        priced = (folded.prices[owner], id(strategies[owner]))
        if priced not in cost_of:
            examples = [(folded.examples[number], count) for number, count in priced[0]]
            cost_of[priced] = np.sum(
                [n * node_costs(graph, e, mesh, strategies[owner], shards) for e, n in examples],
                axis=0,
            )
        costs[owner] = cost_of[priced]
    return strategies, costs


def _limit(function: PairwiseProblem) -> Limit:
    edges = {(u, v): m for u, row in function.edges.items() for v, m in row.items() if u < v}
    return Limit({u: cost for u, cost in function.costs.items() if cost.any()}, edges)


def _price_key(node: Node) -> tuple:
    """Members of a class with equal keys cost the same."""
    return node.touched_bytes, node.flops, node.weight, node.traffic, node.host_bytes


def _allowed(
    graph: Graph,
    node: Node,
    mesh: LogicalMesh,
    pinned: frozenset[tuple[int, frozenset[Layout]]],
    keep: StrategyFilter | None,
) -> list[Strategy]:
    strategies = enumerate_strategies(node.rule, mesh.shape)
    if node.kind is NodeKind.FINISH and node.rule.linear:
        strategies = tuple(s for s in strategies if s.results == s.operands)
    if node.kind is NodeKind.MERGE and node.rule.linear:
        strategies = tuple(_starting_at_zero(s) for s in strategies)
    chosen = list(strategies)
    if keep is not None:
        chosen = [strategies[i] for i in keep(node, strategies)]
    for result, layouts in pinned:
        fitting = [s for s in chosen if s.results[result] in layouts]
        if not fitting:
            fitting = [s for s in strategies if s.results[result] in layouts]
        if not fitting:
            path = graph.values[node.results[result]].path or node.name
            raise SolverError(
                f"{path}: no strategy of {node.name} gives the requested layout. Request another "
                "layout, or none."
            )
        chosen = fitting
    if mesh.device is None and node.is_heavy:
        # Without a price on compute, large products must at least not be replicated.
        max_parallelism = max(s.parallelism for s in chosen)
        chosen = [s for s in chosen if s.parallelism == max_parallelism]
    return chosen


def _starting_at_zero(strategy: Strategy) -> Strategy:
    """A carry that adds up partial sums starts at zero, which needs no reduction: only its last
    operand, the body's result, is partial."""
    *inits, last = strategy.operands
    whole = [tuple(WHOLE if e == PARTIAL else e for e in layout) for layout in inits]
    return replace(strategy, operands=(*whole, last))


def _shards(strategies: list[Strategy], mesh_shape: tuple[int, ...]) -> np.ndarray:
    """Per strategy and operand, then result: over how many devices its bytes are divided."""
    table = [
        [num_shards(layout, mesh_shape) for layout in (*s.operands, *s.results)] for s in strategies
    ]
    return np.array(table, dtype=float).reshape(len(strategies), -1 if strategies else 0)


def node_costs(
    graph: Graph,
    node: Node,
    mesh: LogicalMesh,
    strategies: list[Strategy],
    shards: np.ndarray | None = None,
) -> np.ndarray:
    """Seconds per strategy; `shards` as `_shards` makes it, if that is known."""
    values = (*node.operands, *node.results)
    sizes = np.array([graph.values[v].num_bytes for v in values], dtype=float)
    if shards is None:
        shards = _shards(strategies, mesh.shape)
    results = slice(len(node.operands), None)
    cost = tie_break_s(mesh, (sizes[results] / shards[:, results]).sum(axis=1))
    if mesh.device is not None and mesh.profile is not None and node.kind is NodeKind.OP:
        for i, s in enumerate(strategies):
            layouts = (*s.operands, *s.results)
            cost[i] += measured_op_s(node, graph.values, mesh, layouts, s.parallelism)
    elif mesh.device is not None and node.kind is NodeKind.OP:
        touched = np.array(node.touched_bytes or (0.0,) * len(values))
        moved = (touched / shards).sum(axis=1)
        dtype = graph.values[node.operands[0] if node.operands else node.results[0]].dtype
        ways = np.array([s.parallelism for s in strategies], dtype=float)
        flops_per_s, bytes_per_s = rates(mesh.device, dtype)
        whole_s = max(node.flops / flops_per_s, exact_s(mesh.device, node))
        cost += np.maximum(whole_s / ways, moved / bytes_per_s)
        if node.work is not None and mesh.device.patch_element_s is not None:
            cost += [
                patches_s(node, graph.values, mesh, (*s.operands, *s.results), s.parallelism)
                for s in strategies
            ]
    if node.host_bytes and mesh.device is not None:
        cost += node.host_bytes / shards[:, -1] / mesh.device.bytes_per_s_to_host
    if node.rule.halos:
        cost += [halo_s(node, graph.values, mesh, s.operands) for s in strategies]
    return cost * node.weight


def _edges(
    folded: FoldedGraph, mesh: LogicalMesh, strategies: dict[int, list[Strategy]]
) -> Iterator[tuple[tuple[int, int, int, int, bool], np.ndarray, float]]:
    """(edge, seconds of one collective, how many there are)."""
    graph, members = folded.graph, folded.members
    # Edges of equal ops have equal tables: by the ops' strategies, and what is resharded.
    known: dict[tuple, np.ndarray] = {}
    for edge, weight in folded.edges.items():
        u, v, result, position, deferred = edge
        producer = graph.nodes[members[u][0]]
        consumer = graph.nodes[members[v][0]]
        info = graph.values[producer.results[result]]
        made, read = strategies[u], strategies[v]
        reverses = producer.name == "rev" and consumer.name == "conv_general_dilated"
        linear = consumer.rule.linear
        key = id(made), result, id(read), position, info.shape, info.num_bytes, info.order
        key = *key, deferred, linear, reverses
        matrix = known.get(key)
        if matrix is None:
            partial = linear or any(PARTIAL in s.results[result] for s in made)
            table = value_table(mesh, info, partial, deferred)
            rows = [table.index[s.results[result]] for s in made]
            if position == STATE_EDGE:
                columns = [table.index[s.results[0]] for s in read]
            else:
                columns = [table.index[s.operands[position]] for s in read]
            matrix = np.minimum(table.cost_s[np.array(rows)[:, None], columns], FORBIDDEN)
            if reverses:
                # XLA knows the gradient of a strided convolution by its reversed filter. With a
                # collective between the two, it would multiply all the zeros of a dilated image.
                matrix = np.where(matrix > 0, FORBIDDEN, matrix)
            known[key] = matrix
        yield edge, matrix, weight
