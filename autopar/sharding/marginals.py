"""Min-marginals: from a `ShardingProblem` and classes to the best sharding for each layout.

For a layout L of the values that classes u ∈ U make: minimise the objective over all choices in
which every u ∈ U takes a strategy that gives L. One reduction that spares U serves all layouts; the
reduced problem is restricted to L, reduced further, and solved exactly. Without a memory budget,
the result equals that of solving with the values pinned to L.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import SolverError
from autopar.ir.spec import Layout, is_partial
from autopar.progress import Progress
from autopar.sharding.ilp import RestrictedIlp, floor_of, solve_ilp
from autopar.sharding.problem import ShardingProblem
from autopar.sharding.reduce import Reduction, reduce_problem, restrict
from autopar.sharding.solve import DoesNotFit, GraphSharding, SolveStats, fit_into_memory

Places = Mapping[int, int]  # class -> the position of the value among its results


@dataclass(frozen=True, eq=False)
class Marginal:
    """The best sharding with one layout. If it is None, it was not solved, or there is none
    (`lower_bound` is infinite).

    fits: whether it stays within the memory budget; True without a budget.
    """

    layout: Layout
    sharding: GraphSharding | None
    lower_bound: float
    fits: bool = True


def layouts_of(problem: ShardingProblem, places: Places) -> list[Layout]:
    """The layouts that the values of all classes can have, without partial ones."""
    common: list[Layout] | None = None
    for owner, result in places.items():
        layouts = dict.fromkeys(s.results[result] for s in problem.strategies[owner])
        common = list(layouts) if common is None else [x for x in common if x in layouts]
    return [layout for layout in common or () if not is_partial(layout)]


def min_marginals(
    problem: ShardingProblem,
    places: Places,
    *,
    always: Iterable[Layout] = (),
    known: Mapping[Layout, GraphSharding] | None = None,
    max_solved: int = 12,
    budget_bytes: float | None = None,
    first_price: float = 0.0,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    budget_time_s: float = 10.0,
) -> list[Marginal]:
    """The best sharding for every layout, cheapest first, unsolved ones last.

    max_solved:    of more layouts, only those with the lowest bounds are solved.
    always:        layouts that are solved in any case.
    known:         the best shardings of layouts that need no solving.
    time_limit_s:  for one solve.
    budget_time_s: for all solves under a memory budget together, in equal shares; a layout that
                   does not fit by then has a bound but no sharding.
    """
    reduction = reduce_problem(problem.pairwise.copy(), spared=places)
    tries = [_restricted(problem, reduction, places, x) for x in layouts_of(problem, places)]
    wanted = set(always)
    tries.sort(key=lambda attempt: (attempt.layout not in wanted, attempt.bound))
    shared = None
    if solver == "highs" and any(map(len, reduction.problem.edges.values())):
        shared = RestrictedIlp(reduction.problem, time_limit_s)
    deadline = time.monotonic() + budget_time_s
    marginals = []
    with Progress("layouts", len(tries)) as progress:
        for number, attempt in enumerate(tries):
            layout = attempt.layout
            progress.step()
            best = (known or {}).get(layout)
            if best is not None:
                marginals.append(Marginal(layout, best, best.lower_bound))
                continue
            if number >= max_solved:
                marginals.append(Marginal(layout, None, attempt.bound))
                continue
            sharding = _solved(problem, reduction, attempt, shared, solver, time_limit_s)
            if sharding is None:
                marginals.append(Marginal(layout, None, np.inf))
                continue
            left = (deadline - time.monotonic()) / (min(max_solved, len(tries)) - number)
            marginals.append(_within(sharding, layout, budget_bytes, first_price, solver, left))
    return sorted(marginals, key=lambda marginal: (marginal.sharding is None, _cost(marginal)))


def _cost(marginal: Marginal) -> float:
    return marginal.lower_bound if marginal.sharding is None else marginal.sharding.objective


@dataclass(frozen=True, eq=False)
class _Try:
    """`allowed`: class -> its strategies that give the layout."""

    layout: Layout
    allowed: Mapping[int, np.ndarray]
    bound: float


def _restricted(problem: ShardingProblem, first: Reduction, places: Places, layout: Layout) -> _Try:
    allowed = {
        u: np.array([i for i, s in enumerate(problem.strategies[u]) if s.results[r] == layout])
        for u, r in places.items()
    }
    costs = first.problem.costs
    extra = sum(float(costs[u][kept].min() - costs[u].min()) for u, kept in allowed.items())
    return _Try(layout, allowed, floor_of(first.problem) + extra)


def _solved(
    problem: ShardingProblem,
    first: Reduction,
    attempt: _Try,
    shared: RestrictedIlp | None,
    solver: str,
    time_limit_s: float,
) -> GraphSharding | None:
    """The best sharding with the layout, in the restricted problem; None if there is none."""
    result = None if shared is None else shared.solve(attempt.allowed)
    if result is not None:
        core = result.choice
    else:
        kept = {
            u: attempt.allowed.get(u, np.arange(len(costs)))
            for u, costs in first.problem.costs.items()
        }
        second = reduce_problem(restrict(first.problem, kept))
        try:
            result = solve_ilp(second.problem, solver=solver, time_limit_s=time_limit_s)
        except SolverError:
            return None
        core = {u: int(kept[u][s]) for u, s in second.restore(result.choice).items()}
    choice = first.restore(core)
    for u, strategies in attempt.allowed.items():
        choice[u] = int(np.flatnonzero(strategies == choice[u])[0])
    restricted = _only(problem, attempt.allowed)
    objective = restricted.pairwise.objective(choice)
    stats = SolveStats(
        num_nodes=len(problem.graph.nodes),
        num_classes=len(problem.strategies),
        num_strategies=sum(map(len, restricted.strategies.values())),
        num_core_nodes=len(first.problem.costs),
        num_variables=result.num_variables,
        num_constraints=result.num_constraints,
        relaxation_integral=result.relaxation_integral,
    )
    lower = objective - (result.objective - result.lower_bound)
    return GraphSharding(restricted, choice, objective, lower, stats)


def _only(problem: ShardingProblem, allowed: Mapping[int, np.ndarray]) -> ShardingProblem:
    """The problem with only the allowed strategies of some classes."""
    strategies = dict(problem.strategies)
    pairwise = problem.pairwise.copy()
    for u, kept in allowed.items():
        strategies[u] = [problem.strategies[u][i] for i in kept]
        pairwise.costs[u] = pairwise.costs[u][kept]
        for v, matrix in list(pairwise.edges.get(u, {}).items()):
            part = matrix[kept]
            pairwise.edges[u][v] = part
            pairwise.edges[v][u] = part.T
    return replace(problem, strategies=strategies, pairwise=pairwise)


def _within(
    sharding: GraphSharding,
    layout: Layout,
    budget_bytes: float | None,
    first_price: float,
    solver: str,
    time_left_s: float,
) -> Marginal:
    if budget_bytes is None:
        return Marginal(layout, sharding, sharding.lower_bound)
    if time_left_s <= 0:
        sharding = min((sharding, replace(sharding, refetch=True)), key=_peak)
        if _peak(sharding) <= budget_bytes:
            return Marginal(layout, sharding, sharding.lower_bound)
        return Marginal(layout, None, sharding.lower_bound)
    deadline = time.monotonic() + time_left_s
    try:
        fitting = fit_into_memory(
            sharding,
            budget_bytes,
            solver=solver,
            time_limit_s=time_left_s,
            first_price=first_price,
        )
    except DoesNotFit as miss:
        if time.monotonic() > deadline:  # running out of time proves nothing
            return Marginal(layout, None, sharding.lower_bound)
        return Marginal(layout, miss.smallest, sharding.lower_bound, fits=False)
    return Marginal(layout, fitting, fitting.lower_bound)


def _peak(sharding: GraphSharding) -> float:
    return sharding.memory.peak_bytes
