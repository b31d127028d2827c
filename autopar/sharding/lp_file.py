"""The sharding problem as a file that any solver of linear programmes reads.

    ShardingProblem → text in CPLEX's `.lp` format, as HiGHS writes it

The programme is that of `ilp.py`, before any reduction: x_v_s is 1 if class v takes strategy s,
y_u_v_s_t if classes u and v take s and t. Forbidden pairs are fixed at 0. Costs are in microseconds
where the mesh has a device. Memory has rows at the times when the plan is fullest; the solver
itself adds rows where a solution breaks them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.sharding.ilp import lp_text
from autopar.sharding.limit import Limit
from autopar.sharding.memory_limits import Holdings
from autopar.sharding.problem import ShardingProblem
from autopar.sharding.reduce import reduce_problem

MOST_ENTRIES = 1_000_000  # pairs of strategies; a larger problem is written in its reduced form
_MOST_ROWS = 8
_MICROSECONDS = 1e6


def problem_text(
    problem: ShardingProblem, choice: Mapping[int, int], budget_bytes: float | None = None
) -> str:
    """The problem as text. `choice` is the plan's, which says when memory is fullest."""
    pairwise, limits = problem.pairwise.copy(), {}
    if pairwise.num_edge_entries > MOST_ENTRIES:
        pairwise = reduce_problem(pairwise).problem
        form = "reduced, since it is large; strategies are numbered among those that are left"
    else:
        form = "before reductions"
        if budget_bytes is not None:
            limits = _fullest(problem, choice, budget_bytes)
    is_timed = problem.mesh.device is not None
    unit = "microseconds" if is_timed else "the units of the mesh"
    lines = (f"Sharding on the mesh {problem.mesh.shape}, {form}", f"costs are in {unit}")
    text = lp_text(pairwise, _MICROSECONDS if is_timed else 1.0, limits, budget_bytes or 1.0)
    return "".join(f"\\ {line}\n" for line in lines) + text


def _fullest(
    problem: ShardingProblem, choice: Mapping[int, int], budget_bytes: float
) -> dict[str, Limit]:
    """Memory at a few times, far apart, when the plan holds most."""
    holdings = Holdings(problem, budget_bytes)
    left = holdings.bytes_at(choice).copy()
    margin = max(8, holdings.num_times // 64)
    rows = {}
    while len(rows) < _MOST_ROWS and left.max(initial=0.0) > 0.5 * budget_bytes:
        at = int(np.argmax(left))
        rows[f"memory_{at}"] = holdings.row(at)
        left[max(0, at - margin) : at + margin] = 0.0
    return rows
