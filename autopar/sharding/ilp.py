"""The reduced problem as an integer linear programme: from `PairwiseProblem` to `IlpResult`.

Variables: x_{v,s} ∈ {0,1}, node v takes strategy s; y_{uv,st} ≥ 0, edge (u,v) takes the pair.

    minimise    Σ c_v[s]·x_{v,s} + Σ M_uv[s,t]·y_{uv,st}                        (`_model`)
    subject to  Σ_s x_{v,s} = 1                          for every node v        (`_node_rows`)
                Σ_t y_{uv,st} = x_{u,s}                  for every edge and s    (`_edge_rows`)
                Σ_s y_{uv,st} = x_{v,t}                  for every edge and t    (`_edge_rows`)

The edge marginals make the relaxation tight: y is integral whenever x is, and on train steps the
linear relaxation is usually integral, which proves the optimum without branching. For large
problems message passing (`descent`) comes first, which often proves an optimum in less time. If the
relaxation is not integral, the programme is solved with integral x over the strategies that the
relaxation uses, a small problem whose solution is near the bound, and from there over all of them.
If time runs out, the better of the solver's and local search's (`descent`) solutions is taken.
HiGHS gets the arrays directly; any other solver that PuLP knows gets the same model by name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import highspy
import numpy as np

from autopar.errors import ArgumentError, SolverError
from autopar.progress import debugs, tell
from autopar.sharding.descent import descend
from autopar.sharding.limit import Limit
from autopar.sharding.reduce import FORBIDDEN, PairwiseProblem, reduce_problem

_INTEGRAL = 1e-6
_PROVEN = 1e-6
_LARGE = 30_000  # edge entries from which message passing is tried first
_FIRST_PASSES = 10
_SUPPORT_SHARE = 0.3  # of the time limit, for the strategies that the relaxation uses


@dataclass(frozen=True)
class IlpResult:
    choice: dict[int, int]
    objective: float
    lower_bound: float
    num_variables: int
    num_constraints: int
    relaxation_integral: bool


@dataclass(frozen=True)
class _Model:
    """min c·z with A z = b and 0 ≤ z ≤ upper, the first `num_node_vars` entries of z integral. A
    is stored by columns."""

    cost: np.ndarray
    upper: np.ndarray  # 0 for forbidden entries
    starts: np.ndarray
    rows: np.ndarray
    values: np.ndarray
    rhs: np.ndarray
    num_node_vars: int
    node_slices: dict[int, slice]
    edge_slices: dict[tuple[int, int], slice]
    scale: float


def known_solvers() -> list[str]:
    import pulp  # slow to import

    return ["highs", *(name for name in pulp.listSolvers() if name.upper() != "HIGHS")]


def check_solver(solver: str) -> None:
    """Raise for a solver that is unknown or not installed."""
    if solver == "highs":
        return
    import pulp  # slow to import

    if solver not in pulp.listSolvers():
        raise ArgumentError(
            f"ShardingOptions(solver={solver!r}): no such solver. Use 'highs' (bundled) or one "
            f"that PuLP knows: {known_solvers()}."
        )
    if not pulp.getSolver(solver, msg=False).available():
        raise SolverError(
            f"ShardingOptions(solver={solver!r}): PuLP knows this solver but it is not installed "
            "here. Install it, or use the default 'highs'."
        )


def solve_ilp(
    problem: PairwiseProblem,
    *,
    solver: str = "highs",
    time_limit_s: float = 60.0,
    gap: float = 0.0,
    is_tried: bool = False,
    cutoff: float = np.inf,
) -> IlpResult:
    """Solve a reduced problem. A solution proven within the ratio `gap` of the optimum is good
    enough, and any once nothing can cost less than the cutoff. `is_tried`: message passing was
    tried before and did not suffice."""
    if not problem.costs:
        check_feasible(problem.constant)
        return IlpResult({}, problem.constant, problem.constant, 0, 0, True)
    if solver == "highs" and not is_tried and problem.num_edge_entries >= _LARGE:
        descent = descend(problem, time_limit_s, _FIRST_PASSES)
        objective = problem.objective(descent.choice)
        if objective < FORBIDDEN / 2 and _is_proven(objective, descent.lower_bound):
            return IlpResult(descent.choice, objective, objective, *size_of(problem), True)
        if objective < FORBIDDEN / 2 and descent.lower_bound >= cutoff:
            bound = descent.lower_bound
            return IlpResult(descent.choice, objective, bound, *size_of(problem), False)
    model = _model(problem)
    if solver == "highs":
        cutoff = (cutoff - problem.constant) * model.scale
        solution, bound, integral = _solve_with_highs(model, time_limit_s, gap, cutoff)
    else:
        solution, bound, integral = _solve_with_pulp(model, solver, time_limit_s)
    choice = None
    if solution is not None:
        choice = {u: int(np.argmax(solution[s])) for u, s in model.node_slices.items()}
    lower = max(bound / model.scale + problem.constant, floor_of(problem))
    if choice is None or not _is_proven(problem.objective(choice), lower, max(gap, _PROVEN)):
        descent = descend(problem, max(time_limit_s, 1.0))
        lower = max(lower, descent.lower_bound)
        if choice is None or problem.objective(descent.choice) < problem.objective(choice):
            choice = descent.choice
            if problem.objective(choice) >= FORBIDDEN / 2:
                if np.isfinite(cutoff):  # below it is nothing, and local search met nothing allowed
                    return solve_ilp(
                        problem, solver=solver, time_limit_s=time_limit_s, gap=gap, is_tried=True
                    )
                raise SolverError(
                    f"{solver} found no sharding within {time_limit_s:.3g} s, nor did local "
                    "search. Raise ShardingOptions(solver_time_limit_s=…), or ask for fewer specs."
                )
    objective = problem.objective(choice)
    check_feasible(objective)
    lower = min(lower, objective)
    if _is_proven(objective, lower):
        lower = objective
    return IlpResult(choice, objective, lower, len(model.cost), len(model.rhs), integral)


class RestrictedIlp:
    """One problem, solved repeatedly with only some strategies of some nodes. Each solve starts
    where the last ended, which takes a fraction of the time."""

    def __init__(self, problem: PairwiseProblem, time_limit_s: float = 60.0) -> None:
        self.problem = problem
        self.time_limit_s = time_limit_s
        self._model = _model(problem)
        self._highs = _highs(self._model)
        self._highs.setOptionValue("presolve", "off")

    def solve(self, kept: Mapping[int, np.ndarray]) -> IlpResult | None:
        """The best choice in which each of these nodes takes one of its kept strategies; None if
        the relaxation is not integral."""
        model, highs = self._model, self._highs
        upper = model.upper.copy()
        for u, strategies in kept.items():
            barred = np.ones(len(self.problem.costs[u]), dtype=bool)
            barred[strategies] = False
            upper[model.node_slices[u]][barred] = 0.0
        changed = np.concatenate(
            [np.arange(s.start, s.stop) for s in (model.node_slices[u] for u in kept)]
        )
        columns = changed.astype(np.int32)
        highs.changeColsBounds(len(columns), columns, np.zeros(len(columns)), upper[columns])
        highs.setOptionValue("time_limit", highs.getRunTime() + self.time_limit_s)
        highs.run()
        if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = np.array(highs.getSolution().col_value)
        nodes = solution[: model.num_node_vars]
        if not np.all(np.minimum(nodes, 1 - nodes) < _INTEGRAL):
            return None
        choice = {u: int(np.argmax(solution[s])) for u, s in model.node_slices.items()}
        objective = self.problem.objective(choice)
        bound = highs.getInfo().objective_function_value / model.scale + self.problem.constant
        if objective >= FORBIDDEN / 2 or not _is_proven(objective, bound):
            return None
        return IlpResult(choice, objective, objective, len(model.cost), len(model.rhs), True)


def _is_proven(objective: float, lower_bound: float, gap: float = _PROVEN) -> bool:
    return objective - lower_bound <= gap * max(abs(objective), 1e-30)


def size_of(problem: PairwiseProblem) -> tuple[int, int]:
    """(number of variables, number of constraints) of the problem's model."""
    counts = {u: len(c) for u, c in problem.costs.items()}
    ends = sum(counts[u] * len(row) for u, row in problem.edges.items())
    return sum(counts.values()) + problem.num_edge_entries, len(counts) + ends


def solve_with_limits(
    problem: PairwiseProblem,
    limits: Sequence[Limit],
    bound: float | None,
    *,
    time_limit_s: float,
) -> dict[int, int] | None:
    """The cheapest choice with every limit at most the bound; without a bound, the choice that
    minimises the largest limit. None if there is none, or none was found in time. For the small
    problems of `budget`: always by HiGHS. The problem is used up: nodes that no limit depends on
    are reduced, and it gets the edges that limits need."""
    if bound is not None and any(limit.floor() > bound * (1 + 1e-9) for limit in limits):
        return None
    reduction = reduce_problem(problem, {u for limit in limits for u in limit.ends})
    if not problem.costs:
        return reduction.restore({})
    _add_limit_edges(problem, limits)
    model = _model(problem)
    highs = _highs(model)
    highs.setOptionValue("time_limit", time_limit_s)
    highs.setOptionValue("mip_rel_gap", 1e-4)
    highs.setOptionValue("mip_allow_restart", False)  # a restart would separate cuts once more
    _make_integral(highs, model)
    unit = max(max((limit.constant for limit in limits), default=0.0), bound or 0.0, 1.0)
    largest = len(model.cost)
    if bound is None:
        costs = np.zeros(largest)
        highs.changeColsCost(largest, np.arange(largest, dtype=np.int32), costs)
        highs.addVar(-highspy.kHighsInf, highspy.kHighsInf)
        highs.changeColCost(largest, 1.0)
    for limit in limits:
        index, values = _limit_row(model, limit)
        if bound is None:
            index, values = np.append(index, np.int32(largest)), np.append(values, -unit)
        if len(index):
            room = ((bound or 0.0) - limit.constant) / unit
            highs.addRow(-highspy.kHighsInf, room, len(index), index, values / unit)
    highs.run()
    if highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    solution = np.array(highs.getSolution().col_value)
    choice = {u: int(np.argmax(solution[s])) for u, s in model.node_slices.items()}
    return reduction.restore(choice)


def _add_limit_edges(problem: PairwiseProblem, limits: Iterable[Limit]) -> None:
    """Add the edges that limits need to the problem, at no cost."""
    for limit in limits:
        for u, v in limit.edges:
            if v not in problem.edges.get(u, {}):
                problem.add_edge(u, v, np.zeros((len(problem.costs[u]), len(problem.costs[v]))))


def _limit_row(model: _Model, limit: Limit) -> tuple[np.ndarray, np.ndarray]:
    """(columns, bytes per column) of a limit."""
    slices = [model.node_slices[u] for u in limit.nodes]
    slices += [model.edge_slices[edge] for edge in limit.edges]
    columns = [np.arange(part.start, part.stop, dtype=np.int32) for part in slices]
    terms = [term.ravel() for term in (*limit.nodes.values(), *limit.edges.values())]
    if not columns:
        return np.empty(0, np.int32), np.empty(0)
    return np.concatenate(columns), np.concatenate(terms).astype(float)


def lp_text(
    problem: PairwiseProblem, cost_unit: float, limits: Mapping[str, Limit], bound: float
) -> str:
    """The model in CPLEX's `.lp` format, written by HiGHS. Costs are multiplied by `cost_unit`;
    each limit is a row with a name. The problem gets the edges that limits need."""
    _add_limit_edges(problem, limits.values())
    model = _model(problem)
    model = replace(model, cost=model.cost * (cost_unit / model.scale))
    highs = _highs(model)
    _make_integral(highs, model)
    highs.changeObjectiveOffset(problem.constant * cost_unit)
    for limit in limits.values():
        index, values = _limit_row(model, limit)
        room = (bound - limit.constant) / bound
        highs.addRow(-highspy.kHighsInf, room, len(index), index, values / bound)
    for column, name in enumerate(_column_names(model)):
        highs.passColName(column, name)
    for row, name in enumerate((*_row_names(model), *limits)):
        highs.passRowName(row, name)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.lp"
        highs.writeModel(str(path))
        return path.read_text(encoding="utf-8")


def _column_names(model: _Model) -> Iterator[str]:
    """x_v_s and y_u_v_s_t, as in the module's mathematics."""
    counts = {u: part.stop - part.start for u, part in model.node_slices.items()}
    for u, count in counts.items():
        yield from (f"x_{u}_{s}" for s in range(count))
    for u, v in model.edge_slices:
        yield from (f"y_{u}_{v}_{s}_{t}" for s in range(counts[u]) for t in range(counts[v]))


def _row_names(model: _Model) -> Iterator[str]:
    """one_v for the strategies of a node, from_u_v_s and to_u_v_t for the marginals of an edge."""
    counts = {u: part.stop - part.start for u, part in model.node_slices.items()}
    yield from (f"one_{u}" for u in counts)
    for u, v in model.edge_slices:
        yield from (f"from_{u}_{v}_{s}" for s in range(counts[u]))
        yield from (f"to_{u}_{v}_{t}" for t in range(counts[v]))


def floor_of(problem: PairwiseProblem) -> float:
    """A lower bound without a solver, in case that runs out of time before it has any."""
    edges = [m for u, row in problem.edges.items() for v, m in row.items() if u < v]
    return problem.constant + sum(float(t.min()) for t in (*problem.costs.values(), *edges))


def check_feasible(objective: float) -> None:
    """Raise if the objective is forbidden: reductions only add up forbidden costs."""
    if objective >= FORBIDDEN / 2:
        raise SolverError(
            "no sharding satisfies the constraints: the specs that were asked for leave some "
            "operator without a strategy. Ask for fewer specs, or for others."
        )


def _model(problem: PairwiseProblem) -> _Model:
    nodes = sorted(problem.costs)
    slices, row_of = {}, {}
    position = 0
    for row, u in enumerate(nodes):
        count = len(problem.costs[u])
        slices[u] = slice(position, position + count)
        row_of[u] = row
        position += count
    num_node_vars = position
    num_rows = len(nodes)
    edges = [(u, v, m) for u in nodes for v, m in problem.edges.get(u, {}).items() if u < v]
    edge_rows = []
    for u, v, _ in edges:
        edge_rows.append((num_rows, num_rows + len(problem.costs[u])))
        num_rows += len(problem.costs[u]) + len(problem.costs[v])
    rows, columns, values = _node_rows(nodes, slices, row_of)
    costs = [problem.costs[u] for u in nodes]
    edge_slices: dict[tuple[int, int], slice] = {}
    for (u, v, matrix), (first_u, first_v) in zip(edges, edge_rows, strict=True):
        s, t = np.indices(matrix.shape)
        variables = position + np.arange(matrix.size)
        edge_slices[u, v] = slice(position, position + matrix.size)
        position += matrix.size
        costs.append(matrix.ravel())
        parts = _edge_rows(slices[u], slices[v], first_u, first_v, s.ravel(), t.ravel(), variables)
        for store, part in zip((rows, columns, values), parts, strict=True):
            store.append(part)
    cost = np.concatenate(costs)
    forbidden = cost >= FORBIDDEN / 2
    cost = np.where(forbidden, 0.0, cost)
    scale = 1e4 / max(float(np.abs(cost).max()), 1e-300)
    row, column, value = (np.concatenate(p) for p in (rows, columns, values))
    order = np.lexsort((row, column))
    starts = np.zeros(position + 1, dtype=np.int32)
    np.cumsum(np.bincount(column, minlength=position), out=starts[1:])
    rhs = np.zeros(num_rows)
    rhs[: len(nodes)] = 1.0
    return _Model(
        cost=cost * scale,
        upper=np.where(forbidden, 0.0, 1.0),
        starts=starts,
        rows=row[order].astype(np.int32),
        values=value[order],
        rhs=rhs,
        num_node_vars=num_node_vars,
        node_slices=slices,
        edge_slices=edge_slices,
        scale=scale,
    )


def _node_rows(nodes: list[int], slices: dict[int, slice], row_of: dict[int, int]) -> tuple:
    columns = [np.arange(slices[u].start, slices[u].stop) for u in nodes]
    rows = [np.full(len(c), row_of[u]) for u, c in zip(nodes, columns, strict=True)]
    values = [np.ones(len(c)) for c in columns]
    return rows, columns, values


def _edge_rows(
    slice_u: slice,
    slice_v: slice,
    first_u: int,
    first_v: int,
    s: np.ndarray,
    t: np.ndarray,
    variables: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    own_u = np.arange(slice_u.start, slice_u.stop)
    own_v = np.arange(slice_v.start, slice_v.stop)
    rows = (
        first_u + s,
        first_v + t,
        first_u + np.arange(len(own_u)),
        first_v + np.arange(len(own_v)),
    )
    columns = (variables, variables, own_u, own_v)
    ones = np.ones(len(variables))
    values = (ones, ones, -np.ones(len(own_u)), -np.ones(len(own_v)))
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(values)


def _highs(model: _Model) -> highspy.Highs:
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    count = len(model.cost)
    # The arrays as they are: a `HighsLp` would take them entry by entry.
    highs.passModel(
        count,
        len(model.rhs),
        len(model.values),
        int(highspy.MatrixFormat.kColwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        model.cost,
        np.zeros(count),
        model.upper,
        model.rhs,
        model.rhs,
        model.starts,
        model.rows,
        model.values,
        np.zeros(count, dtype=np.int32),
    )
    return highs


def _solve_with_highs(
    model: _Model, time_limit_s: float, gap: float = 0.0, cutoff: float = np.inf
) -> tuple[np.ndarray | None, float, bool]:
    """(the best solution found or None, a lower bound, whether the relaxation was integral)."""
    highs = _highs(model)
    if not debugs("solver"):
        return _branched(highs, model, time_limit_s, gap, cutoff)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "highs.log"
        highs.setOptionValue("log_to_console", False)
        highs.setOptionValue("output_flag", True)
        highs.setOptionValue("log_file", str(log))
        result = _branched(highs, model, time_limit_s, gap, cutoff)
        highs.setOptionValue("log_file", "")
        tell("solver", log.read_text().rstrip() if log.exists() else "")
    return result


def _branched(
    highs: highspy.Highs, model: _Model, time_limit_s: float, gap: float, cutoff: float
) -> tuple[np.ndarray | None, float, bool]:
    started = time.monotonic()
    # Presolve costs more than it saves on these relaxations; branching turns it on again.
    highs.setOptionValue("presolve", "off")
    highs.setOptionValue("time_limit", time_limit_s)
    highs.run()
    status = highs.getModelStatus()
    relaxed: np.ndarray | None = None
    relaxed_bound = -np.inf
    if status == highspy.HighsModelStatus.kInfeasible:
        check_feasible(np.inf)
    if status == highspy.HighsModelStatus.kOptimal:
        relaxed = np.array(highs.getSolution().col_value)
        relaxed_bound = highs.getInfo().objective_function_value
        nodes = relaxed[: model.num_node_vars]
        if np.all(np.minimum(nodes, 1 - nodes) < _INTEGRAL):
            return relaxed, relaxed_bound, True
        if relaxed_bound >= cutoff:
            return None, relaxed_bound, False
    near: np.ndarray | None = None
    if relaxed is not None:
        near = _on_support(model, relaxed, max(1.0, _SUPPORT_SHARE * time_limit_s))
        if near is not None and _is_proven(float(model.cost @ near), relaxed_bound, gap):
            return near, relaxed_bound, False
    left = time_limit_s - (time.monotonic() - started)
    if left <= 0:
        return near, relaxed_bound, False
    # The relaxation is fractional: branch.
    _make_integral(highs, model)
    if near is not None:
        start = highspy.HighsSolution()
        start.col_value = near.tolist()
        highs.setSolution(start)
    # HiGHS counts from its first run on.
    highs.setOptionValue("time_limit", highs.getRunTime() + left)
    highs.setOptionValue("presolve", "on")
    highs.setOptionValue("mip_rel_gap", gap)
    highs.run()
    info = highs.getInfo()
    if highs.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
        check_feasible(np.inf)
    bound = max(info.mip_dual_bound, relaxed_bound)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return near, bound, False
    return np.array(highs.getSolution().col_value), bound, False


def _on_support(model: _Model, relaxed: np.ndarray, time_limit_s: float) -> np.ndarray | None:
    """The best integral solution over the strategies that a relaxed one uses; None if none was
    found in time."""
    upper = model.upper.copy()
    nodes = slice(0, model.num_node_vars)
    upper[nodes] = np.where(relaxed[nodes] < _INTEGRAL, 0.0, upper[nodes])
    highs = _highs(replace(model, upper=upper))
    _make_integral(highs, model)
    highs.setOptionValue("time_limit", time_limit_s)
    highs.setOptionValue("mip_rel_gap", 1e-4)
    highs.run()
    if highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    return np.array(highs.getSolution().col_value)


def _make_integral(highs: highspy.Highs, model: _Model) -> None:
    integer = np.arange(model.num_node_vars, dtype=np.int32)
    kinds = np.full(model.num_node_vars, highspy.HighsVarType.kInteger)
    highs.changeColsIntegrality(model.num_node_vars, integer, kinds)


def _solve_with_pulp(
    model: _Model, solver: str, time_limit_s: float
) -> tuple[np.ndarray | None, float, bool]:
    import pulp  # slow to import

    problem = pulp.LpProblem("sharding", pulp.LpMinimize)
    variables = [
        problem.add_variable(f"z{i}", 0, up, "Integer" if i < model.num_node_vars else "Continuous")
        for i, up in enumerate(model.upper.tolist())
    ]
    costs = zip(variables, model.cost.tolist(), strict=True)
    problem += pulp.lpSum([cost * variable for variable, cost in costs])
    by_row: list[list] = [[] for _ in model.rhs]
    for column, variable in enumerate(variables):
        for at in range(model.starts[column], model.starts[column + 1]):
            by_row[model.rows[at]].append(float(model.values[at]) * variable)
    for terms, rhs in zip(by_row, model.rhs.tolist(), strict=True):
        problem += pulp.lpSum(terms) == rhs
    status, has_solution = _pulp_outcome(
        problem, problem.solve(pulp.getSolver(solver, msg=False, timeLimit=time_limit_s))
    )
    if status == "Infeasible":
        check_feasible(np.inf)
    if not has_solution:
        if status in ("Undefined", "Error"):
            raise SolverError(f"{solver} failed ({status}). Use the default solver 'highs'.")
        return None, -np.inf, False
    solution = np.array([v.value() or 0.0 for v in variables])
    bound = float(model.cost @ solution) if status == "Optimal" else -np.inf
    return solution, bound, False


def _pulp_outcome(problem: Any, stats: Any) -> tuple[str, bool]:
    """(status, whether there is a solution). PuLP 4 returns them; PuLP 3 stores them in the
    problem, where an unproven solution also has the status "Optimal"."""
    if hasattr(stats, "has_solution"):
        return stats.status_str, stats.has_solution
    import pulp  # slow to import

    pulp_3: Any = pulp
    solved = (pulp_3.LpSolutionOptimal, pulp_3.LpSolutionIntegerFeasible)
    if problem.sol_status == pulp_3.LpSolutionIntegerFeasible:
        return "Feasible", True
    return pulp_3.LpStatus[problem.status], problem.sol_status in solved
