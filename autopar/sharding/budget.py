"""Sharding within a memory budget: from a `ShardingProblem` and bytes to a choice that fits.

    minimise    cost(x)   subject to   bytes_t(x) ≤ budget   at every time t of the step

bytes_t is linear in the variables of the integer programme: a node's strategy gives the size of its
results, a pair of strategies that of the copy between them (`Holdings.row`). Two things keep the
programme small. A time becomes a *row* only when a solution breaks it: of thousands, a handful bind
(`_BudgetSearch.add_rows`). And rows never reach the exact reductions, which cannot handle side
constraints:

1. Lagrangian: for prices λ_t ≥ 0 per byte, min cost(x) + Σ λ_t (bytes_t(x) − budget) is an
   unconstrained problem, solved as usual, and a lower bound on the optimum. Prices rise until a
   solution fits, then Kelley's cutting planes search for the best bound
   (`_BudgetSearch.next_prices`).
2. Repair: two solutions, one that fits and one that is cheaper, differ in groups of nodes that are
   no neighbours of each other, so each group can be exchanged by itself, and what it costs and
   saves adds up. Which groups to exchange is a small knapsack (`combine.combined`). A single price
   cannot choose if many nodes offer the same trade.
3. Restricted programme, if the gap is still large: the strategies that any of these solutions used,
   a few per node, with the rows as constraints, solved exactly (`_BudgetSearch.mix`). Nodes that no
   row depends on are reduced first.

What was tried is kept with the problem (`ShardingProblem.tried`): the stages of a pipeline often
have equal problems and differ in how many micro-batches they hold.

The gap between 1 and the best of 2 and 3 is reported. If no solution fits, the rows alone are
minimised, and the choice with the smallest peak is returned for the error to explain
(`BudgetResult.smallest`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import highspy
import numpy as np

from autopar.sharding.combine import combined
from autopar.sharding.contract import solve_contracted
from autopar.sharding.ilp import solve_with_limits
from autopar.sharding.limit import Limit
from autopar.sharding.memory_limits import Holdings
from autopar.sharding.problem import ShardingProblem
from autopar.sharding.reduce import PairwiseProblem, reduce_problem, restrict

Choice = dict[int, int]  # class -> strategy index
Solve = Callable[[PairwiseProblem], tuple[Choice, float]]  # (choice, lower bound)

_MAX_ESCALATIONS = 9
_ESCALATION = 6.0
_MOST_LATE = 3  # escalations, in large steps, once time is up
_FIRST_PRICE = 0.1  # relative to the price at which the excess costs as much as the step
_MAX_CUTS = 5
_MAX_MIXES = 4
_MIX_TIME_S = 10.0
_SOLVE_GAP = 1e-3  # of a solve at a price; its bound holds all the same
_MAX_COMBINED = 4  # solutions that do not fit, to be combined with the best
_MAX_CARRIED = 6  # choices kept for the next search
GOOD_GAP = 0.005  # good enough to stop
_MAX_ROWS_AT_ONCE = 2


@dataclass(frozen=True)
class Enough:
    """A solution that costs no more than `cost`, and is proven to within `gap`, needs no better."""

    cost: float
    gap: float


def is_good(cost: float, gap: float, enough: Enough | None) -> bool:
    """Whether a solution needs no better one."""
    is_enough = enough is not None and cost <= enough.cost and gap <= enough.gap
    return is_enough or gap <= GOOD_GAP


@dataclass(frozen=True)
class BudgetResult:
    choice: Choice | None  # None if nothing fits
    objective: float
    lower_bound: float
    peak_bytes: float  # of the choice, or the smallest found
    num_rows: int
    num_solves: int
    smallest: Choice  # the choice with the smallest peak seen
    price: float  # per byte, at which the bound was best; 0 if none was needed


def solve_within_budget(
    problem: ShardingProblem,
    budget_bytes: float,
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    first: tuple[Choice, float] | None = None,
    cutoff: float = np.inf,
    first_price: float = 0.0,
    enough: Enough | None = None,
) -> BudgetResult:
    """The cheapest choice found whose bytes stay within the budget at every time. `first`: the
    solution without a budget and its lower bound, if known. `cutoff`: the search ends early once
    nothing can cost less. `first_price`: a guess, from a similar problem. `enough`: a solution that
    ends the search."""
    deadline = time.monotonic() + time_limit_s

    def solve(pairwise: PairwiseProblem) -> tuple[Choice, float]:
        reduction = reduce_problem(pairwise)
        left = max(deadline - time.monotonic(), 1.0)
        result = solve_contracted(
            reduction.problem, solver=solver, time_limit_s=left, gap=_SOLVE_GAP
        )
        return reduction.restore(result.choice), result.lower_bound

    search = _BudgetSearch(problem, budget_bytes, solve, deadline, cutoff, first_price, enough)
    return search.run(first)


@dataclass
class _BudgetSearch:
    problem: ShardingProblem
    budget: float
    solve: Solve
    deadline: float
    cutoff: float = np.inf
    price: float = 0.0
    enough: Enough | None = None
    seen: list[Choice] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    rows: dict[int, Limit] = field(default_factory=dict)
    bound: float = -np.inf
    best: int | None = None  # the cheapest of `seen` that fits
    smallest: int = 0
    peaks: list[float] = field(default_factory=list)
    num_solves: int = 0

    def __post_init__(self) -> None:
        self.holdings = Holdings(self.problem, self.budget)

    def run(self, first: tuple[Choice, float] | None) -> BudgetResult:
        if first is None:
            first = self.solve(self.problem.pairwise.copy())
            self.num_solves += 1
        self.add(first[0])
        self.bound = first[1]
        for choice in self.problem.tried.choices:
            if choice not in self.seen:
                self.add(choice)
        self.price = self.price or self.problem.tried.price
        if self.best is None:
            self.escalate()
        floor = max((row.floor() for row in self.rows.values()), default=0.0)
        if (
            self.best is None
            and not self.is_over()
            and self.peaks[self.smallest] > (1 + GOOD_GAP) * floor
        ):
            self.mix(minimise_peak=True)
        if self.best is not None:
            self.refine()
        self.carry()
        chosen = self.best
        return BudgetResult(
            choice=None if chosen is None else self.seen[chosen],
            objective=np.inf if chosen is None else self.costs[chosen],
            lower_bound=self.bound if chosen is None else min(self.bound, self.costs[chosen]),
            peak_bytes=self.peaks[self.smallest if chosen is None else chosen],
            num_rows=len(self.rows),
            num_solves=self.num_solves,
            smallest=self.seen[self.smallest],
            price=self.price,
        )

    def carry(self) -> None:
        """Keeps the best choices for the next search of the same problem: those that no other
        beats in both cost and peak, the cheapest first."""
        order = sorted(range(len(self.seen)), key=lambda i: (self.costs[i], self.peaks[i]))
        kept: list[int] = []
        for i in order:
            if not kept or self.peaks[i] < self.peaks[kept[-1]]:
                kept.append(i)
        near = self.smallest if self.best is None else self.best
        kept = sorted(kept, key=lambda i: abs(self.peaks[i] - self.peaks[near]))[:_MAX_CARRIED]
        self.problem.tried.choices = [self.seen[i] for i in sorted(kept)]
        self.problem.tried.price = self.price

    # -- solutions

    def add(self, choice: Choice) -> bool:
        """Record a solution; returns whether it fits. The times at which it does not become
        rows."""
        bytes_at = self.holdings.bytes_at(choice)
        self.seen.append(choice)
        self.costs.append(self.problem.pairwise.objective(choice))
        self.peaks.append(float(bytes_at.max(initial=0.0)))
        index = len(self.seen) - 1
        if self.peaks[index] < self.peaks[self.smallest]:
            self.smallest = index
        if self.peaks[index] <= self.budget:
            if self.best is None or self.costs[index] < self.costs[self.best]:
                self.best = index
            return True
        self.add_rows(bytes_at)
        return False

    def add_rows(self, bytes_at: np.ndarray) -> None:
        """Adds the worst times that are not rows yet, far enough apart to matter."""
        over = bytes_at.copy()
        for _ in range(_MAX_ROWS_AT_ONCE):
            at = int(np.argmax(over))
            if over[at] <= self.budget:
                break
            if at not in self.rows:
                self.rows[at] = self.holdings.row(at)
            margin = max(8, self.holdings.num_times // 16)
            over[max(0, at - margin) : at + margin] = 0.0

    def solve_at(self, prices: Mapping[int, float]) -> bool:
        """Solve with a price per byte at each row; returns whether the solution fits."""
        penalised = self.problem.pairwise.copy()
        for at, price in prices.items():
            if price > 0:
                self.rows[at].add_to(penalised, price)
        choice, lower = self.solve(penalised)
        self.num_solves += 1
        bound = lower - sum(prices.values()) * self.budget
        if bound > self.bound:
            self.bound, self.price = bound, sum(prices.values())
        return self.add(choice)

    def escalate(self) -> None:
        """Raise prices until something fits, or nothing changes any more. When time is up, they
        rise in large steps: what does not fit at a low price is not known not to fit. With another
        solution at hand, that ends the search."""
        excess = max(self.peaks[0] - self.budget, 1.0)
        first = _FIRST_PRICE * max(self.costs[0], 1e-30) / excess
        price = self.price or first
        num_late = 0
        for _ in range(_MAX_ESCALATIONS):
            if num_late > _MOST_LATE:
                return
            over = self.broken_rows()
            before = len(self.rows)
            if any(self.rows[at].floor() > self.budget for at in over):
                # Nothing fits, proven. Find out by how much, and stop.
                self.solve_at(dict.fromkeys(over, price * _ESCALATION**6 / len(over)))
                return
            if self.solve_at(dict.fromkeys(over, price / len(over))) or self.bound >= self.cutoff:
                return
            repeated = self.seen[-1] in self.seen[:-1] and len(self.rows) == before
            if self.is_over():
                if self.cutoff < np.inf:
                    return
                num_late += 1
                price = max(price, first) * _ESCALATION**3
            else:
                price *= _ESCALATION**2 if repeated else _ESCALATION

    def broken_rows(self) -> list[int]:
        """The rows that some recent solution broke."""
        recent = self.seen[-3:]
        return [
            at for at, row in self.rows.items() if any(row.value(c) > self.budget for c in recent)
        ] or list(self.rows)

    # -- the best prices, the best mixture

    def refine(self) -> None:
        if not self.rows:
            return
        self.combine()  # milliseconds, and often all that is needed
        for _ in range(_MAX_CUTS):
            if self.is_over() or self.is_good():
                return
            prices, promise = self.next_prices()
            if promise <= self.bound * (1 + 1e-6) or not any(prices.values()):
                break
            self.solve_at(prices)
            self.combine()
        if not self.is_over() and not self.is_good():
            self.mix()

    def combine(self) -> None:
        """Exchange parts of the best solution for those of cheaper ones that do not fit."""
        assert self.best is not None
        misfits = [i for i, peak in enumerate(self.peaks) if peak > self.budget]
        for i in misfits[::-1][:_MAX_COMBINED]:
            for _ in range(_MAX_MIXES):
                if self.costs[i] >= self.costs[self.best]:
                    break
                best, rows = self.seen[self.best], list(self.rows.values())
                choice = combined(self.problem.pairwise, rows, self.budget, best, self.seen[i])
                if choice == best or self.add(choice) or len(self.rows) == len(rows):
                    break

    def is_over(self) -> bool:
        """Whether time is up, or nothing below the cutoff can be found."""
        return time.monotonic() > self.deadline or self.bound >= self.cutoff

    def is_good(self) -> bool:
        """Whether the best solution needs no better one."""
        assert self.best is not None
        return is_good(self.costs[self.best], self.gap(), self.enough)

    def gap(self) -> float:
        assert self.best is not None
        cost = self.costs[self.best]
        return max(0.0, (cost - self.bound) / max(cost, 1e-30))

    def next_prices(self) -> tuple[dict[int, float], float]:
        """Kelley's step: the prices with the best bound over the solutions seen so far, and that
        bound: max θ with θ ≤ cost_i + Σ λ_t (bytes_t(x_i) − budget)."""
        times = list(self.rows)
        unit = max(self.costs) / self.budget  # prices of about 1
        table = np.array([[self.rows[t].value(c) for t in times] for c in self.seen])
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        for _ in times:
            highs.addVar(0.0, 1e6)
        highs.addVar(-highspy.kHighsInf, highspy.kHighsInf)
        columns = np.arange(len(times) + 1, dtype=np.int32)
        scale = max(self.costs)
        for cost, held in zip(self.costs, table, strict=True):
            slope = (held - self.budget) * unit / scale
            values = np.concatenate((-slope, [1.0]))
            highs.addRow(-highspy.kHighsInf, cost / scale, len(columns), columns, values)
        highs.changeColCost(len(times), -1.0)
        highs.run()
        solution = highs.getSolution().col_value
        prices = {t: float(x) * unit for t, x in zip(times, solution, strict=False)}
        return prices, float(solution[len(times)]) * scale

    def mix(self, *, minimise_peak: bool = False) -> None:
        """Solve exactly over the strategies that the solutions so far use."""
        for _ in range(_MAX_MIXES):
            if time.monotonic() > self.deadline:
                return
            kept = {
                u: np.array(sorted({c[u] for c in self.seen})) for u in self.problem.pairwise.costs
            }
            restricted = restrict(self.problem.pairwise, kept)
            limits = [row.restrict(kept) for row in self.rows.values()]
            left = max(self.deadline - time.monotonic(), 1.0)
            solution = solve_with_limits(
                restricted,
                limits,
                None if minimise_peak else self.budget,
                time_limit_s=min(left, _MIX_TIME_S),
            )
            if solution is None:
                return
            choice = {u: int(kept[u][s]) for u, s in solution.items()}
            known = choice in self.seen
            rows = len(self.rows)
            if self.add(choice) or known or len(self.rows) == rows:
                return
