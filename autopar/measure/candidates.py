"""Plans that a search could have chosen: from a planned step to others of the same step.

    function, arguments, method → the best few plans of the search         (`plan_candidates`)
    Origin, meshes → the best few shardings over all of them, as plans     (`best_on_meshes`)
    Origin         → shardings that show what there is on one mesh         (`covering_on_mesh`)

On one mesh, plans differ in their *decisions*: how the heavy operators of the forward pass are
split. Everything else is optimal given the decisions. Micro-batches, recomputed layers and stages
vary as far as the search explored them.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any

import numpy as np

from autopar.compiler import plan_step
from autopar.cost.merging import OPTION
from autopar.errors import MemoryBudgetError, MeshError, SolverError, SpecError
from autopar.ir.identity import placement, plan_digest
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.spec import Layout
from autopar.ir.xla_options import overridden, stored_options
from autopar.lower.planned_step import PlannedStep
from autopar.methods import AutoParallel, ParallelMethod, ShardParallel, options_of
from autopar.sharding.blocks import is_entry
from autopar.sharding.constraints import candidate_meshes
from autopar.sharding.kbest import (
    Labels,
    Solution,
    covering,
    sharding_of,
    solutions,
    strategy_labels,
)
from autopar.sharding.memory_budget import memory_budget
from autopar.sharding.memory_limits import Holdings
from autopar.sharding.origin import Origin
from autopar.sharding.plan_mesh import planned_as
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.problem import ShardingProblem
from autopar.sharding.reduce import PairwiseProblem
from autopar.sharding.solve import DoesNotFit, GraphSharding, SolveStats, fit_into_memory
from autopar.tracer.trace import StepOptions

_SMALLEST_SHARE = 1e-3  # of the largest operator's FLOPs, for an operator to be a decision
_MOST_PROGRAMS = 2  # for which other plans on one mesh are searched
_MORE = 1.5  # times the price at which fitting and not fitting cost the same
_MOST_MISFITS = 200  # consecutive solutions that do not fit, before giving up a mesh


def plan_candidates(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    cluster: ClusterSpec,
    method: ParallelMethod | None,
    options: StepOptions | None,
    num: int,
) -> list[PlannedStep]:
    """The search's choice and other plans, at most `num`, the best predicted first."""
    log = PlanningLog(num_alternatives=num)
    chosen = plan_step(
        fn,
        args,
        kwargs,
        cluster=cluster,
        method=method,
        options=options,
        log=log,
    )
    plans = [chosen, *log.alternatives]
    # The best plan of each program (micro-batches, recomputed layers) gives others.
    programs: dict[str, PlannedStep] = {}
    for planned in sorted(plans, key=_predicted_s):
        if isinstance(planned.plan.origin, Origin):
            programs.setdefault(planned.plan.fingerprint.program, planned)
    for planned in list(programs.values())[:_MOST_PROGRAMS]:
        plans += best_on_meshes(planned.plan.origin, _meshes(planned, cluster, method), num)
    overlapping = _overlapping(method, cluster) if num > 1 else None
    if overlapping is not None:
        with suppress(MemoryBudgetError):
            plans.append(
                plan_step(fn, args, kwargs, cluster=cluster, method=overlapping, options=options)
            )
    different = {plan_digest(planned.plan): planned for planned in reversed(plans)}
    # Steps that count overlap are predicted to be shorter, so the best of them comes first.
    ranked = sorted(different.values(), key=_predicted_s)
    others = [p for p in ranked if p is not different[plan_digest(chosen.plan)]]
    best = sorted([chosen, *others[: num - 1]], key=_predicted_s)
    # How far to merge collectives is each plan's own choice, unless the user said it.
    merging = OPTION.values()
    shared = tuple(o for o in chosen.plan.xla_options or () if o[0] not in merging)
    given = stored_options(options_of(method).xla_options)
    return [
        replace(p, plan=replace(p.plan, xla_options=overridden(p.plan.xla_options, shared + given)))
        for p in best
    ]


def _overlapping(method: ParallelMethod | None, cluster: ClusterSpec) -> ParallelMethod | None:
    """The method that counts overlap, where it may choose another plan; else None."""
    hides = cluster.num_hosts == 1 and cluster.num_devices > 1 and cluster.spec.hides_collectives
    method = method or AutoParallel()
    if not hides or not isinstance(method, (AutoParallel, ShardParallel)) or method.options.overlap:
        return None
    return replace(method, options=replace(method.options, overlap=True, rerank=0))


def _predicted_s(planned: PlannedStep) -> float:
    return planned.plan.estimated_step_s


def _meshes(
    planned: PlannedStep, cluster: ClusterSpec, method: ParallelMethod | None
) -> list[LogicalMesh]:
    """The meshes that the method allows, with as many devices as the plan's."""
    origin = planned.plan.origin
    if method is not None and getattr(method, "mesh_shape", "auto") != "auto":
        return [origin.mesh]
    meshes = candidate_meshes(cluster, ShardParallel(options=origin.options))
    same = [mesh for mesh in meshes if mesh.num_devices == origin.mesh.num_devices]
    return same or [origin.mesh]


def best_on_meshes(
    origin: Origin, meshes: Sequence[LogicalMesh], num: int, *, time_limit_s: float = inf
) -> list[PlannedStep]:
    """The `num` best plans that fit: up to half of them the best of each mesh, the rest the best
    over all meshes."""
    deadline = time.monotonic() + time_limit_s
    streams = [_ordered(_fitting(on_mesh(origin, m)), number) for number, m in enumerate(meshes)]
    heads = sorted(entry for stream in streams if (entry := next(stream, None)) is not None)
    plans: dict[tuple, PlannedStep] = {}
    for _, _, mesh_origin, sharding in chain(
        heads[: max(1, num // 2)], heapq.merge(heads[max(1, num // 2) :], *streams)
    ):
        key = _places(sharding)
        if key not in plans:
            plans[key] = planned_as(mesh_origin, sharding)
        if len(plans) >= num or time.monotonic() > deadline:
            break
    return list(plans.values())


def _places(sharding: GraphSharding) -> tuple:
    """The placement of every operand and result; equal on meshes of other shapes whose axes are
    always used together."""
    shape = sharding.mesh.shape
    known: dict[Layout, tuple] = {}
    places = []
    for operands, results in sharding.layouts:
        for layout in (*operands, *results):
            if layout not in known:
                known[layout] = placement(layout, shape)
            places.append(known[layout])
    return tuple(places)


def covering_on_mesh(origin: Origin, num: int, *, time_limit_s: float = inf) -> list[PlannedStep]:
    """At most `num` plans on the origin's mesh that cover its decisions, the best first."""
    problem = _problem(origin)
    ranked = covering(
        problem.pairwise,
        decisions(problem),
        num,
        deadline=time.monotonic() + time_limit_s,
        solver=origin.options.solver,
        time_limit_s=origin.options.solver_time_limit_s,
    )
    shardings = (_within(origin, sharding_of(problem, solution)) for solution in ranked)
    return [planned_as(origin, sharding) for sharding in shardings if sharding is not None]


def repriced(planned: PlannedStep, cluster: ClusterSpec) -> PlannedStep:
    """The same sharding with the costs of another cluster."""
    origin = planned.plan.origin
    assert isinstance(origin, Origin) and origin.choice is not None
    mesh = mesh_of_cluster(cluster, origin.mesh.shape)
    mesh = replace(mesh, axis_names=origin.mesh.axis_names, forbidden=origin.mesh.forbidden)
    other = replace(on_mesh(origin, mesh), cluster=cluster)
    problem = _problem(other)
    choice = dict(origin.choice)
    objective = problem.pairwise.objective(choice)
    stats = SolveStats(len(problem.graph.nodes), len(problem.strategies), 0, 0, 0, 0, True)
    sharding = GraphSharding(problem, choice, objective, objective, stats, refetch=origin.refetch)
    return planned_as(other, sharding)


def on_mesh(origin: Origin, mesh: LogicalMesh) -> Origin:
    """The same step on another mesh, not yet sharded."""
    budget = memory_budget(mesh, origin.method)
    return replace(origin, mesh=mesh, budget=budget, choice=None, price=0.0, layouts=None)


def decisions(problem: ShardingProblem) -> Labels:
    """The classes whose strategies tell plans apart: block entries of the forward pass that are
    products, convolutions or kernels; without a forward pass, all of them."""
    graph = problem.graph
    nodes = {owner: graph.nodes[node] for owner, node in problem.representative.items()}
    heavy = {u: node for u, node in nodes.items() if node.is_heavy or node.rule.local}
    heavy = {u: node for u, node in heavy.items() if is_entry(node)}
    forward = {u: node for u, node in heavy.items() if node.region == "forward"} or heavy
    flops = {u: node.flops * node.weight for u, node in forward.items()}
    least = _SMALLEST_SHARE * max(flops.values(), default=0.0)
    return strategy_labels(problem, [u for u in flops if flops[u] >= least])


def _problem(origin: Origin) -> ShardingProblem:
    graph = origin.graph
    return origin.problem(graph, *origin.solver_constraints(graph))


_Entry = tuple[float, int, Origin, GraphSharding]


def _ordered(way: Iterator[tuple[Origin, GraphSharding]], number: int) -> Iterator[_Entry]:
    for origin, sharding in way:
        yield sharding.objective, number, origin, sharding


def _fitting(origin: Origin) -> Iterator[tuple[Origin, GraphSharding]]:
    """Shardings on a mesh that fit into memory, the best first. If the best does not fit, bytes get
    a price, and the order is by cost including it."""
    try:
        problem = _problem(origin)
    except (MeshError, SolverError, SpecError):  # infeasible on this mesh
        return
    options = origin.options
    labels = decisions(problem)
    how = {"solver": options.solver, "time_limit_s": options.solver_time_limit_s}
    every = solutions(problem.pairwise, labels, **how)
    first = next(every, None)
    if first is None:
        return
    best = _within(origin, sharding_of(problem, first))
    if best is None:
        assert origin.budget is not None
        try:
            best = fit_into_memory(sharding_of(problem, first), origin.budget, **how)
        except DoesNotFit:
            return
        every = solutions(_priced(problem, first, best, origin.budget), labels, **how)
    yield origin, best
    misfits = 0
    for solution in every:
        if solution.choice == best.choice:
            continue
        unpriced = replace(solution, objective=problem.pairwise.objective(solution.choice))
        sharding = _within(origin, sharding_of(problem, unpriced))
        misfits = misfits + 1 if sharding is None else 0
        if sharding is not None:
            yield origin, sharding
        if misfits >= _MOST_MISFITS:
            return


def _priced(
    problem: ShardingProblem, first: Solution, fitting: GraphSharding, budget: float
) -> PairwiseProblem:
    """The problem with a price on bytes held when the first solution peaks, a little above the
    price at which the fitting one was found."""
    holdings = Holdings(problem, budget)
    row = holdings.row(int(np.argmax(holdings.bytes_at(first.choice))))
    priced = problem.pairwise.copy()
    row.add_to(priced, _MORE * fitting.price_per_byte)
    return priced


def _within(origin: Origin, sharding: GraphSharding) -> GraphSharding | None:
    """The sharding if it fits into memory, unchanged or with gathers repeated in the backward
    pass; else None."""
    for variant in (sharding, replace(sharding, refetch=True)):
        if origin.budget is None or variant.memory.peak_bytes <= origin.budget:
            return variant
    return None
