"""The sharding problem as a file that any solver of linear programmes reads: CPLEX's `.lp` format.

The programme is that of `ilp.py`, before any reduction: x_v_s is 1 if class v takes strategy s,
y_u_v_s_t if classes u and v take s and t. Pairs that may not be are fixed at 0. Costs are in
microseconds where the mesh has a device, and `constant` is a variable that is 1. Rows for memory
are at times when the plan is fullest; the solver itself adds rows where a solution breaks them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from autopar.sharding.limit import Limit
from autopar.sharding.memory_limits import Holdings
from autopar.sharding.problem import ShardingProblem
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, reduce_problem

MOST_ENTRIES = 1_000_000  # pairs of strategies; what has more is written in its reduced form
_PER_LINE = 8
_MOST_ROWS = 8
MICROSECONDS = 1e6


def lp_text(
    problem: ShardingProblem, choice: Mapping[int, int], budget_bytes: float | None = None
) -> str:
    """The problem as text. `choice` is the plan's, which says when memory is fullest."""
    pairwise, notes = problem.pairwise, ["as the solver gets it, before reductions"]
    limits: list[tuple[int, Limit]] = []
    if pairwise.num_edge_entries > MOST_ENTRIES:
        pairwise = reduce_problem(pairwise.copy()).problem
        notes = ["reduced, since it is large; strategies are numbered among those that are left"]
    elif budget_bytes is not None:
        limits = _fullest(problem, choice, budget_bytes)
    scale = MICROSECONDS if problem.mesh.device is not None else 1.0
    notes.append(f"costs are in {'microseconds' if scale > 1 else 'the units of the mesh'}")
    lines = [f"\\ Sharding on the mesh {problem.mesh.shape}", *(f"\\ {note}" for note in notes)]
    lines += _lines(pairwise, scale, limits, budget_bytes or 0.0)
    return "\n".join(lines) + "\n"


def _fullest(
    problem: ShardingProblem, choice: Mapping[int, int], budget_bytes: float
) -> list[tuple[int, Limit]]:
    holdings = Holdings(problem, budget_bytes)
    left = holdings.bytes_at(choice).copy()
    margin = max(8, holdings.num_times // 64)
    found = []
    while len(found) < _MOST_ROWS and left.max(initial=0.0) > 0.5 * budget_bytes:
        at = int(np.argmax(left))
        found.append((at, holdings.row(at)))
        left[max(0, at - margin) : at + margin] = 0.0
    return found


def _lines(
    problem: PairwiseProblem, scale: float, limits: Sequence[tuple[int, Limit]], budget: float
) -> Iterator[str]:
    nodes = sorted(problem.costs)
    needed = {edge for _, limit in limits for edge in limit.edges}
    edges: list[tuple[int, int, np.ndarray]] = []
    for u in nodes:
        for v, matrix in problem.edges.get(u, {}).items():
            if u < v and (matrix.any() or (u, v) in needed):
                edges.append((u, v, matrix))
    known = {(u, v) for u, v, _ in edges}
    for u, v in sorted(needed - known):
        edges.append((u, v, np.zeros((len(problem.costs[u]), len(problem.costs[v])))))
    yield "Minimize"
    yield from _terms(" cost:", _objective(problem, nodes, edges, scale))
    yield "Subject To"
    for u in nodes:
        yield from _terms(f" one_{u}:", ((1.0, x) for x in _columns(problem, u)), " = 1")
    for u, v, matrix in edges:
        rows, columns = matrix.shape
        for s in range(rows):
            pairs = [(1.0, f"y_{u}_{v}_{s}_{t}") for t in range(columns)]
            yield from _terms(f" from_{u}_{v}_{s}:", [*pairs, (-1.0, f"x_{u}_{s}")], " = 0")
        for t in range(columns):
            pairs = [(1.0, f"y_{u}_{v}_{s}_{t}") for s in range(rows)]
            yield from _terms(f" to_{u}_{v}_{t}:", [*pairs, (-1.0, f"x_{v}_{t}")], " = 0")
    unit = max(budget, 1.0)
    for at, limit in limits:
        terms = [
            (float(held) / unit, f"x_{u}_{s}")
            for u, own in limit.nodes.items()
            for s, held in enumerate(own)
        ]
        terms += [
            (float(held) / unit, f"y_{u}_{v}_{s}_{t}")
            for (u, v), own in limit.edges.items()
            for (s, t), held in np.ndenumerate(own)
        ]
        room = (budget - limit.constant) / unit
        yield from _terms(f" memory_{at}:", terms, f" <= {room:.12g}")
    yield "Bounds"
    yield " constant = 1"
    for u in nodes:
        for s, cost in enumerate(problem.costs[u]):
            if cost >= FORBIDDEN / 2:
                yield f" x_{u}_{s} <= 0"
    for u, v, matrix in edges:
        for s, t in np.argwhere(matrix >= FORBIDDEN / 2):
            yield f" y_{u}_{v}_{s}_{t} <= 0"
    yield "Binary"
    for u in nodes:
        yield " " + " ".join(_columns(problem, u))
    yield "End"


def _columns(problem: PairwiseProblem, u: int) -> list[str]:
    return [f"x_{u}_{s}" for s in range(len(problem.costs[u]))]


def _objective(
    problem: PairwiseProblem,
    nodes: Sequence[int],
    edges: Sequence[tuple[int, int, np.ndarray]],
    scale: float,
) -> Iterator[tuple[float, str]]:
    yield problem.constant * scale, "constant"
    for u in nodes:
        for s, cost in enumerate(problem.costs[u]):
            if 0 != cost < FORBIDDEN / 2:
                yield float(cost) * scale, f"x_{u}_{s}"
    for u, v, matrix in edges:
        for (s, t), cost in np.ndenumerate(matrix):
            if 0 != cost < FORBIDDEN / 2:
                yield float(cost) * scale, f"y_{u}_{v}_{s}_{t}"


def _terms(head: str, terms: Iterable[tuple[float, str]], tail: str = "") -> Iterator[str]:
    """A row, in lines that are not too long."""
    line, count = head, 0
    for factor, name in terms:
        if count == _PER_LINE:
            yield line
            line, count = " ", 0
        sign = "-" if factor < 0 else "+"
        size = "" if abs(factor) == 1 else f"{abs(factor):.15g} "
        line, count = f"{line} {sign} {size}{name}", count + 1
    yield line + tail
