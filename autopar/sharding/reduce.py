"""Exact reductions of a quadratic assignment: from a `PairwiseProblem` to a smaller `Reduction`.

The problem: choose a strategy s_v for every node to minimise Σ c_v[s_v] + Σ M_uv[s_u, s_v].
Reductions that keep the optimum (and remember how to undo themselves):

- separable edges: row and column minima move to the nodes; an edge of zeros goes;
- degree 0: take the cheapest strategy; degree 1: fold into the neighbour; degree 2: a min-plus
  product replaces the node by an edge between its neighbours (`_eliminate`);
- dominance: a strategy that another beats whatever the neighbours do goes (`_drop_dominated`).

On series-parallel graphs nothing is left. These are the PBQP reductions of register allocation
(Scholz and Eckstein, 2002).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# Differences below this share of the largest cost are rounding.
_ROUNDING = 1e-14
FORBIDDEN = 1e18  # the price of what may not be chosen; sums of it stay comparable


@dataclass
class PairwiseProblem:
    """Costs per node and per edge (u < v). Mutable: reductions shrink it in place."""

    costs: dict[int, np.ndarray]
    edges: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)  # both directions
    constant: float = 0.0

    def copy(self) -> PairwiseProblem:
        """A copy that shares the tables, which nothing changes in place."""
        edges = {u: dict(row) for u, row in self.edges.items()}
        return PairwiseProblem(dict(self.costs), edges, self.constant)

    def add_edge(self, u: int, v: int, matrix: np.ndarray) -> None:
        """Add a cost between two nodes; a self-edge becomes a node cost."""
        if u == v:
            self.costs[u] = self.costs[u] + np.diagonal(matrix)
            return
        row = self.edges.setdefault(u, {})
        known = row.get(v)
        total = matrix if known is None else known + matrix
        row[v] = total
        self.edges.setdefault(v, {})[u] = total.T

    def remove_edge(self, u: int, v: int) -> None:
        del self.edges[u][v]
        del self.edges[v][u]

    def degree(self, u: int) -> int:
        return len(self.edges.get(u, ()))

    @property
    def num_edge_entries(self) -> int:
        return sum(m.size for u, row in self.edges.items() for v, m in row.items() if u < v)

    def objective(self, choice: dict[int, int]) -> float:
        total = self.constant + sum(c.item(choice[u]) for u, c in self.costs.items())
        for u, row in self.edges.items():
            total += sum(m.item(choice[u], choice[v]) for v, m in row.items() if u < v)
        return total


@dataclass(frozen=True)
class _Undo:
    node: int
    kept: np.ndarray  # original strategy indices that were still alive, in order
    cost: np.ndarray
    neighbours: tuple[tuple[int, np.ndarray, np.ndarray], ...]  # (node, matrix, its kept then)


@dataclass
class Reduction:
    """A reduced problem and the way back to a choice for every node of the original."""

    problem: PairwiseProblem
    kept: dict[int, np.ndarray]
    undo: list[_Undo]
    tolerance: float
    spared: frozenset[int] = frozenset()  # nodes that stay, with all of their strategies
    # Nodes whose tables changed since the last check for dominated strategies.
    touched: set[int] = field(default_factory=set)

    def restore(self, choice: dict[int, int]) -> dict[int, int]:
        """From indices into the reduced problem to indices into the original."""
        full = {u: self.kept[u].item(s) for u, s in choice.items()}
        for step in reversed(self.undo):
            total = step.cost
            for other, matrix, kept in step.neighbours:
                total = total + matrix[:, kept.searchsorted(full[other])]
            full[step.node] = step.kept.item(total.argmin())
        return full


def reduce_problem(problem: PairwiseProblem, spared: Collection[int] = ()) -> Reduction:
    """Apply every reduction until none applies. `spared`: nodes that stay unreduced, so that the
    result shows the cost of each of their strategies."""
    kept = {u: np.arange(len(c)) for u, c in problem.costs.items()}
    tolerance = _ROUNDING * _largest_cost(problem)
    reduction = Reduction(problem, kept, [], tolerance, frozenset(spared), set(problem.costs))
    _normalise_all(problem, tolerance)
    changed = set(problem.costs)
    while changed:
        _eliminate_low_degree(reduction, changed)
        changed = _drop_dominated(reduction)
    return reduction


def restrict(problem: PairwiseProblem, kept: Mapping[int, np.ndarray]) -> PairwiseProblem:
    """The problem with only some of each node's strategies; nodes of one strategy are put into
    their neighbours' costs."""
    costs = {u: problem.costs[u][k].copy() for u, k in kept.items()}
    restricted = PairwiseProblem(costs, {}, problem.constant)
    for u, row in problem.edges.items():
        for v, matrix in row.items():
            if u > v:
                continue
            part = matrix[np.ix_(kept[u], kept[v])]
            if part.shape[0] == 1:
                costs[v] = costs[v] + part[0]
            elif part.shape[1] == 1:
                costs[u] = costs[u] + part[:, 0]
            else:
                restricted.add_edge(u, v, part)
    return restricted


def _largest_cost(problem: PairwiseProblem) -> float:
    """The largest entry that is not forbidden; 0 if there is none above."""
    tables = list(problem.costs.values())
    tables += [m.ravel("K") for u, row in problem.edges.items() for v, m in row.items() if u < v]
    entries = np.concatenate([np.zeros(1), *tables])
    return float(entries.max(initial=0.0, where=entries < FORBIDDEN / 2))


def _normalise_all(problem: PairwiseProblem, tolerance: float) -> None:
    """`_normalise` for every edge, those of a shape at once."""
    edges = [(u, v) for u, row in problem.edges.items() for v in row if u < v]
    of_shape: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for u, v in edges:
        of_shape.setdefault(problem.edges[u][v].shape, []).append((u, v))
    parts: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    for same in of_shape.values():
        matrices = np.array([problem.edges[u][v] for u, v in same])
        rows = matrices.min(axis=2)
        matrices -= rows[:, :, None]
        columns = np.minimum.reduce(matrices, axis=1)
        matrices -= columns[:, None, :]
        largest = np.maximum.reduce(matrices, axis=(1, 2), initial=0.0).tolist()
        parts.update(zip(same, zip(rows, columns, strict=True), strict=True))
        for (u, v), matrix, height in zip(same, matrices, largest, strict=True):
            if height <= tolerance:
                problem.remove_edge(u, v)
            else:
                problem.edges[u][v] = matrix
                problem.edges[v][u] = matrix.T
    for u, v in edges:  # in this order, since floating-point numbers are added up
        rows, columns = parts[u, v]
        problem.costs[u] = problem.costs[u] + rows
        problem.costs[v] = problem.costs[v] + columns


def _normalise(problem: PairwiseProblem, u: int, v: int, tolerance: float) -> bool:
    """Move what depends on one end only to that end; True if the edge vanished."""
    matrix = problem.edges[u][v]
    rows = np.minimum.reduce(matrix, axis=1)
    matrix = matrix - rows[:, None]
    columns = np.minimum.reduce(matrix, axis=0)
    matrix -= columns
    problem.costs[u] = problem.costs[u] + rows
    problem.costs[v] = problem.costs[v] + columns
    if np.maximum.reduce(matrix, axis=None, initial=0.0) <= tolerance:
        problem.remove_edge(u, v)
        return True
    problem.edges[u][v] = matrix
    problem.edges[v][u] = matrix.T
    return False


def _eliminate_low_degree(reduction: Reduction, start: set[int]) -> None:
    problem = reduction.problem
    queue = [u for u in start if u in problem.costs and problem.degree(u) <= 2]
    while queue:
        u = queue.pop()
        if u not in problem.costs or problem.degree(u) > 2 or u in reduction.spared:
            continue
        queue += [v for v in _eliminate(reduction, u) if problem.degree(v) <= 2]


def _eliminate(reduction: Reduction, u: int) -> list[int]:
    """Remove a node of degree ≤ 2 exactly; returns its former neighbours."""
    problem = reduction.problem
    cost = problem.costs.pop(u)
    around = list(problem.edges.pop(u, {}).items())
    reduction.undo.append(
        _Undo(
            u,
            reduction.kept[u],
            cost,
            tuple((v, matrix, reduction.kept[v]) for v, matrix in around),
        )
    )
    for v, _ in around:
        del problem.edges[v][u]
        reduction.touched.add(v)
    if not around:
        problem.constant += float(cost.min())
    elif len(around) == 1:
        ((v, matrix),) = around
        problem.costs[v] = problem.costs[v] + np.minimum.reduce(cost[:, None] + matrix)
    else:
        (v, to_v), (w, to_w) = around
        through = np.minimum.reduce((cost[:, None] + to_v)[:, :, None] + to_w[:, None, :])
        problem.add_edge(v, w, through)
        _normalise(problem, v, w, reduction.tolerance)
    return [v for v, _ in around]


def _drop_dominated(reduction: Reduction) -> set[int]:
    """Remove strategies that another one beats for every choice of the neighbours."""
    problem = reduction.problem
    changed: set[int] = set()
    for u in sorted(problem.costs, key=lambda n: len(problem.costs[n])):
        cost = problem.costs[u]
        count = len(cost)
        if count == 1 or u in reduction.spared or u not in reduction.touched:
            continue
        reduction.touched.discard(u)
        beats = _beats(cost, list(problem.edges.get(u, {}).values()), reduction.tolerance)
        if beats is None:
            continue
        alive = np.ones(count, dtype=bool)
        for s in np.flatnonzero(beats.any(axis=0)).tolist():
            rivals = beats[:, s] & alive
            rivals[s] = False
            if rivals.any():
                alive[s] = False
        if alive.all():
            continue
        reduction.kept[u] = reduction.kept[u][alive]
        problem.costs[u] = cost[alive]
        changed.add(u)
        reduction.touched.update((u, *problem.edges.get(u, ())))
        for v in list(problem.edges.get(u, {})):
            matrix = problem.edges[u][v][alive]
            problem.edges[u][v] = matrix
            problem.edges[v][u] = matrix.T
            if _normalise(problem, u, v, reduction.tolerance):
                changed.add(v)
    return changed


def _beats(cost: np.ndarray, matrices: Sequence[np.ndarray], tolerance: float) -> np.ndarray | None:
    """B[t, s]: taking t instead of s never costs more, whatever the neighbours do; None if that is
    so for no pair. Edges are normalised."""
    # The most that taking t instead of s can cost is at least what it does where s costs nothing,
    # as it does somewhere on every edge. That is soon found and rules out most pairs.
    least = cost[:, None] - cost[None, :]
    for matrix in matrices:
        least += matrix.take(matrix.argmin(axis=1), axis=1)
    beats = least <= tolerance
    np.fill_diagonal(beats, False)
    t, s = np.nonzero(beats)
    if not len(t):
        return None
    gain = cost[t] - cost[s]
    for matrix in matrices:
        gain += np.maximum.reduce(matrix[t] - matrix[s], axis=1)
    beats[t, s] = gain <= tolerance
    return beats if beats.any() else None
