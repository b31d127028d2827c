"""Intra-operator planning: from a traced step to its plan on one mesh.

    graph    TracedStep             → Graph            (tracer.build, tracer.rules)
    meshes   cluster, method        → LogicalMesh …    (sharding.constraints)
    shard    Graph, LogicalMesh     → GraphSharding    (sharding.solve), the best mesh that fits
    assign   GraphSharding          → ProgramSharding  (lower.assign)
    plan     all of the above       → ParallelPlan     (sharding.assemble)

A whole step and each stage of a pipeline are planned by the same passes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from autopar.errors import AutoparError, MemoryBudgetError, MeshError, SolverError, SpecError
from autopar.ir.failures import Failure, planning_failed
from autopar.ir.graph import Graph, check_graph
from autopar.ir.mesh import ClusterSpec, LogicalMesh, last_axis
from autopar.ir.plan import ParallelPlan
from autopar.ir.program_sharding import ProgramSharding
from autopar.ir.traced_step import TracedStep
from autopar.ir.xla_options import hides_latency
from autopar.lower.assign import assign_layouts
from autopar.lower.planned_step import PlannedStep
from autopar.methods import OneMeshMethod, options_of
from autopar.progress import Progress
from autopar.sharding.assemble import bind_plan, mesh_plan, one_device_decision, sharded_decision
from autopar.sharding.budget import GOOD_GAP, Enough
from autopar.sharding.constraints import (
    candidate_meshes,
    divisible_meshes,
    solver_constraints,
)
from autopar.sharding.deadline import Deadline
from autopar.sharding.ilp import check_solver
from autopar.sharding.known_folds import KnownFolds
from autopar.sharding.layout_constraints import (
    LayoutConstraints,
    with_output_nodes,
    without_moved_state,
)
from autopar.sharding.memory_budget import Miss, corrected, memory_budget, out_of_memory
from autopar.sharding.memory_limits import memory_floor
from autopar.sharding.origin import GraphChange, Origin, Pins, bound_origin, constraints_with_pins
from autopar.sharding.planning_log import PlanningLog, paused_garbage_collector
from autopar.sharding.problem import FoldedGraph
from autopar.sharding.solve import (
    DoesNotFit,
    GraphSharding,
    fit_into_memory,
    solve_graph,
)
from autopar.sharding.tried import with_failures

# Share of the time left in which all meshes should be solved without a budget.
_SOLVING = 0.5
_SAME = 1e-6  # a mesh that could gain no more than this is not solved to the end
# Share of a step's flops that may run replicated because autopar failed to find rules.
MOST_UNRULED = 0.1


@dataclass(frozen=True)
class ShardingTask:
    """A step to plan on one mesh.

    mesh:        the mesh; None for the best of those that the method may use.
    pins:        specs that come before what the method asks for; part of `constraints`.
    constraints: what is asked of arrays; by the method and the pins, if None.
    change:      what becomes of the graph before it is solved; a stage holds several micro-batches.
    built:       the step's graph, if it is known.
    known:       mesh -> the best sharding of an equal graph, memory aside; new ones are added.
    in_full:     explain a step that cannot fit; else its error comes at once, with bytes only.
    every_order: look at every order of a mesh's axes; else, for a try, at one.
    cutoff:      seconds of a plan at hand: among plans that take as long, any will do.
    first_price: per byte, at which a similar step fitted; 0 if unknown.
    enough:      among plans that fit, the first that is so good will do; None for the best.
    overlaps:    count that collectives run under compute; not in a stage, whose programs are short.
    """

    step: TracedStep
    cluster: ClusterSpec
    method: OneMeshMethod
    mesh: LogicalMesh | None = None
    pins: Pins = field(default_factory=dict)
    constraints: LayoutConstraints | None = None
    change: GraphChange | None = None
    built: Graph | None = None
    known: dict[LogicalMesh, GraphSharding] | None = None
    in_full: bool = True
    every_order: bool = True
    cutoff: float = inf
    first_price: float = 0.0
    enough: Enough | None = None
    overlaps: bool = False


@dataclass(frozen=True)
class MeshProblem:
    """A task with its graph, and the meshes to solve it on. `built`: the graph before `change`."""

    task: ShardingTask
    step: TracedStep
    constraints: LayoutConstraints
    built: Graph
    graph: Graph
    meshes: list[LogicalMesh]
    warnings: tuple[str, ...]
    folds: KnownFolds = field(default_factory=KnownFolds)

    @cached_property
    def folded(self) -> FoldedGraph:
        return self.folds.of(self.graph, fold=options_of(self.task.method).fold_layers)


@dataclass(frozen=True)
class MeshSolution:
    """The best sharding of a problem, and what it was made of."""

    origin: Origin
    sharding: GraphSharding
    warnings: tuple[str, ...]


def plan_mesh(task: ShardingTask, log: PlanningLog | None = None) -> PlannedStep:
    """The plan of a step on one mesh. On a single device there is nothing to search: the step fits
    as it is, or not."""
    log = log or PlanningLog()
    problem = mesh_problem(task, log)
    if problem.meshes[0].num_devices == 1:
        return _on_one_device(problem, log)
    solution = solve_mesh(problem, log)
    log.work_s = solution.sharding.problem.work_s
    return planned_as(solution.origin, solution.sharding, log, solution.warnings)


def mesh_problem(task: ShardingTask, log: PlanningLog) -> MeshProblem:
    """The graph of a step under its constraints."""
    options = options_of(task.method)
    check_solver(options.solver)
    constraints = task.constraints or constraints_with_pins(task.step, task.method, task.pins)
    step = without_moved_state(task.step, constraints)
    with paused_garbage_collector(), log.timed("graph"):
        machine = task.mesh or task.cluster
        built = task.built if step is task.step else None
        if built is None:
            built = log.graphs.of(
                step,
                overlaps=machine.num_devices > 1 and hides_latency(options.xla_options),
                instructions_per_byte=machine.instructions_per_byte,
            )
        graph = with_output_nodes(built, constraints)
        graph = graph if task.change is None else task.change(graph)
        graph = corrected(graph, step, task.method)
        check_graph(graph)
    _check_rules(built, step)
    meshes, warnings = _meshes(task, graph)
    return MeshProblem(task, step, constraints, built, graph, meshes, warnings, log.folds)


def peak_floor(task: ShardingTask, log: PlanningLog) -> float:
    """A lower bound on the peak of every plan of a step, on any of its meshes."""
    problem = mesh_problem(task, log)
    return min(memory_floor(problem.graph, mesh) for mesh in problem.meshes)


def cheapest_peak(problem: MeshProblem, log: PlanningLog) -> float:
    """The peak of the cheapest sharding, memory aside, on the mesh where it takes the least. It is
    remembered in `known` for whoever solves the problem."""
    refusals: dict[LogicalMesh, AutoparError] = {}
    with paused_garbage_collector(), log.timed("shard"):
        shardings, _ = _solved_meshes(problem, problem.meshes, log.deadline, refusals, [], log)
        if not shardings:
            raise _refusal(refusals)
        return min(replace(s, refetch=True).memory.peak_bytes for s in shardings)


def solve_mesh(problem: MeshProblem, log: PlanningLog) -> MeshSolution:
    """The best sharding on the best mesh."""
    with paused_garbage_collector(), log.timed("shard"):
        return solution_as(problem, _best_sharding(problem, log))


def solution_as(problem: MeshProblem, best: GraphSharding) -> MeshSolution:
    """The solution of a problem that has this sharding, whoever found it."""
    task = problem.task
    origin = Origin(
        traced=task.step,
        mesh=best.mesh,
        cluster=task.cluster,
        method=task.method,
        constraints=problem.constraints,
        choice=best.choice,
        refetch=best.refetch,
        budget=memory_budget(best.mesh, task.method),
        pins=task.pins,
        price=best.price_per_byte,
        built=problem.built,
        change=task.change,
        overlaps=best.problem.hidden is not None,
    )
    return MeshSolution(origin, best, problem.warnings)


def planned_as(
    origin: Origin,
    sharding: GraphSharding,
    log: PlanningLog | None = None,
    warnings: Sequence[str] = (),
    program: ProgramSharding | None = None,
) -> PlannedStep:
    """The plan in which the step of an origin has this sharding, whoever chose it. `program`: its
    layouts on the program, if known."""
    log = log or PlanningLog()
    step = origin.step
    with paused_garbage_collector(), log.timed("assign"):
        if program is None:
            program = assign_layouts(
                step.program,
                sharding.graph,
                sharding.layouts,
                sharding.mesh,
                refetch=sharding.refetch,
            )
    decision = sharded_decision(step, sharding, program, origin.budget, log.seconds)
    plan = mesh_plan(step, origin.method, origin.cluster, decision)
    origin = replace(
        origin,
        choice=sharding.choice,
        refetch=sharding.refetch,
        price=sharding.price_per_byte,
    )
    return PlannedStep(step, replace(plan, warnings=(*warnings, *plan.warnings), origin=origin))


def _on_one_device(problem: MeshProblem, log: PlanningLog) -> PlannedStep:
    task, step = problem.task, problem.step
    mesh = problem.meshes[0]
    budget = memory_budget(mesh, task.method)
    decision = one_device_decision(step, problem.graph, mesh, log.seconds, budget)
    if budget is not None and decision.memory.peak_bytes > budget:
        miss = Miss(problem.graph, mesh, decision.memory)
        raise out_of_memory(step, [miss], task.method)
    plan = mesh_plan(step, task.method, task.cluster, decision)
    return PlannedStep(step, replace(plan, warnings=(*problem.warnings, *plan.warnings)))


def bind_mesh_plan(plan: ParallelPlan, step: TracedStep, cluster: ClusterSpec) -> PlannedStep:
    """A plan that was made elsewhere, for this step."""
    bound = bind_plan(plan, step)
    if bound.origin is None:
        bound = replace(bound, origin=bound_origin(bound, step, cluster))
    return PlannedStep(step, bound)


# -- meshes


def _meshes(task: ShardingTask, graph: Graph) -> tuple[list[LogicalMesh], tuple[str, ...]]:
    """The meshes to solve on, and a warning if they leave devices unused."""
    given = [task.mesh] if task.mesh is not None else candidate_meshes(task.cluster, task.method)
    if not task.every_order:
        given = [m for m in given if m.shape[0] >= m.shape[-1]] or given
    available = given[0].num_devices
    if available == 1:
        return given, ()
    meshes = divisible_meshes(graph, given, task.method, task.cluster)
    used = meshes[0].num_devices
    if used == available:
        return meshes, ()
    return meshes, (
        f"{used} of {available} devices are used: no dimension of any array in the program is "
        f"divisible by the axes of a mesh of more. Pad the batch or the model's dimensions to "
        f"multiples of {available} to use all",
    )


# -- sharding


def _best_sharding(problem: MeshProblem, log: PlanningLog) -> GraphSharding:
    """The best sharding over all meshes that fits into memory. A mesh on which the constraints
    cannot be met, or autopar fails, is left out, as long as another remains."""
    refusals: dict[LogicalMesh, AutoparError] = {}
    failures: list[Failure] = []
    misses: list[Miss] = []
    step, meshes = problem.step, problem.meshes
    if log.deadline.is_short:  # few are solved: the most promising first
        meshes = sorted(meshes, key=lambda mesh: log.axis_costs.get(last_axis(mesh.shape), inf))
    part = log.deadline.part(_SOLVING if len(meshes) > 1 else 1.0)
    while True:
        shardings, later = _solved_meshes(problem, meshes, part, refusals, failures, log)
        if not shardings:
            break
        try:
            return _best_within_memory(shardings, problem, failures, misses, log)
        except MemoryBudgetError:
            if not later:
                raise
        meshes = later
    if refusals and isinstance(error := _refusal(refusals), MemoryBudgetError):
        raise with_failures(error, failures)
    if failures:
        raise planning_failed(step.name, failures, "no mesh could be solved")
    raise _refusal(refusals)


def _solved_meshes(
    problem: MeshProblem,
    meshes: Sequence[LogicalMesh],
    deadline: Deadline,
    refusals: dict[LogicalMesh, AutoparError],
    failures: list[Failure],
    log: PlanningLog,
) -> tuple[list[GraphSharding], list[LogicalMesh]]:
    """The best shardings without a budget, and the meshes for which there was no time. One mesh at
    least is solved."""
    task, graph = problem.task, problem.graph
    known = {} if task.known is None else task.known
    shardings: list[GraphSharding] = []
    best = inf
    took_s = 0.0
    with Progress("solving meshes", len(meshes)) as progress:
        for number, mesh in enumerate(meshes):
            if shardings and not deadline.allows(took_s):
                deadline.cut(f"{len(meshes) - number} of {len(meshes)} meshes")
                return shardings, list(meshes[number:])
            started = time.monotonic()
            budget = None if task.in_full else memory_budget(mesh, task.method)
            try:
                if budget is not None and (floor := memory_floor(graph, mesh)) > budget:
                    text = f"{problem.step.name} needs {floor:.0f} bytes per device or more"
                    refusals[mesh] = MemoryBudgetError(text, floor, budget)
                    continue
                if mesh not in known:
                    cutoff = (1 - _SAME) * best
                    left = len(meshes) - number
                    known[mesh] = _sharding_on(mesh, problem, deadline, left, cutoff)
                shardings.append(known[mesh].of_graph(graph))
                best = min(best, shardings[-1].objective)
            except (MeshError, SolverError, SpecError) as error:
                refusals[mesh] = error
            except Exception as error:
                failures += log.contain(_named(mesh), error)
            took_s = time.monotonic() - started
            progress.step()
    return shardings, []


def _named(mesh: LogicalMesh) -> str:
    return f"mesh {mesh.shape}"


def _refusal(refusals: Mapping[LogicalMesh, AutoparError]) -> AutoparError:
    """One error for a step that no mesh takes."""
    first, *others = refusals.values()
    too_large = [e for e in refusals.values() if isinstance(e, MemoryBudgetError)]
    if too_large:
        return min(too_large, key=lambda error: error.peak_bytes)
    if all(str(other) == str(first) for other in others):
        return first
    reasons = "\n".join(f"  {mesh.shape}: {error}" for mesh, error in refusals.items())
    num_devices = next(iter(refusals)).num_devices
    return type(first)(f"no mesh of {num_devices} devices can be used:\n{reasons}")


def _sharding_on(
    mesh: LogicalMesh,
    problem: MeshProblem,
    deadline: Deadline,
    num_left: int = 1,
    cutoff: float = inf,
) -> GraphSharding:
    """`num_left`: the meshes that still have to be solved, with this one; `cutoff`: once nothing
    can cost less, any solution will do."""
    method, options = problem.task.method, options_of(problem.task.method)
    allowed, keep = solver_constraints(
        problem.graph, problem.step, mesh, method, problem.constraints
    )
    return solve_graph(
        problem.graph,
        mesh,
        allowed=allowed,
        keep=keep,
        solver=options.solver,
        time_limit_s=deadline.seconds(options.solver_time_limit_s, max(0.5, 0.9 / num_left)),
        folded=problem.folded,
        cutoff=cutoff,
        overlaps=problem.task.overlaps,
    )


def _best_within_memory(
    shardings: Sequence[GraphSharding],
    problem: MeshProblem,
    failures: list[Failure],
    misses: list[Miss],
    log: PlanningLog,
) -> GraphSharding:
    """The best that fits into the devices' memory, given the best on each mesh without a budget. A
    mesh whose unbounded optimum hardly beats a plan that fits is not looked at again. `failures`
    and `misses`: of other meshes too."""
    method = problem.task.method
    options = options_of(method)
    best: GraphSharding | None = None
    took_s, cutoff = 0.0, problem.task.cutoff
    # Of two that may cost the same, the one that is known to comes first.
    for sharding in sorted(shardings, key=lambda s: s.floor * (1 + 2 * _SAME * s.is_rough)):
        if (best is not None or misses) and sharding.floor >= cutoff:
            break
        if best is not None and (1 - GOOD_GAP) * best.objective <= sharding.floor:
            break
        again_s = sum(sharding.stats.seconds.values()) if sharding.is_rough else 0.0
        if best is not None and not log.deadline.allows(took_s + again_s):
            log.deadline.cut("meshes that memory makes slower")
            break
        started = time.monotonic()
        if sharding.is_rough:  # what was better does not fit
            sharding = _sharding_on(sharding.mesh, problem, log.deadline)
        budget = memory_budget(sharding.mesh, method)
        if budget is not None:
            try:
                sharding = fit_into_memory(
                    sharding,
                    budget,
                    solver=options.solver,
                    time_limit_s=log.deadline.seconds(options.solver_time_limit_s),
                    cutoff=min(cutoff, inf if best is None else (1 - GOOD_GAP) * best.objective),
                    first_price=problem.task.first_price if best is None else best.price_per_byte,
                    enough=problem.task.enough,
                )
            except DoesNotFit as miss:
                smallest = miss.smallest
                misses.append(Miss(smallest.graph, smallest.mesh, smallest.memory))
                continue
            except Exception as error:
                failures += log.contain(_named(sharding.mesh), error)
                continue
        took_s = time.monotonic() - started
        if best is None or sharding.objective < best.objective:
            best = sharding
    if best is not None:
        return best
    if not misses:
        raise planning_failed(problem.step.name, failures, "no mesh could be solved")
    raise with_failures(out_of_memory(problem.step, misses, method), failures)


# -- operators without a rule


def _check_rules(graph: Graph, step: TracedStep) -> None:
    """Refuse a graph much of whose work is replicated because autopar failed to find rules."""
    failed = [op for op in graph.unruled if op.failure is not None]
    flops = sum(op.flops for op in failed)
    total = sum(node.weight * node.flops for node in graph.nodes)
    if flops > MOST_UNRULED * total:
        raise planning_failed(
            step.name,
            [op.failure for op in failed if op.failure is not None],
            f"without their rules, operators with {flops / total:.0%} of the step's flops would "
            "run replicated on every device",
            concerns_step=True,
        )
