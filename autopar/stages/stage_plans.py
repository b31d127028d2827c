"""A plan for every stage of a pipeline: from `StageSlice`s and submeshes to `ParallelPlan`s.

`sharding.plan_mesh` plans each stage's step as it plans a whole step, on the meshes of its submesh.
Only memory differs: of every micro-batch in flight a stage keeps what its backward stage program
reads. Equal stages (the blocks in the middle of a transformer) are solved once, and so is a stage
that several pipelines have: `KnownStages` remembers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from jax.sharding import PartitionSpec

from autopar.errors import MemoryBudgetError
from autopar.ir.graph import Graph
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import ParallelPlan
from autopar.ir.program import Program
from autopar.ir.program_sharding import ProgramSharding, renumbered
from autopar.ir.stages import LayerTable, Submesh
from autopar.methods import ShardingOptions, ShardParallel
from autopar.rewrite.stage_slices import StageSlice
from autopar.sharding.budget import Enough, is_good
from autopar.sharding.layout_constraints import (
    LayoutConstraints,
    constrain_layouts,
    matching_paths,
    overridden,
    unconstrained,
)
from autopar.sharding.origin import Pins
from autopar.sharding.plan_mesh import (
    MeshProblem,
    MeshSolution,
    ShardingTask,
    cheapest_peak,
    mesh_problem,
    planned_as,
    solution_as,
    solve_mesh,
)
from autopar.sharding.planning_log import PlanningLog
from autopar.sharding.solve import GraphSharding
from autopar.stages.layer_tables import stage_costs, submesh_cluster
from autopar.stages.stage_memory import KnownInFlight, in_flight_of
from autopar.tracer.equal_graphs import numbers_in
from autopar.tracer.fingerprint import program_fingerprint


@dataclass
class KnownStages:
    """What is known of stages that were solved, by program and submesh.

    unbounded: -> mesh -> the best sharding there, memory aside.
    fitted:    , mesh shape and micro-batches in flight -> the sharding that fits.
    misfits:   , likewise, and name of the stage -> why none does.
    costs:     , mesh and choice -> the stage's costs.
    programs:  , likewise -> a program, and the layouts on it.
    in_flight: the graph of the stage that was looked at last.
    """

    unbounded: dict[tuple, dict[LogicalMesh, GraphSharding]] = field(default_factory=dict)
    fitted: dict[tuple, GraphSharding] = field(default_factory=dict)
    misfits: dict[tuple, MemoryBudgetError] = field(default_factory=dict)
    costs: dict[tuple, LayerTable] = field(default_factory=dict)
    programs: dict[tuple, tuple[Program, ProgramSharding]] = field(default_factory=dict)
    in_flight: KnownInFlight = field(default_factory=KnownInFlight)


@dataclass(frozen=True)
class StageTask:
    """A stage to plan, where it runs, and how many micro-batches it keeps.

    mesh_shape: None for any.
    in_specs:   specs that its inputs must have, None for any; empty for any at all.
    built:      the graph of its step, if known.
    enough:     a sharding that needs no better; None for the best.
    """

    slice: StageSlice
    submesh: Submesh
    mesh_shape: tuple[int, ...] | None
    in_flight: int
    in_specs: tuple[PartitionSpec | None, ...] = ()
    built: Graph | None = None
    enough: Enough | None = None


@dataclass(frozen=True)
class SolvedStage:
    """A stage's plan, and its costs as a table of one layer. `objective`, `lower_bound`: seconds of
    the stage in a step, as the solver counts them."""

    plan: ParallelPlan
    costs: LayerTable
    objective: float
    lower_bound: float


class StageTooLarge(Exception):
    """A stage that fits on no mesh of its submesh. Internal."""

    def __init__(self, stage: int, error: MemoryBudgetError) -> None:
        super().__init__(stage)
        self.stage, self.error = stage, error


def plan_stage(
    number: int,
    task: StageTask,
    cluster: ClusterSpec,
    options: ShardingOptions,
    pins: Pins,
    known: KnownStages,
    log: PlanningLog,
) -> SolvedStage:
    """Plan one stage; raises `StageTooLarge` if it does not fit. `pins` come before the options;
    `known` remembers what equal stages have in common."""
    mesh_task = _mesh_task(task, cluster, options, pins, known)
    first_price = log.prices.get(task.submesh, 0.0)
    mesh_task = replace(mesh_task, first_price=first_price, enough=task.enough)
    key = _stage_key(task, options, pins)
    problem = mesh_problem(mesh_task, log)
    try:
        solution = _fitted(problem, (*key, task.mesh_shape, task.in_flight), known, log)
    except MemoryBudgetError as error:
        raise StageTooLarge(number, error) from error
    sharding = solution.sharding
    if task.submesh == (cluster.num_hosts, cluster.devices_per_host):
        log.work_s = sharding.problem.work_s
    if sharding.price_per_byte:
        log.prices[task.submesh] = sharding.price_per_byte
    with log.timed("assign"):
        choice = (*key, sharding.mesh, tuple(sharding.choice.items()), sharding.refetch)
        program = _known_layouts(choice, solution.origin.step.program, known)
        planned = planned_as(solution.origin, sharding, warnings=solution.warnings, program=program)
        known.programs[choice] = planned.traced.program, planned.plan.program
        if choice not in known.costs:
            known.costs[choice] = stage_costs(sharding, task.slice, task.submesh)
    costs = known.costs[choice]
    return SolvedStage(planned.plan, costs, sharding.objective, sharding.lower_bound)


def _known_layouts(key: tuple, program: Program, known: KnownStages) -> ProgramSharding | None:
    """The layouts on a stage's program, if an equal stage with this choice was planned."""
    if key not in known.programs:
        return None
    other, layouts = known.programs[key]
    return renumbered(layouts, numbers_in(other, program))


def _fitted(problem: MeshProblem, key: tuple, known: KnownStages, log: PlanningLog) -> MeshSolution:
    """The best sharding that fits, or that of an equal stage which was solved before."""
    named = (*key, problem.step.name)
    if named in known.misfits:
        raise known.misfits[named]
    found = _known_to_fit(problem, key, known)
    if found is not None:
        is_enough = is_good(found.objective, found.gap, problem.task.enough)
        if is_enough or not log.deadline.allows():
            return solution_as(problem, found.of_graph(problem.graph))
    try:
        solution = solve_mesh(problem, log)
    except MemoryBudgetError as error:
        known.misfits[named] = error
        raise
    known.fitted[key] = solution.sharding
    return solution


def _known_to_fit(problem: MeshProblem, key: tuple, known: KnownStages) -> GraphSharding | None:
    """The sharding of an equal stage; else of the nearest one that keeps more micro-batches, which
    fits all the more. Of the latter, no bound is known but that without a budget."""
    if key in known.fitted:
        return known.fitted[key]
    *same, in_flight = key
    others = {k[-1]: s for k, s in known.fitted.items() if list(k[:-1]) == same}
    more = [count for count in others if count > in_flight]
    if not more:
        return None
    free = problem.task.known or {}
    bounds = [free[mesh].lower_bound if mesh in free else -inf for mesh in problem.meshes]
    return replace(others[min(more)], lower_bound=min(bounds))


def unbounded_peak(
    task: StageTask,
    cluster: ClusterSpec,
    options: ShardingOptions,
    known: KnownStages,
    log: PlanningLog,
) -> float:
    """The peak of the stage's cheapest sharding, whether that fits or not."""
    problem = mesh_problem(_mesh_task(task, cluster, options, {}, known), log)
    return cheapest_peak(problem, log)


def _stage_key(task: StageTask, options: ShardingOptions, pins: Pins) -> tuple:
    """Stages with equal keys have the same shardings. What the user asks for is by name, so stages
    of which something is asked are equal only if they have one name."""
    cut, step = task.slice, task.slice.step
    options, pins = options_for(options, cut), pins_for(pins, cut)
    is_plain = not (options.pins or options.forbid_axes or options.batch_axis or pins)
    program = program_fingerprint(step.program), "" if is_plain else step.name
    how = step.state, step.batch, step.donated, cut.forward, cut.backward, task.in_specs
    return program, how, task.submesh


def _mesh_task(
    task: StageTask,
    cluster: ClusterSpec,
    options: ShardingOptions,
    pins: Pins,
    known: KnownStages,
) -> ShardingTask:
    """The stage as a step on the meshes of its submesh."""
    key = _stage_key(task, options, pins)
    step = task.slice.step
    options, pins = options_for(options, task.slice), pins_for(pins, task.slice)
    constraints = _constraints(task, options)
    if pins:
        alone = replace(task, in_specs=())
        constraints = overridden(constraints, _constraints(alone, ShardingOptions(pins=pins)))
    shape = "auto" if task.mesh_shape is None else task.mesh_shape
    return ShardingTask(
        step,
        submesh_cluster(cluster, task.submesh),
        ShardParallel(mesh_shape=shape, options=options),
        pins=pins,
        constraints=constraints,
        change=in_flight_of(task.slice, task.in_flight, known.in_flight),
        built=task.built,
        known=known.unbounded.setdefault(key, {}),
    )


# -- what a stage has of the user's wishes


def _stage_paths(stage: StageSlice) -> list[str]:
    """Paths of the user's inputs and outputs that the stage holds, and its named values."""
    step = stage.step
    paths = [*step.call.paths[: len(stage.inputs)], *step.out_paths[: len(stage.outputs)]]
    return [*paths, *(named.name for named in step.program.named_values())]


def pins_for(pins: Pins, stage: StageSlice) -> dict[str, PartitionSpec]:
    """The pins that match arrays of the stage."""
    paths = _stage_paths(stage) if pins else []
    return {p: spec for p, spec in pins.items() if matching_paths(paths, p)}


def options_for(options: ShardingOptions, stage: StageSlice) -> ShardingOptions:
    """The options without patterns that match arrays of other stages alone."""
    step = stage.step
    paths = _stage_paths(stage) if options.forbid_axes else []
    has_batch = any(i < len(stage.inputs) and step.avals[i].shape for i in step.batch)
    forbidden = {p: axes for p, axes in options.forbid_axes.items() if matching_paths(paths, p)}
    return replace(
        options,
        pins=pins_for(options.pins, stage),
        forbid_axes=forbidden,
        batch_axis=options.batch_axis if has_batch else None,
        remat="none",
    )


def _constraints(task: StageTask, options: ShardingOptions) -> LayoutConstraints:
    """Constraints on the user's arrays that the stage holds. What it exchanges with other stages
    is not the user's, though it may go by the name of an argument."""
    stage = task.slice
    num_inputs, num_outputs = len(stage.inputs), len(stage.outputs)
    batch = tuple(i for i in stage.step.batch if i < num_inputs)
    constraints = constrain_layouts(
        replace(stage.step, batch=batch), task.in_specs or None, options=options
    )
    return LayoutConstraints(
        (*constraints.inputs[:num_inputs], *map(unconstrained, constraints.inputs[num_inputs:])),
        (
            *constraints.outputs[:num_outputs],
            *map(unconstrained, constraints.outputs[num_outputs:]),
        ),
        constraints.named,
    )
