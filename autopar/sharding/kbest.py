"""The k best shardings that differ in given decisions, in order of cost.

    PairwiseProblem, labels → Solution, Solution, … (`solutions`)
    ShardingProblem, labels → GraphSharding …       (`best_shardings`)

Some nodes are *decisions*, and each of their strategies has a label: the layouts of an operator's
operands, say, or the strategy itself. Choices with the same labels are one solution, represented by
the cheapest of them; all other nodes are free. Solutions come in order of cost, each proven to be
the best of the remaining ones.

This is Lawler's partition (1972). The best solution x of a space is found exactly; the rest of the
space falls into disjoint parts, one per decision i: decisions before i are as in x, decision i is
not, and those after are free (`_Space.parts`). Each part is solved, and the cheapest of all parts
is next. One reduction that spares the decisions serves all solves, and one relaxation is solved
from part to part with other bounds (`_Space.solve`).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import inf, prod

import numpy as np

from autopar.errors import SolverError
from autopar.sharding.ilp import RestrictedIlp, solve_ilp
from autopar.sharding.problem import ShardingProblem
from autopar.sharding.reduce import (
    FORBIDDEN,
    PairwiseProblem,
    Reduction,
    reduce_problem,
    restrict,
)
from autopar.sharding.solve import GraphSharding, SolveStats

Labels = Mapping[int, Sequence[Hashable]]  # node -> the label of each of its strategies


@dataclass(frozen=True)
class Solution:
    """A strategy for every node, and the labels of the decisions."""

    choice: dict[int, int]
    objective: float
    labels: dict[int, Hashable]
    is_proven: bool = True  # nothing cheaper is left; False if the solver ran out of time


def solutions(
    problem: PairwiseProblem,
    labels: Labels,
    *,
    fixed: Mapping[int, Hashable] | None = None,
    solver: str = "highs",
    time_limit_s: float = 60.0,
) -> Iterator[Solution]:
    """All solutions that differ in some label, cheapest first; none if nothing is allowed. `fixed`:
    decision -> its label in all solutions. `time_limit_s`: for one solve."""
    (each,) = solutions_of_each(
        problem, labels, [fixed or {}], solver=solver, time_limit_s=time_limit_s
    )
    return each


def solutions_of_each(
    problem: PairwiseProblem,
    labels: Labels,
    fixed: Sequence[Mapping[int, Hashable]],
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
) -> list[Iterator[Solution]]:
    """As `solutions`, for several sets of fixed decisions; one reduction serves all of them."""
    space = _Space(problem, labels, solver, time_limit_s)
    return [_in_order(space, space.whole(labels_of)) for labels_of in fixed]


def _in_order(space: _Space, first: _Part) -> Iterator[Solution]:
    order = count()  # of equal solutions, the one found first comes first
    waiting: list[tuple[float, int, Solution, _Part]] = []

    def solve(part: _Part) -> None:
        solution = space.solve(part)
        if solution is not None:
            heapq.heappush(waiting, (solution.objective, next(order), solution, part))

    solve(first)
    while waiting:
        _, _, solution, part = heapq.heappop(waiting)
        yield solution
        for rest in space.parts(part, solution):
            solve(rest)


def k_best(
    problem: PairwiseProblem,
    labels: Labels,
    num: int,
    *,
    cutoff: float = inf,
    deadline: float = inf,
    fixed: Mapping[int, Hashable] | None = None,
    solver: str = "highs",
    time_limit_s: float = 60.0,
) -> list[Solution]:
    """The `num` cheapest solutions, or fewer: none above the cutoff, and no more after the deadline
    (of `time.monotonic`)."""
    best: list[Solution] = []
    in_order = solutions(problem, labels, fixed=fixed, solver=solver, time_limit_s=time_limit_s)
    for solution in islice(in_order, num):
        if solution.objective > cutoff:
            break
        best.append(solution)
        if time.monotonic() > deadline:
            break
    return best


def covering(
    problem: PairwiseProblem,
    labels: Labels,
    num: int,
    *,
    deadline: float = inf,
    solver: str = "highs",
    time_limit_s: float = 60.0,
) -> list[Solution]:
    """At most `num` representative solutions, cheapest first: all of them if there are no more,
    else `num` / 3 cheapest ones and, evenly over decisions and labels, the cheapest solution with a
    label."""
    space = _Space(problem, labels, solver, time_limit_s)
    is_small = prod(len(set(node_labels)) for node_labels in labels.values()) <= num
    chosen: list[Solution] = []
    in_order = _in_order(space, space.whole({}))
    for solution in islice(in_order, num if is_small else max(1, num // 3)):
        chosen.append(solution)
        if time.monotonic() > deadline:
            break
    if is_small:
        return chosen
    known = {_key(solution) for solution in chosen}
    pairs = [(node, label) for node, each in labels.items() for label in dict.fromkeys(each)]
    # One pass takes every n-th pair, the next pass their neighbours, until there are enough.
    stride = max(1, -(-len(pairs) // num))
    for start in range(stride):
        for node, label in pairs[start::stride]:
            if len(chosen) >= num or time.monotonic() > deadline:
                break
            solution = space.solve(space.whole({node: label}))
            if solution is not None and _key(solution) not in known:
                known.add(_key(solution))
                chosen.append(solution)
    return sorted(chosen, key=lambda solution: solution.objective)


def _key(solution: Solution) -> tuple[Hashable, ...]:
    return tuple(solution.labels.values())


def best_shardings(
    problem: ShardingProblem, labels: Labels, num: int, **how: object
) -> list[GraphSharding]:
    """The k best shardings of a graph, regardless of memory. `how`: as for `k_best`."""
    best = k_best(problem.pairwise, labels, num, **how)  # type: ignore[arg-type]
    return [sharding_of(problem, solution) for solution in best]


def sharding_of(problem: ShardingProblem, solution: Solution) -> GraphSharding:
    stats = SolveStats(
        num_nodes=len(problem.graph.nodes),
        num_classes=len(problem.strategies),
        num_strategies=sum(map(len, problem.strategies.values())),
        num_core_nodes=0,
        num_variables=0,
        num_constraints=0,
        relaxation_integral=True,
    )
    objective = solution.objective
    return GraphSharding(problem, solution.choice, objective, objective, stats)


def strategy_labels(problem: ShardingProblem, classes: Sequence[int]) -> Labels:
    """A label per strategy: solutions differ in the shardings of operators of these classes."""
    return {u: [(s.operands, s.results) for s in problem.strategies[u]] for u in classes}


_Part = dict[int, np.ndarray]  # decision -> the strategies that it may take


class _Space:
    """The problem with all nodes but the decisions reduced, and parts of it."""

    def __init__(
        self, problem: PairwiseProblem, labels: Labels, solver: str, time_limit_s: float
    ) -> None:
        for node, each in labels.items():
            assert len(each) == len(problem.costs[node]), f"node {node}: one label per strategy"
        self.original = problem
        self.labels = {node: _numbers(each) for node, each in labels.items()}
        self.names = labels
        self.solver, self.time_limit_s = solver, time_limit_s
        self.reduction: Reduction = reduce_problem(problem.copy(), spared=self.labels.keys())
        self.relaxation: RestrictedIlp | None = None
        if solver == "highs" and any(map(len, self.reduction.problem.edges.values())):
            self.relaxation = RestrictedIlp(self.reduction.problem, time_limit_s)

    def whole(self, fixed: Mapping[int, Hashable]) -> _Part:
        part = {}
        for node, each in self.names.items():
            wanted = [i for i, x in enumerate(each) if node not in fixed or x == fixed[node]]
            part[node] = np.array(wanted, dtype=int)
        return part

    def parts(self, part: _Part, solution: Solution) -> Iterator[_Part]:
        """Disjoint parts that together are the part without its solution."""
        rest = dict(part)
        for node, strategies in part.items():
            same = self.labels[node][strategies] == self.labels[node][solution.choice[node]]
            if not same.all():
                yield {**rest, node: strategies[~same]}
            rest[node] = strategies[same]

    def solve(self, part: _Part) -> Solution | None:
        """The cheapest choice of a part; None if nothing is allowed there."""
        if any(not len(strategies) for strategies in part.values()):
            return None
        result = None if self.relaxation is None else self.relaxation.solve(part)
        if result is not None:
            chosen = result.choice
        else:
            core = self.reduction.problem
            kept = {u: part.get(u, np.arange(len(costs))) for u, costs in core.costs.items()}
            second = reduce_problem(restrict(core, kept))
            try:
                result = solve_ilp(
                    second.problem, solver=self.solver, time_limit_s=self.time_limit_s
                )
            except SolverError:
                return None
            chosen = {u: int(kept[u][s]) for u, s in second.restore(result.choice).items()}
        choice = self.reduction.restore(chosen)
        objective = self.original.objective(choice)
        if objective >= FORBIDDEN / 2:
            return None
        names = {node: self.names[node][choice[node]] for node in self.names}
        return Solution(choice, objective, names, result.objective <= result.lower_bound)


def _numbers(labels: Sequence[Hashable]) -> np.ndarray:
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(label, len(known)) for label in labels], dtype=int)
