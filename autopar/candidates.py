"""Plans that a search could have chosen: from a planned step to others of the same step.

    Origin, meshes → the best few shardings over all of them, as plans     (`best_on_meshes`)
    Origin         → shardings that show what there is on one mesh         (`covering_on_mesh`)

Plans differ in how heavy operators of the forward pass are split, the *decisions*; everything else
is the best there is with that. The whole batch or micro-batches, and recomputed layers, are those
of the step the origin holds.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from autopar.errors import MeshError, SolverError, SpecError
from autopar.intra import PlannedStep, planned_as
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.origin import Origin
from autopar.sharding.kbest import (
    Labels,
    Solution,
    covering,
    sharding_of,
    solutions,
    strategy_labels,
)
from autopar.sharding.problem import ShardingProblem
from autopar.sharding.solve import GraphSharding, SolveStats

_SMALLEST_SHARE = 1e-3  # of the flops, from which an operator is a decision
_MOST_MISFITS = 50  # solutions in a row that do not fit, before a mesh is given up


def best_on_meshes(
    origin: Origin, meshes: Sequence[LogicalMesh], num: int, *, time_limit_s: float = inf
) -> list[PlannedStep]:
    """The `num` best that fit, over all these meshes, the best first."""
    deadline = time.monotonic() + time_limit_s
    ways = [_fitting(own) for own in map(lambda mesh: on_mesh(origin, mesh), meshes)]
    found = []
    for _, _, own, sharding in heapq.merge(*map(_ordered, ways, range(len(ways)))):
        found.append(planned_as(own, sharding))
        if len(found) >= num or time.monotonic() > deadline:
            break
    return found


def covering_on_mesh(origin: Origin, num: int, *, time_limit_s: float = inf) -> list[PlannedStep]:
    """At most `num` plans on the origin's mesh that show what there is, the best first."""
    problem = _problem(origin)
    found = covering(
        problem.pairwise,
        decisions(problem),
        num,
        deadline=time.monotonic() + time_limit_s,
        solver=origin.options.solver,
        time_limit_s=origin.options.solver_time_limit_s,
    )
    shardings = (_within(origin, sharding_of(problem, one)) for one in found)
    return [planned_as(origin, sharding) for sharding in shardings if sharding is not None]


def repriced(planned: PlannedStep, cluster: ClusterSpec) -> PlannedStep:
    """The same plan with the figures of another cluster: every operator is split as it was."""
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
    """The origin of the same step on another mesh, whose sharding is not known."""
    return replace(origin, mesh=mesh, choice=None, price=0.0, layouts=None)


def decisions(problem: ShardingProblem) -> Labels:
    """The classes whose strategies tell plans apart: products and convolutions of the forward pass,
    or all of them in a step without one."""
    graph = problem.graph
    nodes = {owner: graph.nodes[node] for owner, node in problem.representative.items()}
    heavy = {owner: node for owner, node in nodes.items() if node.is_heavy}
    forward = {owner: node for owner, node in heavy.items() if node.region == "forward"} or heavy
    flops = {owner: node.flops * node.weight for owner, node in forward.items()}
    least = _SMALLEST_SHARE * max(flops.values(), default=0.0)
    return strategy_labels(problem, [owner for owner in flops if flops[owner] >= least])


def _problem(origin: Origin) -> ShardingProblem:
    graph = origin.graph
    return origin.problem(graph, *origin.constraints(graph))


_Entry = tuple[float, int, Origin, GraphSharding]


def _ordered(way: Iterator[tuple[Origin, GraphSharding]], number: int) -> Iterator[_Entry]:
    for origin, sharding in way:
        yield sharding.objective, number, origin, sharding


def _fitting(origin: Origin) -> Iterator[tuple[Origin, GraphSharding]]:
    """Shardings on a mesh that fit into its devices' memory, the best first."""
    try:
        problem = _problem(origin)
    except (MeshError, SolverError, SpecError):  # what is asked for cannot be had here
        return
    options = origin.options
    misfits = 0
    found: Iterator[Solution] = solutions(
        problem.pairwise,
        decisions(problem),
        solver=options.solver,
        time_limit_s=options.solver_time_limit_s,
    )
    for one in found:
        sharding = _within(origin, sharding_of(problem, one))
        misfits = misfits + 1 if sharding is None else 0
        if sharding is not None:
            yield origin, sharding
        if misfits >= _MOST_MISFITS:
            return


def _within(origin: Origin, sharding: GraphSharding) -> GraphSharding | None:
    """The sharding as it fits into memory: as it is, or fetching again in the backward pass."""
    for own in (sharding, replace(sharding, refetch=True)):
        if origin.budget is None or own.memory.peak_bytes <= origin.budget:
            return own
    return None
