"""What the best sharding costs if values must lie in one layout or another: min-marginals.

    ShardingProblem, classes → for every layout they can all have, the best `GraphSharding` with it

For a layout L of the values that classes u ∈ U make: minimise the objective over all choices in
which every u ∈ U takes a strategy that gives L. One reduction that spares U serves all layouts;
what it leaves is restricted to L, reduced on, and solved exactly. Without a memory budget, that is
what solving anew with the values pinned to L gives.
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
    """The best sharding with one layout. Without one, `lower_bound` is all that is known: it was
    not solved; or, if infinite, there is none.

    fits: whether it stays within the memory budget; True if there is none.
    """

    layout: Layout
    sharding: GraphSharding | None
    lower_bound: float
    fits: bool = True


def layouts_of(problem: ShardingProblem, places: Places) -> list[Layout]:
    """The layouts that the values of all classes can have, partial ones left out."""
    found: list[Layout] | None = None
    for owner, result in places.items():
        own = dict.fromkeys(s.results[result] for s in problem.strategies[owner])
        found = list(own) if found is None else [layout for layout in found if layout in own]
    return [layout for layout in found or () if not is_partial(layout)]


def min_marginals(
    problem: ShardingProblem,
    places: Places,
    *,
    always: Iterable[Layout] = (),
    known: Mapping[Layout, GraphSharding] | None = None,
    most: int = 12,
    budget_bytes: float | None = None,
    first_price: float = 0.0,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    budget_time_s: float = 10.0,
) -> list[Marginal]:
    """The best sharding for every layout, the cheapest first, what is not solved last. Of more
    layouts than `most`, those with the lowest bounds are solved, and those that are `always`
    wanted; `known` are the best ones of layouts that need no solving. `time_limit_s` is for one
    solve, `budget_time_s` for all those together that a budget makes necessary, in equal shares:
    what has not been made to fit by then is told without a sharding, with its bound."""
    reduction = reduce_problem(problem.pairwise.copy(), spared=places)
    tries = [_restricted(problem, reduction, places, x) for x in layouts_of(problem, places)]
    wanted = set(always)
    tries.sort(key=lambda one: (one.layout not in wanted, one.bound))
    shared = None
    if solver == "highs" and any(map(len, reduction.problem.edges.values())):
        shared = RestrictedIlp(reduction.problem, time_limit_s)
    deadline = time.monotonic() + budget_time_s
    found = []
    with Progress("layouts", len(tries)) as progress:
        for number, one in enumerate(tries):
            progress.step()
            own = (known or {}).get(one.layout)
            if own is not None:
                found.append(Marginal(one.layout, own, own.lower_bound))
                continue
            if number >= most:
                found.append(Marginal(one.layout, None, one.bound))
                continue
            sharding = _solved(problem, reduction, one, shared, solver, time_limit_s)
            if sharding is None:
                found.append(Marginal(one.layout, None, np.inf))
                continue
            left = (deadline - time.monotonic()) / (min(most, len(tries)) - number)
            found.append(_within(sharding, one.layout, budget_bytes, first_price, solver, left))
    return sorted(found, key=lambda one: (one.sharding is None, _cost(one)))


def _cost(one: Marginal) -> float:
    return one.lower_bound if one.sharding is None else one.sharding.objective


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
    more = sum(float(costs[u][own].min() - costs[u].min()) for u, own in allowed.items())
    return _Try(layout, allowed, floor_of(first.problem) + more)


def _solved(
    problem: ShardingProblem,
    first: Reduction,
    one: _Try,
    shared: RestrictedIlp | None,
    solver: str,
    time_limit_s: float,
) -> GraphSharding | None:
    """The best sharding with the layout, of a problem without others; None if there is none."""
    result = None if shared is None else shared.solve(one.allowed)
    if result is not None:
        core = result.choice
    else:
        kept = {
            u: one.allowed.get(u, np.arange(len(costs))) for u, costs in first.problem.costs.items()
        }
        second = reduce_problem(restrict(first.problem, kept))
        try:
            result = solve_ilp(second.problem, solver=solver, time_limit_s=time_limit_s)
        except SolverError:
            return None
        core = {u: int(kept[u][s]) for u, s in second.restore(result.choice).items()}
    choice = first.restore(core)
    for u, own in one.allowed.items():
        choice[u] = int(np.flatnonzero(own == choice[u])[0])
    restricted = _only(problem, one.allowed)
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
    """The problem in which some classes have only some of their strategies."""
    strategies = dict(problem.strategies)
    pairwise = problem.pairwise.copy()
    for u, own in allowed.items():
        strategies[u] = [problem.strategies[u][i] for i in own]
        pairwise.costs[u] = pairwise.costs[u][own]
        for v, matrix in list(pairwise.edges.get(u, {}).items()):
            part = matrix[own]
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
        found = fit_into_memory(
            sharding,
            budget_bytes,
            solver=solver,
            time_limit_s=time_left_s,
            first_price=first_price,
        )
    except DoesNotFit as miss:
        if time.monotonic() > deadline:  # then that proves nothing
            return Marginal(layout, None, sharding.lower_bound)
        return Marginal(layout, miss.smallest, sharding.lower_bound, fits=False)
    return Marginal(layout, found, found.lower_bound)


def _peak(sharding: GraphSharding) -> float:
    return sharding.memory.peak_bytes
