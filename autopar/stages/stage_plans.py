"""A plan for every stage of a pipeline: from `StageSlice`s and submeshes to `ParallelPlan`s.

Each stage's step is sharded exactly, as a step of its own on the meshes of its submesh. What
differs from a whole step is memory: of every micro-batch in flight a stage keeps what its backward
stage program reads. Equal stages (the blocks in the middle of a transformer) are solved once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from jax.sharding import PartitionSpec

from autopar.cost.report import cost_report
from autopar.errors import MemoryBudgetError
from autopar.ir.graph import Graph, Life
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import ParallelPlan
from autopar.ir.stages import LayerTable, Submesh
from autopar.lower.assign import assign_layouts
from autopar.methods import ShardingOptions, ShardParallel
from autopar.rewrite.stage_slices import StageSlice
from autopar.sharding.assemble import make_plan, program_fingerprint
from autopar.sharding.constraints import candidate_meshes, divisible_meshes, options_of
from autopar.sharding.layout_constraints import (
    LayoutConstraints,
    ask,
    matching_paths,
    nothing_asked,
    overridden,
    with_output_nodes,
    without_moved_state,
)
from autopar.sharding.memory_budget import memory_budget
from autopar.sharding.origin import Origin, Pins
from autopar.sharding.plan_mesh import (
    PassTimer,
    paused_garbage_collector,
    shard_on_best,
    unused_devices,
)
from autopar.sharding.solve import GraphSharding
from autopar.stages.layer_tables import stage_figures, submesh_cluster
from autopar.tracer.build import build_graph


@dataclass(frozen=True)
class StageTask:
    """What is to be planned: a stage, where it runs, and how many micro-batches it keeps.
    `in_specs`: how its inputs must lie, None for any; empty if nothing is asked."""

    slice: StageSlice
    submesh: Submesh
    mesh_shape: tuple[int, ...] | None  # None for any
    in_flight: int
    in_specs: tuple[PartitionSpec | None, ...] = ()


@dataclass(frozen=True)
class SolvedStage:
    """`figures` is a table of one layer, the stage."""

    plan: ParallelPlan
    figures: LayerTable


class StageTooLarge(Exception):
    """A stage that fits on no mesh of its submesh. Internal."""

    def __init__(self, stage: int, error: MemoryBudgetError) -> None:
        super().__init__(stage)
        self.stage, self.error = stage, error


@dataclass
class StageSolver:
    """Plans stages; remembers the shardings of those that were equal."""

    cluster: ClusterSpec
    options: ShardingOptions
    timer: PassTimer = field(default_factory=PassTimer)
    pins: Pins = field(default_factory=dict)  # these come before what the options ask for
    known: dict[tuple[str, Submesh], dict[LogicalMesh, GraphSharding]] = field(default_factory=dict)

    def solve(self, number: int, task: StageTask) -> SolvedStage:
        step = task.slice.step
        cluster = submesh_cluster(self.cluster, task.submesh)
        options = options_for(self.options, task.slice)
        shape = "auto" if task.mesh_shape is None else task.mesh_shape
        method = ShardParallel(mesh_shape=shape, options=options)
        with paused_garbage_collector():
            asked = asked_of_stage(task, options)
            pins = pins_for(self.pins, task.slice)
            if pins:
                alone = replace(task, in_specs=())
                asked = overridden(asked, asked_of_stage(alone, ShardingOptions(pins=pins)))
            step = without_moved_state(step, asked)
            with self.timer("graph"):
                built = build_graph(step)
                graph = with_output_nodes(built, asked)
                graph = with_in_flight(graph, task.slice, task.in_flight)
            meshes = candidate_meshes(cluster, method)
            if meshes[0].num_devices > 1:
                meshes = divisible_meshes(graph, meshes, method, cluster)
            is_plain = not (options.pins or options.forbid_axes or options.batch_axis)
            is_plain = is_plain and not task.in_specs and not pins
            key = program_fingerprint(step.program) if is_plain else step.name
            known = self.known.setdefault((key, task.submesh), {})
            with self.timer("shard"):
                try:
                    best = shard_on_best(graph, step, meshes, method, asked, True, known)
                except MemoryBudgetError as error:
                    raise StageTooLarge(number, error) from error
            with self.timer("assign"):
                program = assign_layouts(
                    step.program, graph, best.layouts, best.mesh, refetch=best.refetch
                )
                report = cost_report(graph, best.mesh, best.layouts)
            budget = memory_budget(best.mesh, method, options_of(method))
            plan = make_plan(step, graph, best, program, report, method, cluster, {}, budget)
            warnings = unused_devices(cluster.num_devices, best.mesh.num_devices)
            origin = Origin(
                traced=task.slice.step,
                mesh=best.mesh,
                cluster=cluster,
                method=method,
                asked=asked,
                choice=best.choice,
                refetch=best.refetch,
                budget=budget,
                pins=pins,
                price=best.price_per_byte,
                built=built,
                change=in_flight_of(task.slice, task.in_flight),
            )
            plan = replace(plan, warnings=(*warnings, *plan.warnings), origin=origin)
            figures = stage_figures(best, task.slice, task.submesh)
        return SolvedStage(plan, figures)


def own_paths(stage: StageSlice) -> list[str]:
    """Of a stage's own inputs and outputs, and its named values."""
    step = stage.step
    paths = [*step.call.paths[: len(stage.inputs)], *step.out_paths[: len(stage.outputs)]]
    return [*paths, *(named.name for named in step.program.named_values())]


def pins_for(pins: Pins, stage: StageSlice) -> dict[str, PartitionSpec]:
    """Those that speak of the stage's arrays."""
    paths = own_paths(stage)
    return {p: spec for p, spec in pins.items() if matching_paths(paths, p)}


def options_for(options: ShardingOptions, stage: StageSlice) -> ShardingOptions:
    """The options without what speaks of other stages' arrays."""
    step = stage.step
    paths = own_paths(stage)
    has_batch = any(i < len(stage.inputs) and step.avals[i].shape for i in step.batch)
    pins = pins_for(options.pins, stage)
    forbidden = {p: axes for p, axes in options.forbid_axes.items() if matching_paths(paths, p)}
    return replace(
        options,
        pins=pins,
        forbid_axes=forbidden,
        batch_axis=options.batch_axis if has_batch else None,
        remat="none",
    )


def asked_of_stage(task: StageTask, options: ShardingOptions) -> LayoutConstraints:
    """What is asked of the stage's own arrays. What it gets from other stages, and gives to them,
    is not the user's, though it may go by the name of an argument."""
    stage = task.slice
    own_inputs, own_outputs = len(stage.inputs), len(stage.outputs)
    batch = tuple(i for i in stage.step.batch if i < own_inputs)
    asked = ask(replace(stage.step, batch=batch), task.in_specs or None, options=options)
    return LayoutConstraints(
        (*asked.inputs[:own_inputs], *map(nothing_asked, asked.inputs[own_inputs:])),
        (*asked.outputs[:own_outputs], *map(nothing_asked, asked.outputs[own_outputs:])),
        asked.named,
    )


def in_flight_of(stage: StageSlice, count: int) -> Callable[[Graph], Graph]:
    return lambda graph: with_in_flight(graph, stage, count)


def with_in_flight(graph: Graph, stage: StageSlice, count: int) -> Graph:
    """The graph with what a stage holds of micro-batches in flight, and without the stacks of what
    it sends and receives, of which only single micro-batches exist."""
    kept = stage.kept_values()
    body = stage.body
    inside = {r for e in body.equations for r in e.results} | set(body.inputs)
    times = [graph.liveness.times[graph.producer[v][0]] for v in inside if v in graph.producer]
    lives = [life for life in graph.liveness.lives if life.value not in stage.stacks]
    if times:
        for value in kept:
            if value in graph.producer:
                more = count - (value in graph.liveness.in_memory)
                if more > 0:
                    lives.append(Life(value, min(times), max(times), more))
    return replace(graph, liveness=replace(graph.liveness, lives=tuple(lives)))
