"""Two choices to a better one within limits: from a `PairwiseProblem`, `Limit`s and a bound.

Let x fit and y be cheaper. Nodes at which they differ form groups, connected by edges of the
problem or of a limit. No edge joins two groups, so taking y's strategies in a group K instead of
x's changes the cost by ΔC_K and limit t by ΔB_Kt, whatever happens in the others:

    minimise    Σ_K ΔC_K z_K      subject to   B_t(x) + Σ_K ΔB_Kt z_K ≤ bound,   z_K ∈ {0, 1}

With one variable per group this takes milliseconds, and z = 0 is a solution: the result is never
worse than x. Groups that cost less and save bytes are simply taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import highspy
import numpy as np

from autopar.sharding.limit import Limit
from autopar.sharding.reduce import PairwiseProblem

Choice = dict[int, int]
_Edge = tuple[tuple[int, int], np.ndarray]

_GAP = 1e-4
_MAX_NODES = 2000  # of the search tree: a limit that does not depend on a clock


def combined(
    problem: PairwiseProblem, limits: Sequence[Limit], bound: float, fitting: Choice, other: Choice
) -> Choice:
    """The best choice that takes whole groups of `other` and the rest of `fitting`."""
    groups = _groups(problem, limits, fitting, other)
    if not groups:
        return fitting
    number = {u: k for k, group in enumerate(groups) for u in group}
    cost = _differences(problem.costs, _edges(problem, number), number, fitting, other)
    used = np.array([limit.value(fitting) for limit in limits])
    more = np.array(
        [_differences(t.nodes, t.edges.items(), number, fitting, other) for t in limits]
    ).reshape(len(limits), len(groups))
    taken = _knapsack(cost, more, bound - used)
    chosen = {u for k in np.flatnonzero(taken) for u in groups[k]}
    return {u: other[u] if u in chosen else s for u, s in fitting.items()}


def at_price(
    problem: PairwiseProblem, limit: Limit, price: float, one: Choice, other: Choice
) -> Choice:
    """The best choice that takes whole groups of `other` and the rest of `one`, if what the limit
    counts has this price."""
    groups = _groups(problem, (limit,), one, other)
    if not groups:
        return one
    number = {u: k for k, group in enumerate(groups) for u in group}
    cost = _differences(problem.costs, _edges(problem, number), number, one, other)
    more = _differences(limit.nodes, limit.edges.items(), number, one, other)
    chosen = {u for k in np.flatnonzero(cost + price * more < 0) for u in groups[k]}
    return {u: other[u] if u in chosen else s for u, s in one.items()}


def _groups(
    problem: PairwiseProblem, limits: Sequence[Limit], fitting: Choice, other: Choice
) -> list[list[int]]:
    differing = [u for u in fitting if fitting[u] != other[u]]
    around: dict[int, set[int]] = {u: set() for u in differing}
    for u in differing:
        around[u].update(v for v in problem.edges.get(u, ()) if v in around)
    for limit in limits:
        for u, v in limit.edges:
            if u in around and v in around:
                around[u].add(v)
                around[v].add(u)
    groups, seen = [], set()
    for start in differing:
        if start in seen:
            continue
        seen.add(start)
        group = [start]
        for u in group:
            new = sorted(around[u] - seen)
            seen.update(new)
            group += new
        groups.append(group)
    return groups


def _edges(problem: PairwiseProblem, number: Mapping[int, int]) -> Iterator[_Edge]:
    """Edges (u < v) at differing nodes."""
    for u in number:
        for v, matrix in problem.edges.get(u, {}).items():
            if u < v:
                yield (u, v), matrix
            elif v not in number:
                yield (v, u), matrix.T


def _differences(
    nodes: Mapping[int, np.ndarray],
    edges: Iterable[_Edge],
    number: Mapping[int, int],
    fitting: Choice,
    other: Choice,
) -> np.ndarray:
    """Per group, by how much a function of the choice changes if the group is exchanged."""
    change = np.zeros(1 + max(number.values()))
    for u, term in nodes.items():
        if u in number:
            change[number[u]] += float(term[other[u]] - term[fitting[u]])
    for (u, v), term in edges:
        group = number.get(u, number.get(v))
        if group is not None:
            s = other[u] if u in number else fitting[u]
            t = other[v] if v in number else fitting[v]
            change[group] += float(term[s, t] - term[fitting[u], fitting[v]])
    return change


def _knapsack(cost: np.ndarray, more: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Which groups to take; none if the solver finds nothing better."""
    count = len(cost)
    unit = float(np.abs(cost).max(initial=0.0))
    if not unit:
        return np.zeros(count, dtype=bool)
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("mip_rel_gap", _GAP)
    highs.setOptionValue("mip_max_nodes", _MAX_NODES)
    columns = np.arange(count, dtype=np.int32)
    highs.addVars(count, np.zeros(count), np.ones(count))
    highs.changeColsCost(count, columns, cost / unit)
    kinds = np.full(count, highspy.HighsVarType.kInteger)
    highs.changeColsIntegrality(count, columns, kinds)
    for used, left in zip(more, room, strict=True):
        scale = float(np.abs(used).max(initial=0.0))
        if not scale:
            continue
        highs.addRow(-highspy.kHighsInf, left / scale, count, columns, used / scale)
    highs.run()
    if highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return np.zeros(count, dtype=bool)
    taken = np.array(highs.getSolution().col_value) > 0.5
    is_better = cost @ taken < 0 and bool((more @ taken <= np.maximum(room, 0) + 1e-9).all())
    return taken if is_better else np.zeros(count, dtype=bool)
