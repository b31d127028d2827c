"""The one place where a `ParallelPlan` is put together, and where one made elsewhere is bound.

mesh_plan         what planning decided for one mesh → a plan
one_device_plan   a step on a single device → a plan without a search
stages_plan       plans of stages → the plan of a pipeline
bind_plan         a plan from a file or another process → the same for this program
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import jax

from autopar.cost.host_memory import host_memory
from autopar.cost.memory import MemoryProfile, memory_profile
from autopar.cost.merging import merge_options
from autopar.cost.plan_details import plan_details, single_device_layouts
from autopar.cost.report import CostReport, compute_seconds, cost_report, moves
from autopar.errors import PlanError
from autopar.ir.details import PlanDetails
from autopar.ir.graph import Graph
from autopar.ir.layering import Layering
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import (
    COMMUNICATION_ONLY,
    Fingerprint,
    ParallelPlan,
    SolverReport,
    StagePlan,
    Tensor,
)
from autopar.ir.program import Program
from autopar.ir.program_sharding import EquationSharding, ProgramSharding
from autopar.ir.spec import WHOLE, Layout
from autopar.ir.stages import SearchReport
from autopar.ir.timeline import PipelineTimes
from autopar.ir.traced_step import FlatCall, TracedStep
from autopar.ir.xla_options import StoredOptions, hides_latency, stored_options
from autopar.methods import AnyMethod, options_of
from autopar.sharding.method_text import method_text
from autopar.sharding.solve import GraphSharding
from autopar.tracer.fingerprint import program_fingerprint
from autopar.tracer.source_lines import equation_lines

# -- one mesh


@dataclass(frozen=True)
class MeshDecision:
    """What a plan on one mesh says of the program: layouts, costs and memory."""

    mesh: LogicalMesh
    program: ProgramSharding
    out_layouts: Sequence[Layout]
    named_layout: Callable[[int], Layout]
    report: CostReport
    memory: MemoryProfile
    details: PlanDetails
    solver: SolverReport
    warnings: Sequence[str]
    budget_bytes: float | None = None
    hidden_s: float | None = None
    xla_options: Mapping[str, int] = field(default_factory=dict)


def mesh_plan(
    step: TracedStep, method: AnyMethod, cluster: ClusterSpec, decision: MeshDecision
) -> ParallelPlan:
    mesh, report, program = decision.mesh, decision.report, decision.program
    roles = {i: "state" for i, _ in step.state} | {i: "batch" for i in step.batch}
    out_roles = {o: "state" for _, o in step.state}
    whole = (WHOLE,) * len(mesh.shape)
    in_layouts = [whole if layout is None else layout for layout in program.inputs]
    budget = decision.budget_bytes
    return ParallelPlan(
        name=step.name,
        method=method_text(method),
        mesh_shape=mesh.shape,
        axis_names=mesh.axis_names,
        device=mesh.device.name if mesh.device else COMMUNICATION_ONLY,
        inputs=_tensors(step.call.paths, step.avals, in_layouts, roles),
        outputs=_tensors(step.out_paths, step.out_avals, decision.out_layouts, out_roles),
        program=program,
        stages=(_one_stage(mesh, cluster, decision.solver.objective),),
        num_micro_batches=step.num_micro_batches,
        memory_budget_bytes=inf if budget is None else budget,
        remat=step.remat,
        unrolled=step.is_unrolled or None,
        estimated_step_s=decision.solver.objective + _dispatch_s(mesh),
        estimated_peak_bytes=decision.memory.peak_bytes,
        communication_bytes=report.communication_bytes,
        modules=report.modules,
        solver=decision.solver,
        fingerprint=Fingerprint(program_fingerprint(step.program), jax.__version__),
        warnings=(*decision.warnings, *step.notes),
        named=_named(step, decision.named_layout),
        cluster=cluster,
        correction=options_of(method).memory_correction,
        details=decision.details,
        host=host_memory(step, mesh, in_layouts),
        hidden_s=decision.hidden_s,
        xla_options=_xla_options(method, decision),
        in_tree=_in_tree(step),
        out_tree=_out_tree(step),
    )


def _xla_options(method: AnyMethod, decision: MeshDecision) -> StoredOptions | None:
    """Those that the plan chooses. In XLA's schedule for the least memory, nothing is hidden."""
    chosen = decision.xla_options
    return (
        stored_options(chosen) if chosen and hides_latency(options_of(method).xla_options) else None
    )


def _assumed_trips(graph: Graph) -> list[str]:
    """What is said of while loops whose trips depend on the data."""
    known = {"unknown": "it is priced as one trip", "at most": "it is priced as the {} it may take"}
    return [
        f"the while loop at {loop.source} ends by the data: "
        f"{known[loop.kind].format(loop.trips)}; `with autopar.expected_trips(n):` around it says "
        "how many it takes"
        for loop in graph.while_loops
        if loop.kind in known
    ]


def sharded_decision(
    step: TracedStep,
    sharding: GraphSharding,
    program: ProgramSharding,
    budget_bytes: float | None,
    seconds: Mapping[str, float],
) -> MeshDecision:
    """What the solver chose."""
    graph, mesh, layouts = sharding.graph, sharding.mesh, sharding.layouts
    node_s = compute_seconds(graph, mesh, layouts, sharding.problem.classes)
    moved = list(moves(graph, mesh, layouts))
    report = cost_report(graph, mesh, layouts, node_s, moved)
    lines = equation_lines(step.program)
    unruled = [
        f"{op.count} × {op.name} at {op.source} {op.why}"
        + ("" if op.failure is None else f": {op.failure.exception}")
        for op in graph.unruled
    ]
    return MeshDecision(
        mesh=mesh,
        program=program,
        out_layouts=_out_layouts(step, sharding, program),
        named_layout=lambda value: _layout_made(sharding, value),
        report=report,
        memory=sharding.memory,
        details=plan_details(
            graph,
            mesh,
            layouts,
            [strategy.factors for strategy in sharding.strategies],
            sharding.memory,
            lines.sources,
            lines.recomputed,
            sharding.problem.classes,
            node_s=node_s,
            moved=moved,
        ),
        solver=_solver_report(step, sharding, report, seconds),
        warnings=(
            *unruled,
            *_assumed_trips(graph),
            *_too_large(mesh, sharding.memory.peak_bytes),
        ),
        budget_bytes=budget_bytes,
        hidden_s=sharding.hidden_s,
        # After a loop over micro-batches, nothing is left to hide gradients.
        xla_options=merge_options(graph, mesh, moved) if step.num_micro_batches == 1 else {},
    )


def _solver_report(
    step: TracedStep, sharding: GraphSharding, report: CostReport, seconds: Mapping[str, float]
) -> SolverReport:
    stats = sharding.stats
    layouts = [_layout_made(sharding, value) for value in sharding.graph.inputs]
    objective = (
        report.compute_s
        + report.communication_s
        - (sharding.hidden_s or 0.0)
        + _transfer_s(step, sharding.mesh, layouts)
    )
    return SolverReport(
        objective=objective,
        lower_bound=objective * (1 - sharding.gap),
        gap=sharding.gap,
        sizes={
            "equations": step.program.num_equations(),
            "nodes": stats.num_nodes,
            "classes": stats.num_classes,
            "strategies": stats.num_strategies,
            "core_nodes": stats.num_core_nodes,
            "variables": stats.num_variables,
            "constraints": stats.num_constraints,
            "relaxation_integral": int(stats.relaxation_integral),
            "memory_rows": stats.num_memory_rows,
            "solves": stats.num_solves,
        },
        seconds={**seconds, **{f"shard.{k}": v for k, v in stats.seconds.items()}},
        unbounded=sharding.unbounded or (),
    )


def _out_layouts(
    step: TracedStep, sharding: GraphSharding, program: ProgramSharding
) -> list[Layout]:
    """Layouts of the step's outputs: where the last reshard leaves them, or as they were made."""
    layouts: list[Layout] = []
    for index, (out, chain) in enumerate(zip(step.program.outputs, program.outputs, strict=True)):
        layout = chain[-1] if chain else (WHOLE,) * len(sharding.mesh.shape)
        if not chain and isinstance(out, int):
            value = sharding.graph.outputs[index]
            assert value is not None
            layout = tuple(max(entry, WHOLE) for entry in _layout_made(sharding, value))
        layouts.append(layout)
    return layouts


def _layout_made(sharding: GraphSharding, value: int) -> Layout:
    node, position = sharding.graph.producer[value]
    return sharding.layouts[node][1][position]


def one_device_decision(
    step: TracedStep,
    graph: Graph,
    mesh: LogicalMesh,
    seconds: Mapping[str, float],
    budget_bytes: float | None = None,
) -> MeshDecision:
    """Nothing to search and nothing to annotate, but costs and memory are still of interest."""
    layouts, factors = single_device_layouts(graph, len(mesh.shape))
    memory = memory_profile(graph, mesh, layouts)
    lines = equation_lines(step.program)
    node_s = compute_seconds(graph, mesh, layouts)
    report = cost_report(graph, mesh, layouts, node_s, ())
    whole = (WHOLE,) * len(mesh.shape)
    step_s = report.compute_s + _transfer_s(step, mesh, [whole] * len(step.avals))
    return MeshDecision(
        mesh=mesh,
        program=unsharded(step.program),
        out_layouts=[whole] * len(step.out_avals),
        named_layout=lambda _: whole,
        report=report,
        memory=memory,
        details=plan_details(
            graph,
            mesh,
            layouts,
            factors,
            memory,
            lines.sources,
            lines.recomputed,
            node_s=node_s,
            moved=(),
        ),
        solver=SolverReport(step_s, step_s, 0.0, {}, dict(seconds)),
        warnings=(*_assumed_trips(graph), *_too_large(mesh, memory.peak_bytes)),
        budget_bytes=budget_bytes,
    )


def unsharded(program: Program) -> ProgramSharding:
    """A program without annotations."""
    return ProgramSharding(
        (None,) * len(program.inputs),
        tuple(
            EquationSharding(
                ((),) * len(e.operands),
                ((),) * len(e.results),
                tuple(unsharded(b) for b in e.bodies),
            )
            for e in program.equations
        ),
        ((),) * len(program.outputs),
    )


def _one_stage(mesh: LogicalMesh, cluster: ClusterSpec, cost: float) -> StagePlan:
    per_host = min(mesh.num_devices, cluster.devices_per_host)
    return StagePlan((0, 1), (max(1, mesh.num_devices // per_host), per_host), mesh.shape, cost)


def _dispatch_s(mesh: LogicalMesh) -> float:
    """Measured time to start the program; 0 without a profile."""
    if mesh.profile is None or mesh.profile.dispatch_s is None:
        return 0.0
    return mesh.profile.dispatch_s.seconds


def _transfer_s(step: TracedStep, mesh: LogicalMesh, in_layouts: Sequence[Layout]) -> float:
    """Of state in host memory, which nothing but the short update hides."""
    host = host_memory(step, mesh, in_layouts)
    return 0.0 if host is None else host.transfer_s


def _too_large(mesh: LogicalMesh, peak_bytes: float) -> list[str]:
    if mesh.memory_bytes is None or peak_bytes <= mesh.memory_bytes:
        return []
    return [
        f"the estimated peak of {peak_bytes / 2**30:.1f} GiB per device is more than the "
        f"device's {mesh.memory_bytes / 2**30:.1f} GiB"
    ]


# -- a pipeline


@dataclass(frozen=True)
class PipelineDecision:
    """What a pipeline's plan says beside its stages.

    inputs, outputs: all arguments and results, with the stages that hold them.
    layering:        how the layers were found.
    sent_bytes:      what goes from stage to stage in a step.
    gap:             from the step's seconds to what is proven; the largest of a stage, if None.
    lower_bound:     of the step's seconds; the gap tells it, if None.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    layers: tuple[str, ...]
    layering: Layering
    step_s: float
    schedule: str = ""
    sent_bytes: float = 0.0
    gap: float | None = None
    lower_bound: float | None = None
    warnings: Sequence[str] = ()
    search: SearchReport | None = None
    times: PipelineTimes | None = None


def stages_plan(
    step: TracedStep,
    stages: Sequence[StagePlan],
    method: str,
    cluster: ClusterSpec,
    decision: PipelineDecision,
    *,
    fingerprint_of: Program,
    seconds: Mapping[str, float],
) -> ParallelPlan:
    """The plan of a pipeline, its stages' plans put together. `fingerprint_of`: the program as it
    was before layers were recomputed."""
    plans = [stage.plan for stage in stages if stage.plan is not None]
    gap, step_s = decision.gap, decision.step_s
    if gap is None:
        gap = max(plan.solver.gap for plan in plans)
    lower_bound = step_s * (1 - gap) if decision.lower_bound is None else decision.lower_bound
    warnings = [*(w for plan in plans for w in plan.warnings), *decision.warnings]
    return ParallelPlan(
        name=step.name,
        method=method,
        mesh_shape=(1 + max(device for stage in stages for device in stage.devices),),
        axis_names=("x",),
        device=plans[0].device,
        inputs=tuple(decision.inputs),
        outputs=tuple(decision.outputs),
        program=ProgramSharding((), (), ()),
        stages=tuple(stages),
        num_micro_batches=step.num_micro_batches,
        memory_budget_bytes=min(plan.memory_budget_bytes for plan in plans),
        remat=step.remat,
        estimated_step_s=step_s,
        estimated_peak_bytes=max(plan.estimated_peak_bytes for plan in plans),
        communication_bytes=max(p.communication_bytes for p in plans) + decision.sent_bytes,
        modules=tuple(cost for plan in plans for cost in plan.modules),
        solver=SolverReport(
            objective=step_s,
            lower_bound=lower_bound,
            gap=gap,
            sizes={"stages": len(stages), "equations": step.program.num_equations()},
            seconds=dict(seconds),
        ),
        fingerprint=Fingerprint(program_fingerprint(fingerprint_of), jax.__version__),
        warnings=tuple(dict.fromkeys(warnings)),
        named=tuple(
            replace(tensor, stages=(number,))
            for number, plan in enumerate(plans)
            for tensor in plan.named
        ),
        layers=decision.layers,
        layering=decision.layering,
        schedule=decision.schedule,
        search=decision.search,
        cluster=cluster,
        correction=plans[0].correction,
        times=decision.times,
        in_tree=_in_tree(step),
        out_tree=_out_tree(step),
    )


# -- what both have


def _tensors(
    paths: Sequence[str], avals: Sequence[Any], layouts: Sequence[Layout], roles: Mapping[int, str]
) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(path, tuple(aval.shape), str(aval.dtype), layout, roles.get(index, ""))
        for index, (path, aval, layout) in enumerate(zip(paths, avals, layouts, strict=True))
    )


def _named(step: TracedStep, layout_of: Callable[[int], Layout]) -> tuple[Tensor, ...]:
    named = list(step.program.named_values())
    avals = [step.program.avals[n.value] for n in named]
    return _tensors([n.name for n in named], avals, [layout_of(n.value) for n in named], {})


def _in_tree(step: TracedStep) -> Any:
    def build(call: FlatCall, leaves: list[Any]) -> Any:
        args, kwargs = call.rebuild(leaves)
        return (args, kwargs) if kwargs else args

    return build, step.call


def _out_tree(step: TracedStep) -> Any:
    return lambda traced, leaves: traced.rebuild_output(leaves), step


# -- plans made elsewhere


def bind_plan(plan: ParallelPlan, traced: TracedStep) -> ParallelPlan:
    """A plan made elsewhere, checked against this program and given its pytrees."""
    check_same_inputs(plan, traced)
    if program_fingerprint(traced.program) != plan.fingerprint.program:
        version = plan.fingerprint.jax_version
        cause = (
            f"it was made with JAX {version} and this is {jax.__version__}"
            if version != jax.__version__
            else "the function is not the one it was made for"
        )
        raise PlanError(
            f"the plan for {plan.name} does not fit {traced.name}: shapes agree but the traced "
            f"programs differ; {cause}. Plan again."
        )
    return replace(plan, in_tree=_in_tree(traced), out_tree=_out_tree(traced))


def check_same_inputs(plan: ParallelPlan, traced: TracedStep) -> None:
    """Raise a `PlanError` that names the first input whose shape or type is another, and says
    whether the model is another."""
    here = [
        (p, tuple(a.shape), str(a.dtype))
        for p, a in zip(traced.call.paths, traced.avals, strict=True)
    ]
    there = [(t.path, t.shape, t.dtype) for t in plan.inputs]
    if [one[1:] for one in here] == [one[1:] for one in there]:
        return
    _check_same_model(plan, traced, {path for path, _, _ in here})
    for (path, shape, dtype), (_, planned_shape, planned_dtype), tensor in zip(
        here, there, plan.inputs, strict=False
    ):
        if (shape, dtype) != (planned_shape, planned_dtype):
            what = {"batch": "another batch", "state": "another size of the model"}
            of = f" It is for {what[tensor.role]}." if tensor.role in what else ""
            raise PlanError(
                f"{path}: the plan was made for {planned_dtype}{list(planned_shape)}, the call has "
                f"{dtype}{list(shape)}.{of} Plan again for these shapes."
            )
    raise PlanError(
        f"the plan for {plan.name} has {len(there)} input arrays, this call of {traced.name} "
        f"has {len(here)}. Plan again for this function."
    )


def _check_same_model(plan: ParallelPlan, traced: TracedStep, here: set[str]) -> None:
    """Shapes differ; where most names do too, the plan is for another model."""
    there = {tensor.path for tensor in plan.inputs}
    if 2 * len(here & there) >= max(len(here), len(there)):
        return
    ours, others = sorted(here - there), sorted(there - here)
    raise PlanError(
        f"this plan is for another model. It was made for {plan.name} with {len(there)} arrays "
        f"({', '.join(others[:2]) or 'all of them here'}, …); {traced.name} has {len(here)} "
        f"({', '.join(ours[:2]) or 'all of them there'}, …), {len(here & there)} of them by the "
        "same names. Load the plan of this model, or plan again."
    )
