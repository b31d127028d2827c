"""What reductions leave of a problem, contracted further before a solver sees it.

    PairwiseProblem → IlpResult, the same optimum as `ilp.solve_ilp` gives, mostly without a solver

Inside a parallel block most ops follow their neighbours, yet blocks cannot be the nodes of the
integer programme: an op may be resharded inside a block wherever that pays (state kept split and
gathered in bfloat16, sums that are scattered). The best plan in which all ops follow their entry is
0.1 % to 40 % above the optimum (`benchmarks/blocks.py`), and cost tables alone prove of some 2 % of
ops that they follow. A bound proves it of most. Rounds of

1. message passing (`descent`): costs are moved between tables until the sum of smallest entries, a
   lower bound B, is large. What a strategy costs more than the smallest entries around it, its
   *excess*, is then a bound too: no choice with it is below B + excess;
2. a choice, if none is near B yet: the best over strategies of small excess, a problem small
   enough to solve at once. The best choice so far costs U;
3. contraction: strategies whose excess is above U − B are in no better choice and go. Ops that have
   one left follow; the others are reduced as ever (`reduce`), on the costs as they were moved.

end when nothing is left or little changes. What is left then is the integer programme's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.errors import SolverError
from autopar.sharding.descent import Moved, along_edges, settled
from autopar.sharding.ilp import IlpResult, check_feasible, size_of, solve_ilp
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, Reduction, reduce_problem, restrict

_SMALL = 30_000  # entries of edges up to which a solver is as fast
_MAX_ROUNDS = 6
_PASSES = 5  # there and back, before it is looked whether that was enough
_FIRST_PASSES = 2  # times as many in the first round
_ROUNDING = 1e-9  # of the objective: what is nearer to it is not told apart
_TRIED = 40_000  # entries of edges of the problem that a choice is looked for in
_TRIED_SHARES = (0.01, 0.003, 0.001, 0.0003)  # of the bound: the excess allowed there
_WORTHWHILE = 0.7  # a round that leaves more of the entries of edges is the last

Choice = dict[int, int]


@dataclass(frozen=True)
class _Level:
    """From a problem to the next: strategies that were kept, then a reduction."""

    kept: dict[int, np.ndarray]
    reduction: Reduction

    def restore(self, choice: Choice) -> Choice:
        return {u: int(self.kept[u][s]) for u, s in self.reduction.restore(choice).items()}


def solve_contracted(
    problem: PairwiseProblem,
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    small: int = _SMALL,
) -> IlpResult:
    """Solve what the reductions left. Another solver than HiGHS gets all of it, and so does HiGHS
    of a problem with no more than `small` entries of edges."""
    if solver != "highs" or problem.num_edge_entries <= small:
        return solve_ilp(problem, solver=solver, time_limit_s=time_limit_s, gap=gap)
    search = _ContractSearch(problem, time.monotonic() + time_limit_s)
    rest = search.contract(gap, small)
    sizes = size_of(problem)
    if rest is None:
        best = search.best
        check_feasible(best)
        return IlpResult(search.choice, best, min(search.bound, best), *sizes, True)
    left = max(search.deadline - time.monotonic(), 0.01)
    found = solve_ilp(rest, solver=solver, time_limit_s=left, gap=gap, is_tried=True)
    search.take(found.choice)
    check_feasible(search.best)
    lower = min(max(found.lower_bound, search.bound), search.best)
    if search.best - lower <= _ROUNDING * abs(search.best):
        lower = search.best
    return IlpResult(search.choice, search.best, lower, *sizes, found.relaxation_integral)


class _ContractSearch:
    def __init__(self, problem: PairwiseProblem, deadline: float) -> None:
        self.problem = problem
        self.deadline = deadline
        self.levels: list[_Level] = []
        self.choice: Choice = {}
        self.best = np.inf
        self.bound = -np.inf

    def contract(self, gap: float, small: int) -> PairwiseProblem | None:
        """What is left for a solver; None if the best choice is proven."""
        current = self.problem
        for number in range(_MAX_ROUNDS):
            moved = Moved(current, along_edges(current))
            for _ in range(1 if number else _FIRST_PASSES):
                self.pass_on(moved, current)
                if self.is_proven(gap):
                    return None
                if time.monotonic() > self.deadline:
                    return current
            current = moved.problem(current)
            excess = _excess(current)
            if self.best - self.bound > _TRIED_SHARES[0] * abs(self.bound):
                self.try_small(current, excess)
                if self.is_proven(gap):
                    return None
            room = self.best - self.bound
            entries = current.num_edge_entries
            if any(own.min() > room + _ROUNDING * abs(self.best) for own in excess.values()):
                self.bound = self.best  # nothing is better
                return None
            current = self.restricted(current, excess, room)
            if not current.costs:
                self.take({})
                self.bound = self.best
                return None
            is_slow = current.num_edge_entries > _WORTHWHILE * entries
            is_small = current.num_edge_entries <= small
            if is_slow or is_small or time.monotonic() > self.deadline:
                break
        return current

    def pass_on(self, moved: Moved, current: PairwiseProblem) -> None:
        for _ in range(_PASSES):
            moved.pass_on(moved.order)
            moved.pass_on(moved.order[::-1])
        self.bound = max(self.bound, moved.lower_bound())
        self.take(settled(current, moved.greedy_choice()))

    def is_proven(self, gap: float) -> bool:
        if self.best >= FORBIDDEN / 2:
            return False
        if self.best - self.bound > max(gap, _ROUNDING) * abs(self.best):
            return False
        if self.best - self.bound <= _ROUNDING * abs(self.best):
            self.bound = self.best
        return True

    def take(self, choice: Choice) -> None:
        """A choice of the problem as it is now; kept if none is better."""
        for level in reversed(self.levels):
            choice = level.restore(choice)
        cost = self.problem.objective(choice)
        if cost < self.best:
            self.choice, self.best = choice, cost

    def restricted(
        self, problem: PairwiseProblem, excess: dict[int, np.ndarray], room: float
    ) -> PairwiseProblem:
        most = room + _ROUNDING * abs(self.best)
        kept = {u: np.flatnonzero(own <= most) for u, own in excess.items()}
        level = _Level(kept, reduce_problem(restrict(problem, kept)))
        self.levels.append(level)
        return level.reduction.problem

    def try_small(self, problem: PairwiseProblem, excess: dict[int, np.ndarray]) -> None:
        """The best choice over strategies of small excess."""
        for share in _TRIED_SHARES:
            most = share * abs(self.bound)
            kept = {u: np.flatnonzero(own <= max(most, own.min())) for u, own in excess.items()}
            small = restrict(problem, kept)
            if small.num_edge_entries <= _TRIED:
                break
        else:
            return
        level = _Level(kept, reduce_problem(small))
        left = max(self.deadline - time.monotonic(), 1.0)
        try:
            found = solve_ilp(level.reduction.problem, time_limit_s=min(left, 10.0))
        except SolverError:  # none of these go together
            return
        self.take(level.restore(found.choice))


def _excess(problem: PairwiseProblem) -> dict[int, np.ndarray]:
    """Per strategy, what the tables around it cost more than their smallest entries."""
    found = {}
    for u, cost in problem.costs.items():
        total = cost - cost.min()
        for matrix in problem.edges.get(u, {}).values():
            least = matrix.min(axis=1)
            total = total + least - least.min()
        found[u] = total
    return found
