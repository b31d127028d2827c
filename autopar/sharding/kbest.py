"""The best few shardings that differ where it matters, in order of cost.

    PairwiseProblem, labels → Solution, Solution, … (`solutions`)
    ShardingProblem, labels → GraphSharding …       (`best_shardings`)

Some nodes are *decisions*, and each of their strategies has a label: the layouts of an operator's
operands, say, or the strategy itself. Two choices that have the same labels are one solution, of
which the cheapest choice is taken; all other nodes take what suits. Solutions come out in order of
cost, each proven to be the best of those that are left.

That is Lawler's partition (1972). The best solution x of a space is found exactly; what is left of
the space falls into disjoint parts, one per decision i: there decisions before i are as in x,
decision i is not, and those after are free (`_Space.parts`). Each part is solved, and the cheapest
of all parts is next. One reduction that spares the decisions serves all solves, and one relaxation
is solved from part to part with other bounds (`_Space.solve`).
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
    """A strategy for every node, and the labels of those that are decisions."""

    choice: dict[int, int]
    objective: float
    labels: dict[int, Hashable]
    is_proven: bool = True  # that nothing cheaper is left; False if the solver ran out of time


def solutions(
    problem: PairwiseProblem,
    labels: Labels,
    *,
    fixed: Mapping[int, Hashable] | None = None,
    solver: str = "highs",
    time_limit_s: float = 60.0,
) -> Iterator[Solution]:
    """All solutions that differ in some label, the cheapest first; none if nothing is allowed.
    `fixed`: decisions that have this label in all of them. `time_limit_s` is for one solve."""
    (found,) = solutions_of_each(
        problem, labels, [fixed or {}], solver=solver, time_limit_s=time_limit_s
    )
    return found


def solutions_of_each(
    problem: PairwiseProblem,
    labels: Labels,
    fixed: Sequence[Mapping[int, Hashable]],
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
) -> list[Iterator[Solution]]:
    """As `solutions`, for several ways to fix some decisions; the reduction serves all of them."""
    space = _Space(problem, labels, solver, time_limit_s)
    return [_in_order(space, space.whole(own)) for own in fixed]


def _in_order(space: _Space, first: _Part) -> Iterator[Solution]:
    order = count()  # of equal ones, that which was found first
    waiting: list[tuple[float, int, Solution, _Part]] = []

    def look_into(part: _Part) -> None:
        found = space.solve(part)
        if found is not None:
            heapq.heappush(waiting, (found.objective, next(order), found, part))

    look_into(first)
    while waiting:
        _, _, found, part = heapq.heappop(waiting)
        yield found
        for rest in space.parts(part, found):
            look_into(rest)


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
    """The `num` cheapest solutions, or fewer: none costs more than the cutoff, and after the
    deadline (of `time.monotonic`) there are no more."""
    found: list[Solution] = []
    every = solutions(problem, labels, fixed=fixed, solver=solver, time_limit_s=time_limit_s)
    for one in islice(every, num):
        if one.objective > cutoff:
            break
        found.append(one)
        if time.monotonic() > deadline:
            break
    return found


def covering(
    problem: PairwiseProblem,
    labels: Labels,
    num: int,
    *,
    deadline: float = inf,
    solver: str = "highs",
    time_limit_s: float = 60.0,
) -> list[Solution]:
    """At most `num` solutions that show what there is, the cheapest first: all of them if there are
    no more, else the cheapest third and, of decisions and labels evenly, the cheapest solution with
    that label."""
    space = _Space(problem, labels, solver, time_limit_s)
    is_small = prod(len(set(own)) for own in labels.values()) <= num
    found: list[Solution] = []
    for one in islice(_in_order(space, space.whole({})), num if is_small else max(1, num // 3)):
        found.append(one)
        if time.monotonic() > deadline:
            break
    if is_small:
        return found
    known = {_key(one) for one in found}
    pairs = [(node, label) for node, own in labels.items() for label in dict.fromkeys(own)]
    # One pass takes every n-th pair, the next those beside them, until there are enough.
    stride = max(1, -(-len(pairs) // num))
    for start in range(stride):
        for node, label in pairs[start::stride]:
            if len(found) >= num or time.monotonic() > deadline:
                break
            one = space.solve(space.whole({node: label}))
            if one is not None and _key(one) not in known:
                known.add(_key(one))
                found.append(one)
    return sorted(found, key=lambda one: one.objective)


def _key(solution: Solution) -> tuple[Hashable, ...]:
    return tuple(solution.labels.values())


def best_shardings(
    problem: ShardingProblem, labels: Labels, num: int, **how: object
) -> list[GraphSharding]:
    """The same for the sharding of a graph; memory is not looked at. `how`: as for `k_best`."""
    found = k_best(problem.pairwise, labels, num, **how)  # type: ignore[arg-type]
    return [sharding_of(problem, one) for one in found]


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
    """A label per strategy: solutions differ in how the operators of these classes are split."""
    return {u: [(s.operands, s.results) for s in problem.strategies[u]] for u in classes}


_Part = dict[int, np.ndarray]  # decision -> the strategies that it may take


class _Space:
    """The problem with all but its decisions reduced, and parts of it."""

    def __init__(
        self, problem: PairwiseProblem, labels: Labels, solver: str, time_limit_s: float
    ) -> None:
        for node, own in labels.items():
            assert len(own) == len(problem.costs[node]), f"node {node}: one label per strategy"
        self.original = problem
        self.labels = {node: _numbers(own) for node, own in labels.items()}
        self.names = labels
        self.solver, self.time_limit_s = solver, time_limit_s
        self.reduction: Reduction = reduce_problem(problem.copy(), spared=self.labels.keys())
        self.relaxation: RestrictedIlp | None = None
        if solver == "highs" and any(map(len, self.reduction.problem.edges.values())):
            self.relaxation = RestrictedIlp(self.reduction.problem, time_limit_s)

    def whole(self, fixed: Mapping[int, Hashable]) -> _Part:
        part = {}
        for node, own in self.names.items():
            wanted = [i for i, x in enumerate(own) if node not in fixed or x == fixed[node]]
            part[node] = np.array(wanted, dtype=int)
        return part

    def parts(self, part: _Part, found: Solution) -> Iterator[_Part]:
        """What is left of a part without the solution that was found in it, in disjoint parts."""
        rest = dict(part)
        for node, own in part.items():
            same = self.labels[node][own] == self.labels[node][found.choice[node]]
            if not same.all():
                yield {**rest, node: own[~same]}
            rest[node] = own[same]

    def solve(self, part: _Part) -> Solution | None:
        """The cheapest choice of a part; None if nothing is allowed there."""
        if any(not len(own) for own in part.values()):
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
