"""One graph, solved on many meshes with many prices of memory: a `LogicalMesh` → `LayerTable`s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np

from autopar.cost.layer_costs import STATE_EDGE, GroupCosts, LayerTerms
from autopar.cost.node_layers import NodeLayers
from autopar.cost.reshard import value_table
from autopar.ir.graph import Graph, NodeKind
from autopar.ir.mesh import LogicalMesh, last_axis
from autopar.ir.spec import PARTIAL, Layout, is_slice, num_shards
from autopar.ir.stages import LayerTable, Submesh
from autopar.sharding.combine import at_price
from autopar.sharding.contract import solve_contracted
from autopar.sharding.known_folds import fold_graph
from autopar.sharding.limit import Limit
from autopar.sharding.memory_limits import copy_shares
from autopar.sharding.problem import (
    Allowed,
    FoldedGraph,
    ShardingProblem,
    StrategyFilter,
    node_costs,
    problem_on_mesh,
)
from autopar.sharding.reduce import PairwiseProblem, reduce_problem
from autopar.sharding.solve import folded_for, solve_graph

Choice = dict[int, int]  # class -> strategy

_BETWEEN = 3  # choices between two that were solved
TABLE_GAP = 0.005  # tables are within a few percent of a stage's own solve; they need no better
_REST_GAP = 0.0075  # good enough to do without an integer programme
_SMALL = 1000  # edge entries up to which an integer programme is as fast as message passing


@dataclass(frozen=True, eq=False)
class TableJob:
    """A mesh on which the graph is to be solved.

    allowed, keep: what the solver may choose there.
    prices:        shares of the step that all memory is worth.
    num_in_flight: micro-batches that a stage there keeps.
    remat:         whether layers are recomputed: False, True or both.
    time_limit_s:  of one solve.
    known:         the cheapest choice and what it costs, if the mesh was solved before.
    """

    submesh: Submesh
    mesh: LogicalMesh
    allowed: Allowed
    keep: StrategyFilter | None
    prices: Sequence[float]
    num_in_flight: float
    remat: Sequence[bool]
    time_limit_s: float
    known: tuple[Choice, float] | None = None


@dataclass(frozen=True, eq=False)
class MadeTables:
    """The tables of a mesh, and what they were made of.

    known:    the cheapest choice and what it costs.
    device_s: of all operators, evenly divided, on all devices together.
    """

    tables: list[LayerTable]
    known: tuple[Choice, float]
    device_s: float


class TableBench:
    """One graph, solved on many meshes. `make` may run in another process, `take` keeps what it
    made."""

    def __init__(
        self,
        graph: Graph,
        places: NodeLayers,
        num_micro_batches: int,
        folded: FoldedGraph | None = None,
        solver: str = "highs",
    ) -> None:
        self.graph, self.places = graph, places
        self.num_micro_batches = num_micro_batches
        self.folded = folded or fold_graph(graph)
        self.solver = solver
        self.terms = LayerTerms(graph, places, self.folded.classes, num_micro_batches)
        self.known: dict[tuple[Submesh, tuple[int, ...]], tuple[Choice, float]] = {}
        self.device_s = 0.0  # of all operators, evenly divided, on all devices together
        # Problems that were solved without prices of memory, until these are asked for.
        self.problems: dict[tuple[Submesh, tuple[int, ...]], ShardingProblem] = {}
        # (submesh, mesh shape, recomputed) -> the table at which memory has no price
        self.plain: dict[tuple[Submesh, tuple[int, ...], bool], LayerTable] = {}

    def __getstate__(self) -> dict[str, object]:
        """For another process, which is told with each job what it has to know. What is sent does
        not change while it is pickled."""
        folded = FoldedGraph(self.graph, self.folded.classes)
        return {**self.__dict__, "folded": folded, "known": {}, "problems": {}, "plain": {}}

    def terms_of(self, problem: ShardingProblem) -> LayerTerms:
        """The terms of the problem's classes, which pins may have split."""
        if problem.classes is not self.terms.classes:
            self.terms = LayerTerms(
                self.graph, self.places, problem.classes, self.num_micro_batches
            )
        return self.terms

    def cost_by_last_axis(self) -> dict[int, float]:
        """Size of a mesh's last axis, 1 for meshes of one axis -> what it costs at best, relative
        to the cheapest mesh of the same submesh, on average over those solved so far."""
        cheapest: dict[Submesh, float] = {}
        for (submesh, _), (_, objective) in self.known.items():
            cheapest[submesh] = min(objective, cheapest.get(submesh, inf))
        ratios: dict[int, list[float]] = {}
        for submesh, shape in sorted(self.known):  # in whatever order they were solved
            _, objective = self.known[submesh, shape]
            ratios.setdefault(last_axis(shape), []).append(objective / cheapest[submesh])
        return {size: sum(many) / len(many) for size, many in ratios.items()}

    def make(self, job: TableJob) -> MadeTables:
        """The tables of a mesh, which depend on the job alone."""
        mesh, submesh = job.mesh, job.submesh
        problem, first, objective = self.cheapest(job)
        if not job.prices:
            self.problems[submesh, mesh.shape] = problem
        terms = self.terms_of(problem)
        pricer = Pricer(problem, terms)
        limit, unit, choices = Limit({}, {}), 0.0, {0.0: first}
        if job.prices and mesh.num_devices > 1:
            limit = pricer.limit(*terms.priced_bytes(job.num_in_flight))
            unit = objective / max(limit.value(first), 1.0)
        for share in job.prices if mesh.num_devices > 1 else ():
            penalised = problem.pairwise.copy()
            limit.add_to(penalised, share * unit)
            choices[share] = self.solve(penalised, job.time_limit_s)
        seen: list[Choice] = []
        tables: list[LayerTable] = []
        for share, choice in _with_exchanged(choices, problem.pairwise, limit, unit):
            if choice in seen:
                continue
            seen.append(choice)
            figures = pricer.figures(choice)
            table = terms.table(figures, submesh, mesh)
            table = replace(table, price_per_byte=share * unit)
            tables += [terms.recomputed(table, figures) if again else table for again in job.remat]
        device_s = problem.work_s * mesh.num_devices
        return MadeTables(tables, (first, objective), device_s)

    def take(self, job: TableJob, made: MadeTables) -> None:
        """Keep what was made of a job."""
        key = job.submesh, job.mesh.shape
        self.known[key] = made.known
        for table in reversed(made.tables):  # the cheapest comes first
            if not table.price_per_byte:
                self.plain[*key, table.remat] = table

    def cheapest(self, job: TableJob) -> tuple[ShardingProblem, Choice, float]:
        """The problem, its cheapest choice and what that costs; solved once per mesh."""
        if job.known is not None:
            problem = self.problems.pop((job.submesh, job.mesh.shape), None)
            if problem is None:
                folded = folded_for(self.graph, job.allowed, folded=self.folded)
                problem = problem_on_mesh(folded, job.mesh, job.allowed, job.keep)
            return problem, *job.known
        sharding = solve_graph(
            self.graph,
            job.mesh,
            allowed=job.allowed,
            keep=job.keep,
            solver=self.solver,
            time_limit_s=job.time_limit_s,
            folded=self.folded,
            gap=TABLE_GAP,
            small=_SMALL,
            rest_gap=_REST_GAP,
        )
        return sharding.problem, sharding.choice, sharding.objective

    def solve(self, problem: PairwiseProblem, time_limit_s: float) -> Choice:
        reduction = reduce_problem(problem)
        result = solve_contracted(
            reduction.problem,
            solver=self.solver,
            time_limit_s=time_limit_s,
            gap=TABLE_GAP,
            small=_SMALL,
            rest_gap=_REST_GAP,
        )
        return reduction.restore(result.choice)


def _with_exchanged(
    solved: Mapping[float, Choice], problem: PairwiseProblem, limit: Limit, unit: float
) -> Iterator[tuple[float, Choice]]:
    """The choices at shares that were solved, and between each two of them those that exchange
    groups of the first for groups of the second (see `combine`)."""
    shares = sorted(solved)
    for low, high in pairwise((*shares, inf)):
        yield low, solved[low]
        if low and high < inf:
            for k in range(1, _BETWEEN + 1):
                share = low * (high / low) ** (k / (_BETWEEN + 1))
                yield share, at_price(problem, limit, share * unit, solved[low], solved[high])


class Pricer:
    """Figures of groups on one mesh."""

    def __init__(self, problem: ShardingProblem, terms: LayerTerms) -> None:
        self.problem, self.terms = problem, terms
        self.graph, self.mesh = problem.graph, problem.mesh
        self.layouts: dict[Layout, int] = {}
        self.known_nodes: dict[tuple[int, int], float] = {}
        self.known_edges: dict[tuple[int, int, int], tuple[float, float, int]] = {}

    def figures(self, choice: Choice) -> GroupCosts:
        terms, classes = self.terms, self.problem.classes
        node_s = [
            self.node(group, index, choice[classes[index]])
            for group, index in enumerate(terms.node_groups)
        ]
        edges = [
            self.edge(group, choice[edge.source], choice[edge.target])
            for group, edge in enumerate(terms.edge_groups)
        ]
        shares = [
            1.0 / num_shards(self.strategy(owner, choice).results[result], self.mesh.shape)
            for owner, result in terms.value_groups
        ]
        edge_s, copy_share, copy_layout = (np.array(x) for x in zip(*edges, strict=True))
        return GroupCosts(np.array(node_s), edge_s, np.array(shares), copy_share, copy_layout)

    def strategy(self, owner: int, choice: Choice):
        return self.problem.strategies[owner][choice[owner]]

    def node(self, group: int, index: int, chosen: int) -> float:
        key = (group, chosen)
        if key not in self.known_nodes:
            strategies = self.problem.strategies[self.problem.classes[index]]
            chosen_strategies = [strategies[chosen]]
            cost = node_costs(self.graph, self.graph.nodes[index], self.mesh, chosen_strategies)
            self.known_nodes[key] = float(cost[0])
        return self.known_nodes[key]

    def edge(self, group: int, source: int, target: int) -> tuple[float, float, int]:
        """(seconds, the share that a copy is, the number of its layout)."""
        key = (group, source, target)
        if key not in self.known_edges:
            self.known_edges[key] = self.price_edge(group, source, target)
        return self.known_edges[key]

    def price_edge(self, group: int, source: int, target: int) -> tuple[float, float, int]:
        edge, problem, mesh = self.terms.edge_groups[group], self.problem, self.mesh
        up = problem.strategies[edge.source][source]
        down = problem.strategies[edge.target][target]
        made = up.results[edge.result]
        is_state = edge.position == STATE_EDGE
        wanted = down.results[0] if is_state else down.operands[edge.position]
        number = self.layouts.setdefault(wanted, len(self.layouts))
        if made == wanted:
            return 0.0, 0.0, number
        producer = self.graph.nodes[problem.representative[edge.source]]
        consumer = self.graph.nodes[problem.representative[edge.target]]
        info = self.graph.values[producer.results[edge.result]]
        partial = PARTIAL in made or PARTIAL in wanted
        table = value_table(mesh, info, partial, edge.deferred)
        copied = 0.0
        if not is_state and not is_slice(made, wanted):
            kept = made if consumer.kind is NodeKind.FINISH else wanted
            copied = 1.0 / num_shards(kept, mesh.shape)
        return table.cost(made, wanted), copied, number

    def limit(self, value_bytes: np.ndarray, copy_bytes: np.ndarray) -> Limit:
        """Bytes of values and copies as a function of the choice."""
        problem, shape = self.problem, self.mesh.shape
        nodes: dict[int, np.ndarray] = {}
        edges: dict[tuple[int, int], np.ndarray] = {}

        def add(table: dict, key, term: np.ndarray) -> None:
            table[key] = table[key] + term if key in table else term

        for (owner, result), size in zip(self.terms.value_groups, value_bytes, strict=True):
            strategies = problem.strategies[owner]
            if size:
                shares = [1.0 / num_shards(s.results[result], shape) for s in strategies]
                add(nodes, owner, size * np.array(shares))
        for edge, size in zip(self.terms.edge_groups, copy_bytes, strict=True):
            if not size:
                continue
            u, v = edge.source, edge.target
            ups, downs = problem.strategies[u], problem.strategies[v]
            finishes = self.graph.nodes[problem.representative[v]].kind is NodeKind.FINISH
            term = size * copy_shares(
                ups, downs, edge.result, edge.position, finishes, mesh_shape=shape
            )
            if u == v:
                add(nodes, u, np.diagonal(term))
            elif term.any():
                add(edges, (min(u, v), max(u, v)), term if u < v else term.T)
        return Limit(nodes, edges)
