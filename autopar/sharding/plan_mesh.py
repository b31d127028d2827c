"""Intra-operator planning: from a traced step to a plan on one mesh.

graph   TracedStep                    → Graph           (tracer.build, tracer.rules)
meshes  cluster, method               → LogicalMesh …   (constraints, steering)
shard   Graph, LogicalMesh            → GraphSharding   (sharding.solve)
assign  GraphSharding                 → ProgramSharding (lower.assign)
plan    all of the above              → ParallelPlan    (assemble)
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from autopar.cost.report import cost_report
from autopar.errors import AutoparError, MemoryBudgetError, MeshError, SolverError, SpecError
from autopar.ir.graph import Graph, check_graph
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import ParallelPlan
from autopar.lower.assign import assign_layouts
from autopar.lower.planned_step import PlannedStep
from autopar.methods import ParallelMethod, PlacedParallel, ShardParallel
from autopar.progress import Progress, logged
from autopar.sharding.assemble import bind_plan, make_plan, replicated_plan
from autopar.sharding.budget import GOOD_GAP
from autopar.sharding.constraints import (
    candidate_meshes,
    divisible_meshes,
    options_of,
    solver_constraints,
)
from autopar.sharding.ilp import check_solver
from autopar.sharding.layout_constraints import (
    LayoutConstraints,
    with_output_nodes,
    without_moved_state,
)
from autopar.sharding.memory_budget import memory_budget, out_of_memory
from autopar.sharding.memory_limits import memory_floor
from autopar.sharding.origin import Origin, Pins, asked_with_pins, bound_origin
from autopar.sharding.solve import DoesNotFit, GraphSharding, fit_into_memory, solve_graph
from autopar.tracer.build import build_graph
from autopar.tracer.flatten import TracedStep

# What a pass is called on the terminal, where its name does not say it.
_DOING = {
    "trace": "tracing",
    "remat": "recomputation",
    "graph": "reading the program",
    "shard": "solving",
    "assign": "layouts",
    "tables": "tables of layers on submeshes",
    "search": "searching stages",
    "slice": "cutting stages",
}


@dataclass
class Considered:
    """Plans of the whole step that a search makes on its way, chosen or not; `num` are wanted."""

    num: int
    plans: list[PlannedStep] = field(default_factory=list)


@dataclass
class PassTimer:
    """Seconds per pass, in order. Passes are logged, and shown on a terminal. `considered` is
    there where plans that are not chosen are wanted too."""

    seconds: dict[str, float] = field(default_factory=dict)
    considered: Considered | None = None

    def consider(self, planned: PlannedStep) -> PlannedStep:
        if self.considered is not None:
            self.considered.plans.append(planned)
        return planned

    @contextmanager
    def __call__(self, name: str):
        started = time.perf_counter()
        with Progress(_DOING.get(name, name)), logged(name):
            yield
        spent = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + spent


def plan_traced(
    traced: TracedStep,
    *,
    cluster: ClusterSpec,
    method: ParallelMethod | PlacedParallel | ParallelPlan | LogicalMesh | None = None,
    mesh: LogicalMesh | None = None,
    timer: PassTimer | None = None,
    in_full: bool = True,
    pins: Pins | None = None,
    built: Graph | None = None,
) -> PlannedStep:
    """Every pass after tracing, up to the plan. Unless it is wanted in full, the error of a step
    that cannot fit comes at once and says only how much it needs. `pins`: specs that come before
    what the method asks for; `built`: the step's graph, if it is known."""
    timer = timer or PassTimer()
    method = method if method is not None else ShardParallel()
    if isinstance(method, ParallelPlan):
        bound = bind_plan(method, traced)
        if bound.origin is None:
            bound = replace(bound, origin=bound_origin(bound, traced, cluster))
        return PlannedStep(traced, bound)
    check_solver(options_of(method).solver)
    meshes = [mesh] if mesh is not None else candidate_meshes(cluster, method)
    if traced.remat and not in_full:  # one order of the axes will do for a try
        meshes = [m for m in meshes if m.shape[0] >= m.shape[-1]] or meshes
    asked = asked_with_pins(traced, method, pins or {})
    given, traced = traced, without_moved_state(traced, asked)
    with paused_garbage_collector():
        with timer("graph"):
            if built is None or traced is not given:  # state that moves is no state
                built = build_graph(traced)
            graph = with_output_nodes(built, asked)
            check_graph(graph)
        if meshes[0].num_devices == 1:
            plan = replicated_plan(traced, meshes[0], method, timer.seconds, graph, cluster)
            return PlannedStep(traced, plan)
        num_devices = meshes[0].num_devices
        meshes = divisible_meshes(graph, meshes, method, cluster)
        warnings = unused_devices(num_devices, meshes[0].num_devices)
        if meshes[0].num_devices == 1:
            plan = replicated_plan(traced, meshes[0], method, timer.seconds, graph, cluster)
            return PlannedStep(traced, replace(plan, warnings=(*warnings, *plan.warnings)))
        with timer("shard"):
            best = shard_on_best(graph, traced, meshes, method, asked, in_full)
        origin = Origin(
            traced=given,
            mesh=best.mesh,
            cluster=cluster,
            method=method,
            asked=asked,
            choice=best.choice,
            refetch=best.refetch,
            budget=memory_budget(best.mesh, method, options_of(method)),
            pins=pins or {},
            price=best.price_per_byte,
            built=built,
        )
        return planned_as(origin, best, timer, warnings)


def planned_as(
    origin: Origin,
    sharding: GraphSharding,
    timer: PassTimer | None = None,
    warnings: Sequence[str] = (),
) -> PlannedStep:
    """The plan in which the step of an origin is sharded so, whoever chose it."""
    timer = timer or PassTimer()
    traced, graph, mesh = origin.step, sharding.graph, sharding.mesh
    with timer("assign"):
        program = assign_layouts(
            traced.program, graph, sharding.layouts, mesh, refetch=sharding.refetch
        )
        report = cost_report(graph, mesh, sharding.layouts)
    plan = make_plan(
        traced,
        graph,
        sharding,
        program,
        report,
        origin.method,
        origin.cluster,
        timer.seconds,
        origin.budget,
    )
    own = replace(
        origin,
        choice=sharding.choice,
        refetch=sharding.refetch,
        price=sharding.price_per_byte,
    )
    return PlannedStep(traced, replace(plan, warnings=(*warnings, *plan.warnings), origin=own))


def unused_devices(given: int, used: int) -> tuple[str, ...]:
    if used == given:
        return ()
    return (
        f"{used} of {given} devices are used: no dimension of any array in the program is "
        f"divisible by the axes of a mesh of more. Pad the batch or the model's dimensions to "
        f"multiples of {given} to use all",
    )


@contextmanager
def paused_garbage_collector():
    """The passes make many small objects and no cycles; collecting amid them only costs time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# -- sharding


def shard_on_best(
    graph: Graph,
    traced: TracedStep,
    meshes: Sequence[LogicalMesh],
    method: Any,
    asked: LayoutConstraints,
    in_full: bool = True,
    known: dict[LogicalMesh, GraphSharding] | None = None,
) -> GraphSharding:
    """The best sharding over all meshes that fits into memory. A mesh on which what is asked for
    cannot be had is left out, as long as another is left. `known`: the best sharding of an equal
    graph on each mesh, memory aside; what is found here is added."""
    known = {} if known is None else known
    found: list[GraphSharding] = []
    refusals: dict[str, AutoparError] = {}
    with Progress("solving meshes", len(meshes)) as progress:
        for mesh in meshes:
            budget = None if in_full else memory_budget(mesh, method, options_of(method))
            if budget is not None and (floor := memory_floor(graph, mesh)) > budget:
                text = f"{traced.name} needs {floor:.0f} bytes per device or more"
                refusals[f"{mesh.shape}"] = MemoryBudgetError(text, floor, budget)
                continue
            try:
                if mesh not in known:
                    known[mesh] = shard(graph, traced, mesh, method, asked)
                found.append(known[mesh].of_graph(graph))
            except (MeshError, SolverError, SpecError) as error:
                refusals[f"{mesh.shape}"] = error
            progress.step()
    if found:
        return best_within_memory(found, traced, method)
    first, *others = refusals.values()
    too_large = [e for e in refusals.values() if isinstance(e, MemoryBudgetError)]
    if too_large:
        raise min(too_large, key=lambda error: error.peak_bytes)
    if all(str(other) == str(first) for other in others):
        raise first
    reasons = "\n".join(f"  {shape}: {error}" for shape, error in refusals.items())
    raise type(first)(f"no mesh of {meshes[0].num_devices} devices can be used:\n{reasons}")


def shard(
    graph: Graph, traced: TracedStep, mesh: LogicalMesh, method: Any, asked: LayoutConstraints
) -> GraphSharding:
    options = options_of(method)
    allowed, keep = solver_constraints(graph, traced, mesh, method, asked)
    return solve_graph(
        graph,
        mesh,
        allowed=allowed,
        keep=keep,
        solver=options.solver,
        time_limit_s=options.solver_time_limit_s,
        fold=options.fold_layers,
    )


def best_within_memory(
    shardings: Sequence[GraphSharding], traced: TracedStep, method: Any
) -> GraphSharding:
    """The best that fits into the devices' memory, given the best on each mesh without a budget. A
    mesh that is no better without one than another is with one, or hardly, is left at that."""
    options = options_of(method)
    free = sorted(shardings, key=lambda sharding: sharding.objective)
    best: GraphSharding | None = None
    misses: list[GraphSharding] = []
    for sharding in free:
        if best is not None and (1 - GOOD_GAP) * best.objective <= sharding.objective:
            break
        budget = memory_budget(sharding.mesh, method, options)
        if budget is None:
            found = sharding
        else:
            try:
                found = fit_into_memory(
                    sharding,
                    budget,
                    solver=options.solver,
                    time_limit_s=options.solver_time_limit_s,
                    cutoff=inf if best is None else (1 - GOOD_GAP) * best.objective,
                    first_price=0.0 if best is None else best.price_per_byte,
                )
            except DoesNotFit as miss:
                misses.append(miss.smallest)
                continue
        if best is None or found.objective < best.objective:
            best = found
    if best is None:
        raise out_of_memory(traced, misses, method, options)
    return best
