"""The whole compiler, as a list of passes.

    trace      function, arguments           → TracedStep      (trace.flatten, trace.program)
    graph      TracedStep                    → Graph           (trace.build, trace.rules)
    meshes     cluster, method               → LogicalMesh …   (candidate meshes)
    shard      Graph, LogicalMesh            → GraphSharding   (sharding.solve)
    assign     GraphSharding                 → ProgramSharding (lower.assign)
    plan       all of the above              → ParallelPlan
    annotate   ParallelPlan, devices         → function for jax.jit (lower.annotate)

Each pass takes and gives frozen data; `PassTimer` keeps what each took.
"""

from __future__ import annotations

import gc
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import tree_flatten, tree_flatten_with_path

from autopar import _jax
from autopar.cost.report import CostReport, cost_report
from autopar.errors import ArgumentError, MeshError, PlanError, SpecError, TraceError
from autopar.ir.graph import Graph, Node, NodeKind, check_graph
from autopar.ir.mesh import ClusterSpec, LogicalMesh, mesh_of_cluster
from autopar.ir.plan import (
    EquationSharding,
    Fingerprint,
    ParallelPlan,
    ProgramSharding,
    SolverReport,
    StagePlan,
    Tensor,
)
from autopar.ir.spec import WHOLE, Layout, from_partition_spec
from autopar.lower.annotate import annotated_function
from autopar.lower.assign import assign_layouts
from autopar.methods import (
    DataParallel,
    ManualParallel,
    ParallelMethod,
    ShardingOptions,
    ShardParallel,
)
from autopar.sharding.ilp import check_solver
from autopar.sharding.solve import GraphSharding, solve_graph
from autopar.sharding.strategies import Strategy
from autopar.trace.build import build_graph
from autopar.trace.flatten import (
    FlatCall,
    TracedStep,
    argument_names,
    flatten_call,
    trace_step,
)
from autopar.trace.program import Program


@dataclass
class PassTimer:
    """Seconds per pass, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str):
        started = time.perf_counter()
        yield
        spent = time.perf_counter() - started
        self.seconds[name] = self.seconds.get(name, 0.0) + spent


@dataclass(frozen=True)
class StepOptions:
    """How the user's function is called; the arguments of `parallelize`."""

    static_argnums: tuple[int, ...] = ()
    donate_argnums: tuple[int, ...] | str = "auto"
    batch_argnums: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class PlannedStep:
    traced: TracedStep
    plan: ParallelPlan


def plan_step(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    cluster: ClusterSpec,
    method: ParallelMethod | ParallelPlan | LogicalMesh | None = None,
    options: StepOptions | None = None,
    mesh: LogicalMesh | None = None,
) -> PlannedStep:
    """Run every pass up to the plan. `mesh` replaces the meshes the cluster would give."""
    options = options or StepOptions()
    timer = PassTimer()
    method = method if method is not None else ShardParallel()
    with timer("trace"):
        traced = trace(fn, args, kwargs, options)
    if isinstance(method, ParallelPlan):
        return PlannedStep(traced, bind_plan(method, traced))
    solver_options = getattr(method, "options", ShardingOptions())
    check_solver(solver_options.solver)
    meshes = [mesh] if mesh is not None else candidate_meshes(cluster, method)
    if isinstance(method, ManualParallel):
        traced = _without_moved_state(traced, meshes[0], method)
    if meshes[0].num_devices == 1:
        return PlannedStep(traced, _replicated_plan(traced, meshes[0], method, timer))
    with _paused_garbage_collector():
        with timer("graph"):
            graph = build_graph(traced)
            check_graph(graph)
        meshes = _divisible_meshes(graph, meshes, method)
        with timer("shard"):
            best = min(
                (shard(graph, traced, mesh, method, solver_options) for mesh in meshes),
                key=lambda sharding: sharding.objective,
            )
        with timer("assign"):
            program = assign_layouts(traced.program, graph, best.layouts, best.mesh)
            report = cost_report(graph, best.mesh, best.layouts)
        plan = make_plan(traced, graph, best, program, report, method, cluster, timer)
    return PlannedStep(traced, plan)


@contextmanager
def _paused_garbage_collector():
    """The passes make many small objects and no cycles; collecting amid them only costs time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# -- tracing


def trace(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: StepOptions
) -> TracedStep:
    """`trace_step`, with errors that name arguments as the user does. What the user's own function
    raises goes through unchanged, at most with a note."""
    call = flatten_call(fn, args, kwargs, options.static_argnums)
    _check_batch(fn, args, kwargs, call, options)
    try:
        return trace_step(
            fn,
            args,
            kwargs,
            static_argnums=options.static_argnums,
            donate_argnums=options.donate_argnums,
            batch_argnums=options.batch_argnums,
        )
    except TypeError as error:
        for leaf, path in zip(call.leaves, call.paths, strict=True):
            try:
                jax.eval_shape(lambda x: x, leaf)
            except TypeError:
                raise TraceError(
                    f"{path}: a {type(leaf).__name__} of {leaf.dtype} is no array that JAX can "
                    "trace. Convert it with numpy.asarray to numbers or booleans first."
                ) from error
        # JAX names arguments by their place among all leaves.
        named = {int(n) for n in re.findall(r"\bleaves\[(\d+)\]", str(error))}
        for n in sorted(named & set(range(len(call.paths)))):
            error.add_note(f"autopar: leaves[{n}] is {call.paths[n]}")
        raise


def _check_batch(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: FlatCall,
    options: StepOptions,
) -> None:
    """A batch argument that is text or another object fails here and not somewhere in the model.
    Functions are let through (optimizers are made of them). Unless `batch_argnums` was given, so
    is anything if a third argument has arrays: then that may be the batch."""
    owners = set(call.argument)
    if len(owners) != 1 and options.batch_argnums == StepOptions.batch_argnums:
        return
    names = argument_names(fn)
    for position in options.batch_argnums:
        name = names[position] if position < len(names) else f"args[{position}]"
        if position in options.static_argnums or owners & {position, name}:
            continue
        given = args[position] if position < len(args) else kwargs.get(name)
        odd = [leaf for leaf in tree_flatten(given)[0] if not callable(leaf)]
        if odd:
            raise TraceError(
                f"{name}: the batch argument holds no array, but a {type(odd[0]).__name__}: "
                f"{_shortened(odd[0])}. Pass arrays with a leading batch dimension; or say with "
                "batch_argnums which arguments have them, and with static_argnums which are part "
                "of the program."
            )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- meshes


def candidate_meshes(cluster: ClusterSpec, method: Any) -> list[LogicalMesh]:
    """The meshes a method may use on a cluster."""
    devices = cluster.num_devices
    if isinstance(method, LogicalMesh):
        return [method]
    if isinstance(method, DataParallel):
        return [mesh_of_cluster(cluster, (devices,))]
    if isinstance(method, ManualParallel):
        mesh = mesh_of_cluster(cluster, tuple(method.mesh_shape))
        return [replace(mesh, axis_names=tuple(method.axis_names))]
    if not isinstance(method, ShardParallel):
        raise ArgumentError(
            f"method={method!r}: needs ShardParallel, DataParallel, ManualParallel or a "
            "ParallelPlan."
        )
    if isinstance(method.mesh_shape, LogicalMesh):
        if method.mesh_shape.num_devices > devices:
            raise MeshError(
                f"ShardParallel(mesh_shape={method.mesh_shape.shape}) needs "
                f"{method.mesh_shape.num_devices} devices; there are {devices}. Choose a smaller "
                "mesh or use more devices."
            )
        return [method.mesh_shape]
    if method.mesh_shape != "auto":
        return [mesh_of_cluster(cluster, tuple(method.mesh_shape))]  # type: ignore[arg-type]
    shapes = [(devices,)]
    shapes += [(n, devices // n) for n in range(2, devices // 2 + 1) if devices % n == 0]
    meshes, seen = [], set()
    for shape in shapes:
        mesh = mesh_of_cluster(cluster, shape)
        # Axes that swap sizes on equal links make the same mesh.
        key = tuple(sorted(zip(mesh.shape, mesh.alpha, mesh.beta, strict=True)))
        if key not in seen:
            seen.add(key)
            meshes.append(mesh)
    return meshes


def _divisible_meshes(graph: Graph, meshes: list[LogicalMesh], method: Any) -> list[LogicalMesh]:
    """Meshes of which every axis divides something; an error if none is left."""
    sizes = {n for value in graph.values for n in value.shape}
    useful = [m for m in meshes if all(a == 1 or any(n % a == 0 for n in sizes) for a in m.shape)]
    if useful:
        return useful
    mesh = meshes[0]
    axis = next(i for i, a in enumerate(mesh.shape) if a > 1 and not any(n % a == 0 for n in sizes))
    raise MeshError(
        f"mesh_shape={mesh.shape}: the axis {mesh.axis_names[axis]!r} of size {mesh.shape[axis]} "
        "divides no dimension of any array in the program, so nothing could be sharded over it. "
        "Use a mesh whose axes divide the batch or the model's dimensions, or pad them."
    )


# -- sharding


def shard(
    graph: Graph, traced: TracedStep, mesh: LogicalMesh, method: Any, options: ShardingOptions
) -> GraphSharding:
    pins: dict[int, Layout] = {}
    keep = None
    if isinstance(method, DataParallel):
        pins, keep = _data_parallel(graph, traced, mesh)
    elif isinstance(method, ManualParallel):
        pins = _manual_pins(graph, traced, mesh, method)
    return solve_graph(
        graph,
        mesh,
        pins=pins,
        keep=keep,
        solver=options.solver,
        time_limit_s=options.solver_time_limit_s,
        fold=options.fold_layers,
    )


def _data_parallel(graph: Graph, traced: TracedStep, mesh: LogicalMesh):
    """Batch inputs split along their first dimension, everything else whole."""
    if not graph.batch:
        raise ArgumentError(
            f"DataParallel: {traced.name} was called without a batch argument "
            "(batch_argnums names none). Pass the batch as argument 1 or set batch_argnums."
        )
    pins: dict[int, Layout] = {}
    for index, value in enumerate(graph.inputs):
        shape = graph.values[value].shape
        if index not in graph.batch or not shape:
            pins[value] = (WHOLE,) * len(mesh.shape)
            continue
        if shape[0] % mesh.num_devices:
            raise MeshError(
                f"{traced.call.paths[index]}: its batch dimension of {shape[0]} is not divisible "
                f"by the {mesh.num_devices} devices of DataParallel. Use a batch size that is a "
                f"multiple of {mesh.num_devices}, or fewer devices."
            )
        pins[value] = tuple(0 if size > 1 else WHOLE for size in mesh.shape)

    def keep(node: Node, strategies: tuple[Strategy, ...]) -> list[int]:
        every = list(range(len(strategies)))
        whole = [i for i in every if not any(f >= 0 for f in strategies[i].factors)]
        if node.batch_factor is not None:
            wanted = tuple(node.batch_factor if n > 1 else -1 for n in mesh.shape)
            split = [i for i in every if strategies[i].factors == wanted]
            return split or whole or every
        generated = node.kind is NodeKind.OP and all(
            not graph.values[v].shape for v in node.operands
        )
        return every if generated else whole or every

    return pins, keep


def _manual_pins(
    graph: Graph, traced: TracedStep, mesh: LogicalMesh, method: ManualParallel
) -> dict[int, Layout]:
    pins: dict[int, Layout] = {}
    given, wanted = _manual_layouts(traced, mesh, method)
    for value, layout in zip(graph.inputs, given, strict=True):
        if layout is not None:
            pins[value] = layout
    for value, layout, path in zip(graph.outputs, wanted, traced.out_paths, strict=True):
        if value is not None and layout is not None and pins.setdefault(value, layout) != layout:
            raise SpecError(
                f"{path}: the function returns an array that in_specs or out_specs lay out in "
                "another way elsewhere. Ask for one spec in all places, or None in all but one."
            )
    return pins


def _manual_layouts(
    traced: TracedStep, mesh: LogicalMesh, method: ManualParallel
) -> tuple[list[Layout | None], list[Layout | None]]:
    """What is asked for each input and each output; None where nothing is."""

    def layouts(argument: str, specs: Any, tree: Any, paths: Any, avals: Any) -> list:
        found = _broadcast_specs(argument, specs, tree, len(paths))
        return [
            None
            if spec is None
            else from_partition_spec(spec, aval.shape, mesh.axis_names, mesh.shape, path)
            for spec, aval, path in zip(found, avals, paths, strict=True)
        ]

    call, places = traced.call, list(range(len(traced.avals)))
    args, kwargs = call.rebuild(places)
    arguments = (args, kwargs) if kwargs else args
    result = traced.rebuild_output(list(range(len(traced.out_avals))))
    return (
        layouts("in_specs", method.in_specs, arguments, call.paths, traced.avals),
        layouts("out_specs", method.out_specs, result, traced.out_paths, traced.out_avals),
    )


def _without_moved_state(
    traced: TracedStep, mesh: LogicalMesh, method: ManualParallel
) -> TracedStep:
    """State that the user wants out in another layout than in is no state: the next step cannot
    take it as it is, nor can its buffer be used again."""
    given, wanted = _manual_layouts(traced, mesh, method)
    moved = {(i, o) for i, o in traced.state if given[i] and wanted[o] and given[i] != wanted[o]}
    state = tuple(pair for pair in traced.state if pair not in moved)
    inputs = {i for i, _ in moved}
    return replace(traced, state=state, donated=tuple(i for i in traced.donated if i not in inputs))


def _broadcast_specs(
    argument: str, specs: Any, target: Any, num_leaves: int
) -> list[PartitionSpec | None]:
    """One spec per array leaf, from a pytree of specs that is a prefix of the target: the
    arguments or the result, with the number of each array leaf in its place."""
    found: list[PartitionSpec | None] = [None] * num_leaves

    def walk(spec: Any, tree: Any, path: str) -> None:
        if spec is None or isinstance(spec, PartitionSpec):
            for leaf in tree_flatten(tree)[0]:
                if isinstance(leaf, int):
                    found[leaf] = spec
            return
        own, own_def = tree_flatten_with_path(spec, is_leaf=lambda x: x is not spec)
        is_leaf = len(own) == 1 and own[0][1] is spec
        if is_leaf or isinstance(tree, int):
            raise SpecError(
                f"ManualParallel({argument}=…): {path} is {_shortened(spec)}, of type "
                f"{type(spec).__name__}. Give a jax.sharding.PartitionSpec for an array or for "
                "all arrays of a subtree, or None to leave it open."
            )
        try:
            children = own_def.flatten_up_to(tree)
        except (ValueError, TypeError) as error:
            what = "arguments" if argument == "in_specs" else "result"
            raise SpecError(
                f"ManualParallel({argument}=…): {path} does not match the {what} of the function: "
                f"{error} Give a pytree like the {what}, or a prefix of it."
            ) from error
        for (key, child_spec), child in zip(own, children, strict=True):
            walk(child_spec, child, path + jax.tree_util.keystr(key))

    walk(specs, target, argument)
    return found


# -- plan


def program_fingerprint(program: Program) -> str:
    """A hash of every equation with its parameters and shapes: equal programs can share a plan.
    The values of constants do not matter, so that a learning rate may change."""
    digest = hashlib.sha256()

    def visit(part: Program) -> None:
        for equation in part.equations:
            types = [_type_text(part.avals[r]) for r in equation.results]
            operands = [o if isinstance(o, int) else "c" for o in equation.operands]
            params = _plain(equation.params)
            digest.update(repr((equation.name, params, operands, types)).encode())
            for body in equation.bodies:
                visit(body)
        outputs = [o if isinstance(o, int) else "c" for o in part.outputs]
        digest.update(repr((part.inputs, outputs)).encode())

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
    timer: PassTimer,
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
            node, position = graph.producer[value]
            layout = tuple(max(e, WHOLE) for e in sharding.layouts[node][1][position])
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
        num_micro_batches=1,
        estimated_step_s=objective,
        estimated_peak_bytes=report.peak_bytes,
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
            },
            seconds={**timer.seconds, **{f"shard.{k}": v for k, v in stats.seconds.items()}},
        ),
        fingerprint=Fingerprint(program_fingerprint(traced.program), jax.__version__),
        warnings=_warnings(graph, mesh, report),
        in_tree=_in_tree(traced),
        out_tree=_out_tree(traced),
    )


def _describe(method: Any) -> str:
    """The method as the user would write it, defaults and specs left out."""
    parts = []
    for own in fields(method):
        value = getattr(method, own.name)
        default = own.default_factory() if own.default_factory is not MISSING else own.default
        if own.name in ("in_specs", "out_specs") or value == default:
            continue
        shape = value.shape if isinstance(value, LogicalMesh) else value
        parts.append(f"{own.name}={shape!r}")
    return f"{type(method).__name__}({', '.join(parts)})"


def _one_stage(mesh: LogicalMesh, cluster: ClusterSpec, cost: float) -> StagePlan:
    per_host = min(mesh.num_devices, cluster.devices_per_host)
    return StagePlan((0, 1), (max(1, mesh.num_devices // per_host), per_host), mesh.shape, cost)


def _tensors(paths: Any, avals: Any, layouts: Any, roles: dict[int, str]) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(path, tuple(aval.shape), str(aval.dtype), layout, roles.get(index, ""))
        for index, (path, aval, layout) in enumerate(zip(paths, avals, layouts, strict=True))
    )


def _warnings(graph: Graph, mesh: LogicalMesh, report: CostReport) -> tuple[str, ...]:
    found = [
        f"{op.count} × {op.name} at {op.source} runs replicated: no sharding rule is known for it"
        for op in graph.unruled
    ]
    if mesh.memory_bytes is not None and report.peak_bytes > mesh.memory_bytes:
        found.append(
            f"the estimated peak of {report.peak_bytes / 2**30:.1f} GiB per device is more than "
            f"the device's {mesh.memory_bytes / 2**30:.1f} GiB; this version does not bound memory"
        )
    return tuple(found)


def _replicated_plan(
    traced: TracedStep, mesh: LogicalMesh, method: Any, timer: PassTimer
) -> ParallelPlan:
    """One device: nothing to search, nothing to annotate."""
    whole = (WHOLE,) * len(mesh.shape)

    def untouched(program: Program) -> ProgramSharding:
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

    roles = {i: "state" for i, _ in traced.state} | {i: "batch" for i in traced.batch}
    out_roles = {o: "state" for _, o in traced.state}
    return ParallelPlan(
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
        num_micro_batches=1,
        estimated_step_s=0.0,
        estimated_peak_bytes=float(
            sum(prod(a.shape) * getattr(a.dtype, "itemsize", 4) for a in traced.avals)
        ),
        communication_bytes=0.0,
        modules=(),
        solver=SolverReport(0.0, 0.0, 0.0, {}, dict(timer.seconds)),
        fingerprint=Fingerprint(program_fingerprint(traced.program), jax.__version__),
        in_tree=_in_tree(traced),
        out_tree=_out_tree(traced),
    )


def bind_plan(plan: ParallelPlan, traced: TracedStep) -> ParallelPlan:
    """A plan made elsewhere, checked against this program and given its pytrees."""
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


# -- programs


def annotate(planned: PlannedStep, devices: Sequence[Any]) -> tuple[Callable[..., list[Any]], Any]:
    """(flat function for `jax.jit`, jax mesh) of a planned step on the given devices."""
    plan = planned.plan
    if len(devices) < plan.num_devices:
        raise MeshError(
            f"the plan's mesh {plan.mesh_shape} needs {plan.num_devices} devices; "
            f"{len(devices)} were given. Use more devices or a smaller mesh."
        )
    grid = np.array(devices[: plan.num_devices], dtype=object).reshape(plan.mesh_shape)
    mesh = _jax.fresh_mesh(grid, plan.axis_names)
    if plan.num_devices == 1:  # nothing to annotate: the step is simply jitted
        return planned.traced.flat_fn, mesh
    return annotated_function(planned.traced.program, plan.program, mesh), mesh


__all__ = [
    "PassTimer",
    "PlannedStep",
    "StepOptions",
    "annotate",
    "bind_plan",
    "flatten_call",
    "plan_step",
]
