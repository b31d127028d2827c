"""Where a plan comes from: what rebuilds the graph and the solver's problem that it was made of.

    ParallelPlan.origin   an `Origin` for every plan on one mesh, those of stages included

An origin holds the traced step, the mesh, the constraints, and the solver's choice as numbers;
graph and cost tables are built on demand. A plan that was read from a file has none until it is
bound to its function; then the choice is found again from the layouts of its inputs, outputs and
named values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from jax.sharding import PartitionSpec

from autopar.errors import SolverError
from autopar.ir.blocks import Blocks
from autopar.ir.graph import Graph
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.plan import ParallelPlan
from autopar.ir.spec import Layout, spec_from_text
from autopar.ir.traced_step import TracedStep
from autopar.ir.xla_options import compiler_options, hides_latency
from autopar.methods import (
    DataParallel,
    OneMeshMethod,
    ShardingOptions,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
    options_of,
)
from autopar.sharding.blocks import find_blocks
from autopar.sharding.constraints import method_constraints, solver_constraints
from autopar.sharding.layout_constraints import (
    LayoutConstraints,
    constrain_layouts,
    overridden,
    with_output_nodes,
    without_moved_state,
)
from autopar.sharding.memory_budget import corrected, memory_budget
from autopar.sharding.method_text import read_method
from autopar.sharding.problem import Allowed, ShardingProblem, StrategyFilter, problem_on_mesh
from autopar.sharding.solve import (
    DoesNotFit,
    GraphSharding,
    SolveStats,
    fit_into_memory,
    folded_for,
    solve_graph,
)
from autopar.tracer.build import build_graph

Pins = Mapping[str, PartitionSpec]
GraphChange = Callable[[Graph], Graph]


@dataclass(eq=False)
class Origin:
    """traced:  the step, with what was done to it (recomputation, micro-batches).
    choice:  class -> strategy, as the solver left it; None if it is not known.
    refetch: the plan's backward pass gathers again what the forward pass gathered.
    budget:  bytes per device, or None.
    price:   per byte, at which the budget was kept to; 0 if it did not bind.
    pins:    those of `with_pins`, beside the method's; part of `constraints`.
    built:   the graph of the step as it was traced, if it is known.
    change:  what becomes of the graph before it is solved; a stage's holds several micro-batches.
    layouts: value -> where it lies, of a plan whose choice is not known.
    notes:   what is not known of how the plan was made, in words.
    overlaps: collectives run under compute.
    """

    traced: TracedStep
    mesh: LogicalMesh
    cluster: ClusterSpec
    method: OneMeshMethod
    constraints: LayoutConstraints
    choice: Mapping[int, int] | None
    refetch: bool
    budget: float | None
    pins: Pins
    price: float = 0.0
    built: Graph | None = None
    change: GraphChange | None = None
    layouts: Mapping[str, Layout] | None = None
    notes: tuple[str, ...] = ()
    overlaps: bool = False

    @property
    def options(self) -> ShardingOptions:
        return options_of(self.method)

    @cached_property
    def step(self) -> TracedStep:
        return without_moved_state(self.traced, self.constraints)

    @cached_property
    def graph(self) -> Graph:
        return self.graph_with_outputs(())

    def graph_with_outputs(self, also: Collection[int]) -> Graph:
        """The graph in which these outputs, too, have nodes that can have any layout."""
        graph = with_output_nodes(self._plain_graph, self.constraints, also)
        graph = graph if self.change is None else self.change(graph)
        return corrected(graph, self.step, self.method)

    @cached_property
    def _plain_graph(self) -> Graph:
        if self.built is not None:
            return self.built
        return build_graph(
            self.step,
            overlaps=self.mesh.num_devices > 1 and hides_latency(self.options.xla_options),
            instructions_per_byte=self.mesh.instructions_per_byte,
        )

    def solver_constraints(self, graph: Graph) -> tuple[Allowed, StrategyFilter | None]:
        return solver_constraints(graph, self.step, self.mesh, self.method, self.constraints)

    def problem(
        self, graph: Graph, allowed: Allowed, keep: StrategyFilter | None
    ) -> ShardingProblem:
        folded = folded_for(graph, allowed, fold=self.options.fold_layers)
        return problem_on_mesh(folded, self.mesh, allowed, keep, self.overlaps)

    def problem_classes(self, graph: Graph) -> list[int]:
        """Classes of the graph's nodes, without constraints."""
        return folded_for(graph, {}, fold=self.options.fold_layers).classes

    @cached_property
    def sharding(self) -> GraphSharding:
        """The plan's own sharding, on a problem that is built again."""
        graph = self.graph
        allowed, keep = self.solver_constraints(graph)
        problem = self.problem(graph, allowed, keep)
        if self.choice is not None and _is_choice(problem, self.choice):
            objective = problem.pairwise.objective(dict(self.choice))
            stats = SolveStats(len(graph.nodes), len(problem.strategies), 0, 0, 0, 0, True)
            return GraphSharding(
                problem, dict(self.choice), objective, objective, stats, refetch=self.refetch
            )
        return self._found_again(graph, allowed, keep)

    @cached_property
    def blocks(self) -> Blocks:
        return find_blocks(self.sharding.problem)

    def _found_again(
        self, graph: Graph, allowed: Allowed, keep: StrategyFilter | None
    ) -> GraphSharding:
        options = self.options

        def solve(pins: Mapping[int, Layout]) -> GraphSharding:
            return solve_graph(
                graph,
                self.mesh,
                pins=pins,
                allowed=allowed,
                keep=keep,
                solver=options.solver,
                time_limit_s=options.solver_time_limit_s,
                fold=options.fold_layers,
                overlaps=self.overlaps,
            )

        try:
            sharding = solve(self._pinned_values(graph))
        except SolverError:
            sharding = solve({})
        if self.budget is None:
            return sharding
        try:
            return fit_into_memory(sharding, self.budget, solver=options.solver)
        except DoesNotFit as miss:
            return miss.smallest

    def _pinned_values(self, graph: Graph) -> dict[int, Layout]:
        if self.layouts is None:
            return {}
        values = dict(zip(self.step.call.paths, graph.inputs, strict=False))
        named = {n.name: n.value for n in self.step.program.named_values()}
        known = {**named, **values}
        return {known[path]: layout for path, layout in self.layouts.items() if path in known}


def _is_choice(problem: ShardingProblem, choice: Mapping[int, int]) -> bool:
    return choice.keys() == problem.strategies.keys() and all(
        0 <= index < len(problem.strategies[owner]) for owner, index in choice.items()
    )


def constraints_with_pins(
    traced: TracedStep, method: OneMeshMethod, pins: Pins
) -> LayoutConstraints:
    """What a method asks for, and pins that come before it."""
    constraints = method_constraints(traced, method)
    if not pins:
        return constraints
    return overridden(constraints, constrain_layouts(traced, options=ShardingOptions(pins=pins)))


# -- plans from files


_METHODS = {method.__name__: method for method in (DataParallel, Zero2Parallel, Zero3Parallel)}


def bound_origin(
    plan: ParallelPlan,
    traced: TracedStep,
    cluster: ClusterSpec,
    change: GraphChange | None = None,
    pins: Pins | None = None,
) -> Origin | None:
    """The origin of a plan that was made elsewhere and fits this step; None if the plan does not
    say for which links it was made. `pins`: those of the plan itself, if None."""
    if plan.num_devices == 1 or not plan.is_timed:
        return None
    plan_cluster = plan.cluster or cluster
    if plan_cluster.num_devices < plan.num_devices:
        return None
    made_by = read_method(plan.method)
    budget = None if plan.memory_budget_bytes == inf else plan.memory_budget_bytes
    method: OneMeshMethod = ShardParallel(
        options=ShardingOptions(
            memory_budget_bytes=budget,
            remat="none",
            xla_options=compiler_options(plan.xla_options) or {},
        )
    )
    notes: tuple[str, ...] = ()
    if made_by.name in _METHODS:
        method = _METHODS[made_by.name](plan.num_micro_batches)
    elif made_by.constrains_layouts:
        notes = (
            f"The plan was made elsewhere, by {plan.method}. What that method asked for is not "
            "known here; layouts are priced without it.",
        )
    if plan.cluster is None:
        notes = (
            *notes,
            "The plan does not say for which cluster it was made: this is for the one at hand.",
        )
    mesh = replace(mesh_of_cluster(plan_cluster, plan.mesh_shape), axis_names=plan.axis_names)
    pins = pins_of(plan) if pins is None else pins
    return Origin(
        traced=traced,
        mesh=mesh,
        cluster=plan_cluster,
        method=method,
        constraints=constraints_with_pins(traced, method, pins),
        choice=None,
        refetch=False,
        budget=budget if made_by.name in _METHODS else memory_budget(mesh, method),
        pins=pins,
        change=change,
        layouts={t.path: t.layout for t in (*plan.inputs, *plan.named)},
        notes=notes,
        overlaps=plan.hidden_s is not None,
    )


def pins_of(plan: ParallelPlan) -> dict[str, PartitionSpec]:
    return {pattern: spec_from_text(text) for pattern, text in plan.pinned}
