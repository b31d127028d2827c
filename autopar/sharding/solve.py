"""From a `Graph` and a mesh to a `GraphSharding`: fold, price, reduce, solve, restore.

The result has its objective, a proven lower bound, and the size of every step. `fit_into_memory`
checks whether it fits, and solves again under a budget if it does not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf

from autopar.cost.memory import MemoryProfile, memory_profile
from autopar.ir.graph import Graph
from autopar.ir.mesh import LogicalMesh
from autopar.ir.spec import Layout, NodeLayouts
from autopar.progress import debugs, tell
from autopar.sharding.budget import BudgetResult, Enough, solve_within_budget
from autopar.sharding.contract import SMALL, solve_contracted
from autopar.sharding.ilp import solve_ilp
from autopar.sharding.known_folds import fold_graph
from autopar.sharding.problem import (
    Allowed,
    FoldedGraph,
    ShardingProblem,
    StrategyFilter,
    problem_on_mesh,
)
from autopar.sharding.reduce import reduce_problem
from autopar.sharding.strategies import Strategy

_MOST_ROUNDS = 3  # of solving under a budget: the rows' peak is not quite the profile's


@dataclass(frozen=True)
class SolveStats:
    """Sizes before and after each reduction, and the seconds of each step."""

    num_nodes: int
    num_classes: int
    num_strategies: int
    num_core_nodes: int
    num_variables: int
    num_constraints: int
    relaxation_integral: bool
    num_memory_rows: int = 0
    num_solves: int = 1
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class GraphSharding:
    """A strategy for every node of the graph. With `refetch`, the backward pass repeats the gathers
    of the forward pass, so that gathered values need not stay in memory."""

    problem: ShardingProblem
    choice: dict[int, int]
    objective: float
    lower_bound: float
    stats: SolveStats
    refetch: bool = False
    is_rough: bool = False  # solved only until nothing could cost less than a cutoff
    unbounded: tuple[float, float] | None = None  # (objective, peak bytes) without a budget
    price_per_byte: float = 0.0  # of the memory budget, if it binds

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    @property
    def mesh(self) -> LogicalMesh:
        return self.problem.mesh

    def of_graph(self, graph: Graph) -> GraphSharding:
        """The same sharding of a graph that differs only in memory, names and value numbers."""
        if graph is self.graph:
            return self
        return replace(self, problem=replace(self.problem, graph=graph))

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        problem = self.problem
        return tuple(problem.strategies[c][self.choice[c]] for c in problem.classes)

    @cached_property
    def memory(self) -> MemoryProfile:
        return memory_profile(self.graph, self.mesh, self.layouts, refetch=self.refetch)

    @cached_property
    def layouts(self) -> tuple[NodeLayouts, ...]:
        """(operand layouts, result layouts) of every node."""
        return tuple((s.operands, s.results) for s in self.strategies)

    @property
    def hidden_s(self) -> float | None:
        """Seconds of its collectives that run under compute; None if that was not asked."""
        hidden = self.problem.hidden
        return None if hidden is None else hidden.value(self.choice)

    @property
    def floor(self) -> float:
        """What it costs; no more than that if it is rough."""
        return self.lower_bound if self.is_rough else self.objective

    @property
    def gap(self) -> float:
        """(objective − proven lower bound) / objective; 0 is proven optimal."""
        if self.objective <= 0:
            return 0.0
        return max(0.0, (self.objective - self.lower_bound) / self.objective)


def solve_graph(
    graph: Graph,
    mesh: LogicalMesh,
    *,
    pins: Mapping[int, Layout] | None = None,
    allowed: Allowed | None = None,
    keep: StrategyFilter | None = None,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    fold: bool = True,
    folded: FoldedGraph | None = None,
    gap: float = 0.0,
    contract: bool = True,
    small: int = SMALL,
    rest_gap: float = 0.0,
    cutoff: float = inf,
    overlaps: bool = False,
) -> GraphSharding:
    """pins:     value -> the layout that its producer must give it.
    allowed:  value -> the layouts that its producer may give it.
    folded:   the graph with its classes, if known.
    gap:      a solution within this ratio of the optimum is good enough.
    contract: False solves the reduced problem as an integer programme directly.
    small:    edge entries up to which that is done in any case.
    rest_gap: good enough to leave out the integer programme after contraction.
    cutoff:   once nothing can cost less, any solution will do.
    overlaps: collectives of weights and gradients run under compute, where the devices allow it.
    """
    allowed = {**(allowed or {}), **{v: frozenset((pin,)) for v, pin in (pins or {}).items()}}
    seconds: dict[str, float] = {}
    clock = _Clock(seconds)
    folded = folded_for(graph, allowed, fold=fold, folded=folded)
    clock.lap("fold")
    problem = problem_on_mesh(folded, mesh, allowed, keep, overlaps)
    clock.lap("costs")
    reduction = reduce_problem(problem.pairwise.copy())
    clock.lap("reduce")
    core_nodes = len(reduction.problem.costs)
    solve = partial(solve_contracted, small=small, rest_gap=rest_gap) if contract else solve_ilp
    result = solve(
        reduction.problem, solver=solver, time_limit_s=time_limit_s, gap=gap, cutoff=cutoff
    )
    clock.lap("solve")
    choice = reduction.restore(result.choice)
    stats = SolveStats(
        num_nodes=len(graph.nodes),
        num_classes=len(problem.strategies),
        num_strategies=sum(len(s) for s in problem.strategies.values()),
        num_core_nodes=core_nodes,
        num_variables=result.num_variables,
        num_constraints=result.num_constraints,
        relaxation_integral=result.relaxation_integral,
        seconds=seconds,
    )
    is_rough = cutoff <= result.lower_bound < result.objective
    sharding = GraphSharding(
        problem, choice, result.objective, result.lower_bound, stats, is_rough=is_rough
    )
    _tell_solver(sharding)
    return sharding


def _tell_solver(sharding: GraphSharding) -> None:
    if not debugs("solver"):
        return
    stats = sharding.stats
    relaxed = "integral" if stats.relaxation_integral else "branched"
    seconds = ", ".join(f"{name} {value:.3f} s" for name, value in stats.seconds.items())
    tell(
        "solver",
        f"autopar solver, mesh {sharding.mesh.shape}: {stats.num_nodes} nodes in "
        f"{stats.num_classes} classes with {stats.num_strategies} strategies; reduced to "
        f"{stats.num_core_nodes} nodes, {stats.num_variables} variables, {stats.num_constraints} "
        f"constraints ({relaxed}); objective {sharding.objective:.9g}, lower bound "
        f"{sharding.lower_bound:.9g}, gap {sharding.gap:.2%}; {seconds}",
    )


def folded_for(
    graph: Graph, allowed: Allowed, *, fold: bool = True, folded: FoldedGraph | None = None
) -> FoldedGraph:
    """The graph with its classes, split where their members have different allowed layouts."""
    if folded is None:
        folded = fold_graph(graph, fold=fold)
    if allowed:
        folded = FoldedGraph(graph, _split_by_pins(graph, folded.classes, allowed))
    return folded


class DoesNotFit(Exception):
    """No sharding found fits the budget; `smallest` has the lowest peak. Internal."""

    def __init__(self, smallest: GraphSharding) -> None:
        super().__init__(smallest.memory.peak_bytes)
        self.smallest = smallest


def fit_into_memory(
    sharding: GraphSharding,
    budget_bytes: float,
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    cutoff: float = inf,
    first_price: float = 0.0,
    enough: Enough | None = None,
) -> GraphSharding:
    """The sharding itself if it fits, else the best one found that does; `DoesNotFit` if none. The
    search may end early once nothing below the cutoff can be found, or with a sharding that is good
    `enough`; it starts from `first_price` per byte, if given."""
    if sharding.memory.peak_bytes <= budget_bytes:
        return sharding
    refetching = replace(sharding, refetch=True)
    if refetching.memory.peak_bytes <= budget_bytes:
        return refetching
    # Rows count a copy once for each reader, and not between two of them; the profile, which shares
    # copies, decides. What it finds more is taken off the rows' budget.
    started = time.perf_counter()
    fitted, rows_bytes, bound = refetching, budget_bytes, inf
    for _ in range(_MOST_ROUNDS):
        result = solve_within_budget(
            sharding.problem,
            rows_bytes,
            solver=solver,
            time_limit_s=max(0.0, time_limit_s - (time.perf_counter() - started)),
            first=(sharding.choice, sharding.lower_bound),
            cutoff=cutoff,
            first_price=first_price,
            enough=enough,
        )
        bound = min(bound, result.lower_bound)  # that of the whole budget holds
        fitted = _fitted(refetching, result, rows_bytes, bound, time.perf_counter() - started)
        excess = fitted.memory.peak_bytes - budget_bytes
        if excess <= 0:
            return fitted
        if result.choice is None:
            break
        rows_bytes, first_price = rows_bytes - excess, result.price
    raise DoesNotFit(fitted)


def _fitted(
    sharding: GraphSharding,
    result: BudgetResult,
    rows_bytes: float,
    lower_bound: float,
    took_s: float,
) -> GraphSharding:
    """The sharding with a budget's choice; with the smallest, if none fits."""
    fits = result.choice is not None
    seconds = {**sharding.stats.seconds, "memory": took_s}
    stats = replace(
        sharding.stats,
        num_memory_rows=result.num_rows,
        num_solves=1 + result.num_solves,
        seconds=seconds,
    )
    if debugs("solver"):
        tell(
            "solver",
            f"autopar solver, mesh {sharding.mesh.shape}, budget {rows_bytes:.0f} bytes: "
            f"{result.num_solves} solves, {result.num_rows} rows, peak {result.peak_bytes:.0f}, "
            f"objective {result.objective:.9g}, lower bound {result.lower_bound:.9g}, "
            f"{'fits' if fits else 'does not fit'}; {seconds['memory']:.3f} s",
        )
    choice = result.choice if result.choice is not None else result.smallest
    return replace(
        sharding,
        choice=choice,
        objective=sharding.problem.pairwise.objective(choice),
        lower_bound=lower_bound,
        stats=stats,
        unbounded=(sharding.objective, replace(sharding, refetch=False).memory.peak_bytes),
        price_per_byte=result.price,
    )


def _split_by_pins(graph: Graph, classes: list[int], allowed: Allowed) -> list[int]:
    """The classes, split by the allowed layouts of their members' results."""
    numbers: dict[tuple, int] = {}
    keys = [
        (owner, *(allowed.get(value) for value in node.results))
        for owner, node in zip(classes, graph.nodes, strict=True)
    ]
    return [numbers.setdefault(key, len(numbers)) for key in keys]


class _Clock:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self.last
        self.last = now
