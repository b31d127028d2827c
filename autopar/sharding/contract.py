"""Contraction of a reduced problem: from a `PairwiseProblem` to an `IlpResult`.

The optimum is that of `ilp.solve_ilp`, mostly result without a solver. Inside a parallel block most
ops follow their neighbours, yet blocks cannot be the nodes of the integer programme: an op may be
resharded inside a block wherever that pays (state stored split and gathered in bfloat16, scattered
sums). The best plan in which all ops follow their entry is 0.1 % to 40 % above the optimum
(`benchmarks/blocks.py`), and cost tables alone prove of only some 2 % of ops that they follow. A
bound proves it of most. Each round consists of

1. message passing (`descent`): costs move between tables until the sum of smallest entries, a lower
   bound B, is large. The cost of a strategy above the smallest entries around it, its *excess*, is
   then a bound too: no choice with it costs less than B + excess;
2. a choice, if none is near B yet: the best over strategies of small excess, a problem small enough
   to solve at once. The best choice so far costs U;
3. contraction: strategies whose excess is above U − B are in no better choice and are dropped. Ops
   with one strategy left follow; the others are reduced as usual (`reduce`), on the moved costs.

Rounds end when nothing is left or little changes. The integer programme solves the rest.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.errors import SolverError
from autopar.sharding.descent import Moved, along_edges, settled
from autopar.sharding.ilp import IlpResult, check_feasible, size_of, solve_ilp
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, Reduction, reduce_problem, restrict

SMALL = 30_000  # edge entries up to which a solver is as fast
_MAX_ROUNDS = 6
_PASSES = 5  # forward and backward, between checks
_EARLY_CHECKS = (1, 3)  # after so many passes, where a gap is allowed
_FIRST_PASSES = 2  # times as many in the first round
_ROUNDING = 1e-9  # relative to the objective: smaller differences are ignored
_MAX_TRY_ENTRIES = 40_000  # edge entries of the problem in which a choice is searched
_TRY_EXCESS = (0.01, 0.003, 0.001, 0.0003)  # allowed there, relative to the bound
_TRY_GAP = 0.25  # of that choice, relative to the gap that is allowed
_WORTHWHILE = 0.7  # a round that leaves a larger share of the edge entries is the last

Choice = dict[int, int]


@dataclass(frozen=True)
class _Level:
    """The step from a problem to the next: a restriction of strategies, then a reduction."""

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
    small: int = SMALL,
    rest_gap: float = 0.0,
    cutoff: float = np.inf,
) -> IlpResult:
    """Solve a reduced problem. A solver other than HiGHS gets all of it, and so does HiGHS if it
    has at most `small` edge entries. Where contraction ends with a gap of at most `rest_gap`, the
    rest is not solved. Once nothing can cost less than the cutoff, any choice will do."""
    if solver != "highs" or problem.num_edge_entries <= small:
        return solve_ilp(problem, solver=solver, time_limit_s=time_limit_s, gap=gap, cutoff=cutoff)
    search = _ContractSearch(problem, time.monotonic() + time_limit_s, cutoff)
    rest = search.contract(gap, small)
    sizes = size_of(problem)
    if rest is None or search.is_proven(max(gap, rest_gap)):
        best = search.best
        check_feasible(best)
        return IlpResult(search.choice, best, min(search.bound, best), *sizes, True)
    left = max(search.deadline - time.monotonic(), 0.01)
    result = solve_ilp(
        rest, solver=solver, time_limit_s=left, gap=gap, is_tried=True, cutoff=cutoff
    )
    search.take(result.choice)
    check_feasible(search.best)
    lower = min(max(result.lower_bound, search.bound), search.best)
    if search.best - lower <= _ROUNDING * abs(search.best):
        lower = search.best
    return IlpResult(search.choice, search.best, lower, *sizes, result.relaxation_integral)


class _ContractSearch:
    def __init__(self, problem: PairwiseProblem, deadline: float, cutoff: float = np.inf) -> None:
        self.problem = problem
        self.deadline, self.cutoff = deadline, cutoff
        self.levels: list[_Level] = []
        self.choice: Choice = {}
        self.best = np.inf
        self.bound = -np.inf

    def contract(self, gap: float, small: int) -> PairwiseProblem | None:
        """The problem left for a solver; None if the best choice is proven."""
        current = self.problem
        for number in range(_MAX_ROUNDS):
            moved = Moved(current, along_edges(current))
            for _ in range(1 if number else _FIRST_PASSES):
                self.pass_on(moved, current, gap)
                if self.is_proven(gap):
                    return None
                if time.monotonic() > self.deadline:
                    return current
            current = moved.problem(current)
            excess = _excess(current)
            if self.best - self.bound > _TRY_EXCESS[0] * abs(self.bound):
                self.try_small(current, excess, gap)
                if self.is_proven(gap):
                    return None
            room = self.best - self.bound
            entries = current.num_edge_entries
            if any(e.min() > room + _ROUNDING * abs(self.best) for e in excess.values()):
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

    def pass_on(self, moved: Moved, current: PairwiseProblem, gap: float) -> None:
        """Passes, and what they tell; fewer of them if a gap is allowed that is soon reached."""
        for number in range(1, _PASSES + 1):
            moved.pass_forward_and_back()
            if number == _PASSES or (gap and number in _EARLY_CHECKS):
                self.bound = max(self.bound, moved.lower_bound())
                self.take(settled(current, moved.greedy_choice()))
                if self.is_proven(gap):
                    return

    def is_proven(self, gap: float) -> bool:
        if self.best >= FORBIDDEN / 2:
            return False
        if self.bound >= self.cutoff:
            return True
        if self.best - self.bound > max(gap, _ROUNDING) * abs(self.best):
            return False
        if self.best - self.bound <= _ROUNDING * abs(self.best):
            self.bound = self.best
        return True

    def take(self, choice: Choice) -> None:
        """Record a choice of the current problem if it is the best so far."""
        for level in reversed(self.levels):
            choice = level.restore(choice)
        cost = self.problem.objective(choice)
        if cost < self.best:
            self.choice, self.best = choice, cost

    def restricted(
        self, problem: PairwiseProblem, excess: dict[int, np.ndarray], room: float
    ) -> PairwiseProblem:
        max_excess = room + _ROUNDING * abs(self.best)
        kept = {u: np.flatnonzero(e <= max_excess) for u, e in excess.items()}
        level = _Level(kept, reduce_problem(restrict(problem, kept)))
        self.levels.append(level)
        return level.reduction.problem

    def try_small(
        self, problem: PairwiseProblem, excess: dict[int, np.ndarray], gap: float
    ) -> None:
        """Record the best choice over strategies of small excess, or one that is nearly so where
        a gap is allowed."""
        for share in _TRY_EXCESS:
            max_excess = share * abs(self.bound)
            kept = {u: np.flatnonzero(e <= max(max_excess, e.min())) for u, e in excess.items()}
            small = restrict(problem, kept)
            if small.num_edge_entries <= _MAX_TRY_ENTRIES:
                break
        else:
            return
        level = _Level(kept, reduce_problem(small))
        left = max(self.deadline - time.monotonic(), 1.0)
        try:
            result = solve_ilp(
                level.reduction.problem, time_limit_s=min(left, 10.0), gap=_TRY_GAP * gap
            )
        except SolverError:  # no combination of these is allowed
            return
        self.take(level.restore(result.choice))


def _excess(problem: PairwiseProblem) -> dict[int, np.ndarray]:
    """Per strategy, the cost of the tables around it above their smallest entries."""
    excess = {}
    for u, cost in problem.costs.items():
        total = cost - cost.min()
        for matrix in problem.edges.get(u, {}).values():
            row_min = matrix.min(axis=1)
            total = total + row_min - row_min.min()
        excess[u] = total
    return excess
