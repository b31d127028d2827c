"""From the results of all passes to a plan, and from a plan made elsewhere to this program."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, replace
from enum import Enum
from math import inf, prod
from typing import Any

import jax
import numpy as np

from autopar.cost.memory import memory_profile
from autopar.cost.plan_details import plan_details, whole_on_one_device
from autopar.cost.report import CostReport, cost_report
from autopar.errors import PlanError
from autopar.ir.details import PlanDetails
from autopar.ir.graph import Graph
from autopar.ir.mesh import ClusterSpec, LogicalMesh
from autopar.ir.plan import (
    MADE,
    EquationSharding,
    Fingerprint,
    ParallelPlan,
    ProgramSharding,
    SolverReport,
    StagePlan,
    Tensor,
)
from autopar.ir.spec import WHOLE, Layout
from autopar.ir.stages import SearchReport
from autopar.ir.text import format_bytes
from autopar.methods import PlacedParallel, ShardingOptions
from autopar.rewrite.stage_slices import SlicedStep
from autopar.sharding.solve import GraphSharding
from autopar.tracer.flatten import FlatCall, TracedStep
from autopar.tracer.program import Program
from autopar.tracer.source_lines import equation_lines


def program_fingerprint(program: Program) -> str:
    """A hash of every equation with its parameters and shapes: equal programs can share a plan.
    The values of constants do not matter, so that a learning rate may change, nor do the numbers of
    values, so that equal parts of one program are found."""
    digest = hashlib.sha256()
    numbers: dict[int, int] = {}

    def number(value: int) -> int:
        return numbers.setdefault(value, len(numbers))

    def visit(part: Program) -> None:
        for equation in part.equations:
            types = [_type_text(part.avals[r]) for r in equation.results]
            operands = [number(o) if isinstance(o, int) else "c" for o in equation.operands]
            params = _plain(equation.params)
            types.append(repr([number(r) for r in equation.results]))
            digest.update(repr((equation.name, params, operands, types)).encode())
            for body in equation.bodies:
                visit(body)
        outputs = [number(o) if isinstance(o, int) else "c" for o in part.outputs]
        digest.update(repr((tuple(map(number, part.inputs)), outputs)).encode())

    visit(program)
    digest.update(repr([_type_text(program.avals[v]) for v in program.inputs]).encode())
    return digest.hexdigest()


def _type_text(aval: Any) -> str:
    return f"{getattr(aval, 'dtype', '')}{list(getattr(aval, 'shape', ()))}"


def _plain(value: Any) -> Any:
    """A parameter as data that prints alike in every process; functions and the like by type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return [(name, _plain(v)) for name, v in sorted(value.items())]
    return str(value) if isinstance(value, (np.dtype, Enum)) else type(value).__name__


def _in_tree(traced: TracedStep) -> Any:
    def build(call: FlatCall, leaves: list[Any]) -> Any:
        args, kwargs = call.rebuild(leaves)
        return (args, kwargs) if kwargs else args

    return build, traced.call


def _out_tree(traced: TracedStep) -> Any:
    return lambda step, leaves: step.rebuild_output(leaves), traced


def make_plan(
    traced: TracedStep,
    graph: Graph,
    sharding: GraphSharding,
    program: ProgramSharding,
    report: CostReport,
    method: Any,
    cluster: ClusterSpec,
    seconds: dict[str, float],
    budget_bytes: float | None = None,
) -> ParallelPlan:
    mesh = sharding.mesh
    stats = sharding.stats
    roles = {i: "state" for i, _ in traced.state} | {i: "batch" for i in traced.batch}
    out_roles = {o: "state" for _, o in traced.state}
    out_layouts = []
    for index, (out, chain) in enumerate(zip(traced.program.outputs, program.outputs, strict=True)):
        whole = (WHOLE,) * len(mesh.shape)
        layout = chain[-1] if chain else whole
        if not chain and isinstance(out, int):
            value = graph.outputs[index]
            assert value is not None
            layout = tuple(max(e, WHOLE) for e in _made_in(graph, sharding, value))
        out_layouts.append(layout)
    objective = report.compute_s + report.communication_s
    return ParallelPlan(
        name=traced.name,
        method=_describe(method),
        mesh_shape=mesh.shape,
        axis_names=mesh.axis_names,
        device=mesh.device.name if mesh.device else "communication only",
        inputs=_tensors(traced.call.paths, traced.avals, program.inputs, roles),
        outputs=_tensors(traced.out_paths, traced.out_avals, out_layouts, out_roles),
        program=program,
        stages=(_one_stage(mesh, cluster, objective),),
        num_micro_batches=traced.num_micro_batches,
        memory_budget_bytes=inf if budget_bytes is None else budget_bytes,
        remat=traced.remat,
        estimated_step_s=objective + _dispatch_s(mesh),
        estimated_peak_bytes=sharding.memory.peak_bytes,
        communication_bytes=report.communication_bytes,
        modules=report.modules,
        solver=SolverReport(
            objective=objective,
            lower_bound=objective * (1 - sharding.gap),
            gap=sharding.gap,
            sizes={
                "equations": traced.program.num_equations(),
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
        ),
        fingerprint=Fingerprint(program_fingerprint(traced.program), jax.__version__),
        warnings=(*_warnings(graph, mesh, sharding.memory.peak_bytes), *traced.notes),
        named=_named(traced, lambda value: _made_in(graph, sharding, value)),
        cluster=cluster,
        details=_details(traced, graph, sharding),
        in_tree=_in_tree(traced),
        out_tree=_out_tree(traced),
    )


def _details(traced: TracedStep, graph: Graph, sharding: GraphSharding) -> PlanDetails:
    lines = equation_lines(traced.program)
    factors = [strategy.factors for strategy in sharding.strategies]
    return plan_details(
        graph,
        sharding.mesh,
        sharding.layouts,
        factors,
        sharding.memory,
        lines.sources,
        lines.recomputed,
        sharding.problem.classes,
    )


def pipeline_plan(
    whole: TracedStep,
    step: TracedStep,
    sliced: SlicedStep,
    stages: tuple[StagePlan, ...],
    *,
    method: Any,
    layers: tuple[str, ...],
    layering: str,
    schedule: str,
    step_s: float,
    sent_bytes: float,
    seconds: dict[str, float],
    search: SearchReport | None,
    cluster: ClusterSpec,
) -> ParallelPlan:
    """The plan of a pipeline, its stages' plans put together. `whole` is the step as it was before
    layers were recomputed, `sent_bytes` what goes from stage to stage."""
    plans = [stage.plan for stage in stages if stage.plan is not None]
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    received = [{value for value, _ in cut.received} for cut in sliced.stages]
    for number, (cut, own) in enumerate(zip(sliced.stages, plans, strict=True)):
        values = cut.step.program.inputs
        for position, value, tensor in zip(cut.inputs, values, own.inputs, strict=False):
            copies = [n for n, got in enumerate(received) if value in got]
            inputs[position] = replace(tensor, stages=(number, *copies))
        for position, tensor in zip(cut.outputs, own.outputs, strict=False):
            outputs[position] = replace(tensor, stages=(number,))
    num_devices = 1 + max(device for stage in stages for device in stage.devices)
    gaps = [own.solver.gap for own in plans]
    return ParallelPlan(
        name=step.name,
        method=_describe(method),
        mesh_shape=(num_devices,),
        axis_names=("x",),
        device=plans[0].device,
        inputs=tuple(inputs[i] for i in range(len(inputs))),
        outputs=tuple(outputs[o] for o in range(len(outputs))),
        program=ProgramSharding((), (), ()),
        stages=stages,
        num_micro_batches=step.num_micro_batches,
        estimated_step_s=step_s,
        estimated_peak_bytes=max(own.estimated_peak_bytes for own in plans),
        communication_bytes=max(own.communication_bytes for own in plans) + sent_bytes,
        modules=tuple(cost for own in plans for cost in own.modules),
        solver=SolverReport(
            objective=step_s,
            lower_bound=step_s * (1 - max(gaps)),
            gap=max(gaps),
            sizes={"stages": len(stages), "equations": step.program.num_equations()},
            seconds=seconds,
        ),
        fingerprint=Fingerprint(program_fingerprint(whole.program), jax.__version__),
        warnings=tuple(
            dict.fromkeys(
                [*(w for own in plans for w in own.warnings), *step.notes, *_copied_state(sliced)]
            )
        ),
        named=tuple(
            replace(tensor, stages=(number,))
            for number, own in enumerate(plans)
            for tensor in own.named
        ),
        memory_budget_bytes=min(own.memory_budget_bytes for own in plans),
        remat=step.remat,
        layers=layers,
        layering=layering,
        schedule=schedule,
        search=search,
        cluster=cluster,
        in_tree=_in_tree(step),
        out_tree=_out_tree(step),
    )


def made_plan(
    traced: TracedStep,
    plans: Sequence[ParallelPlan],
    stages: Sequence[StagePlan],
    owners: Sequence[int],
    seconds: dict[str, float],
    cluster: ClusterSpec,
) -> ParallelPlan:
    """The plan of a function of which each stage makes its own results, given the stages' plans and
    the stage of every result. `stages` are those of the pipeline that wants them."""
    meshes = list(dict.fromkeys(stage.mesh for stage in stages))
    own_stages = tuple(
        StagePlan(
            layers=(number, number + 1),
            submesh=stage.submesh,
            mesh_shape=own.mesh_shape,
            cost=own.estimated_step_s,
            plan=own,
            devices=stage.devices,
            mesh=meshes.index(stage.mesh),
        )
        for number, (own, stage) in enumerate(zip(plans, stages, strict=True))
    )
    outputs = [iter(own.outputs) for own in plans]
    everywhere = tuple(range(len(plans)))
    step_s = max(own.estimated_step_s for own in plans)
    return ParallelPlan(
        name=traced.name,
        method=plans[0].method,
        mesh_shape=(1 + max(device for stage in stages for device in stage.devices),),
        axis_names=("x",),
        device=plans[0].device,
        inputs=tuple(replace(tensor, stages=everywhere) for tensor in plans[0].inputs),
        outputs=tuple(replace(next(outputs[s]), stages=(s,)) for s in owners),
        program=ProgramSharding((), (), ()),
        stages=own_stages,
        num_micro_batches=1,
        estimated_step_s=step_s,
        estimated_peak_bytes=max(own.estimated_peak_bytes for own in plans),
        communication_bytes=max(own.communication_bytes for own in plans),
        modules=tuple(cost for own in plans for cost in own.modules),
        solver=SolverReport(
            objective=step_s,
            lower_bound=min(own.solver.lower_bound for own in plans),
            gap=max(own.solver.gap for own in plans),
            sizes={"stages": len(plans), "equations": traced.program.num_equations()},
            seconds=seconds,
        ),
        fingerprint=Fingerprint(program_fingerprint(traced.program), jax.__version__),
        warnings=tuple(dict.fromkeys(w for own in plans for w in own.warnings)),
        layers=tuple(f"results of stage {number}" for number in range(len(plans))),
        layering=MADE,
        cluster=cluster,
        in_tree=_in_tree(traced),
        out_tree=_out_tree(traced),
    )


_MUCH_COPIED = 2**20  # bytes that a stage may get of others' parameters without a warning


def _copied_state(sliced: SlicedStep) -> list[str]:
    """Stages that get much of others' parameters in every step: those of a scan over layers."""
    found = []
    for number, stage in enumerate(sliced.stages):
        program = stage.step.program
        assert stage.step.loop is not None
        before = program.equations[: stage.step.loop + 1]
        read = {o for e in before for o in e.operands if isinstance(o, int)}
        sizes: dict[int, int] = {}
        for value, source in stage.received:
            if value in read:
                aval = program.avals[value]
                size = prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)
                sizes[source] = sizes.get(source, 0) + size
        found += [
            f"stage {number} gets {format_bytes(size)} of parameters from stage {source} in every "
            "step: they are shared by both, or stacked over layers, and then stay with one stage"
            for source, size in sizes.items()
            if size > _MUCH_COPIED
        ]
    return found


def _made_in(graph: Graph, sharding: GraphSharding, value: int) -> Layout:
    node, position = graph.producer[value]
    return sharding.layouts[node][1][position]


def _named(traced: TracedStep, layout_of: Callable[[int], Layout]) -> tuple[Tensor, ...]:
    named = list(traced.program.named_values())
    avals = [traced.program.avals[n.value] for n in named]
    return _tensors([n.name for n in named], avals, [layout_of(n.value) for n in named], {})


def _describe(method: Any) -> str:
    """The method as the user would write it, defaults and specs left out."""
    if isinstance(method, PlacedParallel):
        return f"{method.name}()"
    parts = []
    for own in fields(method):
        value = getattr(method, own.name)
        default = own.default_factory() if own.default_factory is not MISSING else own.default
        if own.name in ("in_specs", "out_specs") or value == default:
            continue
        if isinstance(value, ShardingOptions):
            text = _describe(value)
        else:
            text = repr(value.shape if isinstance(value, LogicalMesh) else value)
        parts.append(f"{own.name}={text}")
    return f"{type(method).__name__}({', '.join(parts)})"


def _one_stage(mesh: LogicalMesh, cluster: ClusterSpec, cost: float) -> StagePlan:
    per_host = min(mesh.num_devices, cluster.devices_per_host)
    return StagePlan((0, 1), (max(1, mesh.num_devices // per_host), per_host), mesh.shape, cost)


def _tensors(paths: Any, avals: Any, layouts: Any, roles: dict[int, str]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(path, tuple(aval.shape), str(aval.dtype), layout, roles.get(index, ""))
        for index, (path, aval, layout) in enumerate(zip(paths, avals, layouts, strict=True))
    )


def _warnings(graph: Graph, mesh: LogicalMesh, peak_bytes: float) -> tuple[str, ...]:
    found = [f"{op.count} × {op.name} at {op.source} {op.why}" for op in graph.unruled]
    return (*found, *_too_large(mesh, peak_bytes))


def _too_large(mesh: LogicalMesh, peak_bytes: float) -> list[str]:
    if mesh.memory_bytes is not None and peak_bytes > mesh.memory_bytes:
        return [
            f"the estimated peak of {peak_bytes / 2**30:.1f} GiB per device is more than the "
            f"device's {mesh.memory_bytes / 2**30:.1f} GiB"
        ]
    return []


def untouched(program: Program) -> ProgramSharding:
    """A program of which nothing is said."""
    return ProgramSharding(
        (None,) * len(program.inputs),
        tuple(
            EquationSharding(
                ((),) * len(e.operands),
                ((),) * len(e.results),
                tuple(untouched(b) for b in e.bodies),
            )
            for e in program.equations
        ),
        ((),) * len(program.outputs),
    )


def replicated_plan(
    traced: TracedStep,
    mesh: LogicalMesh,
    method: Any,
    seconds: dict[str, float],
    graph: Graph | None = None,
    cluster: ClusterSpec | None = None,
) -> ParallelPlan:
    """One device: nothing to search, nothing to annotate. Times, memory and details are told if
    the graph is given."""
    whole = (WHOLE,) * len(mesh.shape)

    roles = {i: "state" for i, _ in traced.state} | {i: "batch" for i in traced.batch}
    out_roles = {o: "state" for _, o in traced.state}
    plan = ParallelPlan(
        name=traced.name,
        method=_describe(method),
        mesh_shape=mesh.shape,
        axis_names=mesh.axis_names,
        device=mesh.device.name if mesh.device else "communication only",
        inputs=_tensors(traced.call.paths, traced.avals, [whole] * len(traced.avals), roles),
        outputs=_tensors(
            traced.out_paths, traced.out_avals, [whole] * len(traced.out_avals), out_roles
        ),
        program=untouched(traced.program),
        stages=(StagePlan((0, 1), (1, 1), mesh.shape, 0.0),),
        num_micro_batches=traced.num_micro_batches,
        remat=traced.remat,
        estimated_step_s=0.0,
        estimated_peak_bytes=float(
            sum(prod(a.shape) * getattr(a.dtype, "itemsize", 4) for a in traced.avals)
        ),
        communication_bytes=0.0,
        modules=(),
        solver=SolverReport(0.0, 0.0, 0.0, {}, dict(seconds)),
        fingerprint=Fingerprint(program_fingerprint(traced.program), jax.__version__),
        warnings=traced.notes,
        named=_named(traced, lambda _: whole),
        cluster=cluster,
        in_tree=_in_tree(traced),
        out_tree=_out_tree(traced),
    )
    return plan if graph is None else _with_figures(plan, traced, graph, mesh)


def _dispatch_s(mesh: LogicalMesh) -> float:
    """What starting the program takes, if it was measured."""
    if mesh.profile is None or mesh.profile.dispatch_s is None:
        return 0.0
    return mesh.profile.dispatch_s.seconds


def _with_figures(
    plan: ParallelPlan, traced: TracedStep, graph: Graph, mesh: LogicalMesh
) -> ParallelPlan:
    """A plan for one device with what the program costs there."""
    layouts, factors = whole_on_one_device(graph, len(mesh.shape))
    memory = memory_profile(graph, mesh, layouts)
    lines = equation_lines(traced.program)
    report = cost_report(graph, mesh, layouts)
    step_s = report.compute_s
    return replace(
        plan,
        stages=(replace(plan.stages[0], cost=step_s),),
        estimated_step_s=step_s + _dispatch_s(mesh),
        estimated_peak_bytes=memory.peak_bytes,
        modules=report.modules,
        solver=replace(plan.solver, objective=step_s, lower_bound=step_s),
        warnings=(*_too_large(mesh, memory.peak_bytes), *plan.warnings),
        details=plan_details(
            graph, mesh, layouts, factors, memory, lines.sources, lines.recomputed
        ),
    )


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
    here = [
        (p, tuple(a.shape), str(a.dtype))
        for p, a in zip(traced.call.paths, traced.avals, strict=True)
    ]
    there = [(t.path, t.shape, t.dtype) for t in plan.inputs]
    for (path, shape, dtype), (_, planned_shape, planned_dtype) in zip(here, there, strict=False):
        if (shape, dtype) != (planned_shape, planned_dtype):
            raise PlanError(
                f"{path}: the plan was made for {planned_dtype}{list(planned_shape)}, the call has "
                f"{dtype}{list(shape)}. Plan again for these shapes."
            )
    if len(here) != len(there):
        raise PlanError(
            f"the plan for {plan.name} has {len(there)} input arrays, this call of {traced.name} "
            f"has {len(here)}. Plan again for this function."
        )
