"""The files of a debug dump beside compiled programs: from a `PlannedStep` to `DebugFile`s.

Per stage: the program before sharding, every operator's strategy, reshardings, memory, and the
solver's problem. Of the whole step: placement, schedule, transfers with their tiles, versions.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from math import prod
from typing import Any

import jax

from autopar import _jax
from autopar.cost.report import edge_weight
from autopar.inspect.layouts_text import layout_text, step_name
from autopar.inspect.resharding import reshard_steps
from autopar.inspect.strategies_text import strategy_text
from autopar.ir.details import MEMORY_CATEGORIES
from autopar.ir.graph import NodeKind
from autopar.ir.pipeline import Send
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.spec import num_shards
from autopar.ir.text import format_bytes, format_seconds, table
from autopar.ir.tiles import TilePlan
from autopar.ir.traced_step import TracedStep
from autopar.lower.annotate import annotated_function
from autopar.lower.planned_step import PlannedStep
from autopar.lower.schedules import make_schedule
from autopar.lower.tiles import plan_transfers
from autopar.runtime.debug import DebugFile
from autopar.runtime.executable import Executable
from autopar.runtime.pipeline import PipelineExecutable
from autopar.runtime.remote.executable import RemoteExecutable
from autopar.sharding.assemble import unsharded
from autopar.sharding.lp_file import problem_text
from autopar.sharding.origin import Origin
from autopar.sharding.solve import GraphSharding

_PACKAGES = ("jax", "jaxlib", "numpy", "scipy", "highspy", "pulp", "flax", "optax", "ray")


@dataclass(frozen=True)
class _DumpedStage:
    """A step on one mesh: the whole, or a stage. `prefix`: of its files."""

    prefix: str
    name: str
    step: TracedStep
    plan: ParallelPlan


def describing(planned: PlannedStep) -> Callable[[Executable], Iterable[DebugFile]]:
    """What an executable of the step adds to its dump."""
    return partial(_files, planned)


def _files(planned: PlannedStep, executable: Executable) -> Iterator[DebugFile]:
    plan = planned.plan
    yield DebugFile("versions.json", "versions of Python, packages and devices", _versions)
    yield DebugFile(
        "before.mlir",
        "StableHLO of the traced function, before sharding",
        lambda: _before(planned.traced),
    )
    yield DebugFile(
        "placement.txt",
        "the sharding of every input, output and named value",
        lambda: _placement(plan),
    )
    yield DebugFile(
        "placement.json",
        "the same as data, with shapes and bytes per device",
        lambda: "[\n" + ",\n".join(map(json.dumps, _places(plan))) + "\n]\n",
    )
    yield DebugFile(
        "strategies.txt",
        "every operator: its sharding, parallelism and cost",
        lambda: strategy_text(plan) + "\n",
    )
    for part in _parts(planned):
        yield from _part_files(part)
    if plan.is_pipeline and plan.schedule:
        yield DebugFile(
            "schedule.txt",
            "what each mesh runs per clock: phase, stage, micro-batch",
            lambda: _schedule(plan),
        )
    crossings = _crossings(executable)
    if crossings is not None:
        yield DebugFile(
            "transfers.json",
            "every transfer between meshes, with its tiles",
            lambda: "[\n" + ",\n".join(map(json.dumps, crossings())) + "\n]\n",
        )


def _parts(planned: PlannedStep) -> list[_DumpedStage]:
    plan = planned.plan
    if planned.made:
        return [
            _DumpedStage(f"stage{k}.", f"stage {k}", part.traced, part.plan)
            for k, part in enumerate(planned.made)
        ]
    if planned.sliced is None:
        return [_DumpedStage("", plan.name, planned.traced, plan)]
    stages = []
    for k, (cut, stage) in enumerate(zip(planned.sliced.stages, plan.stages, strict=True)):
        assert stage.plan is not None
        stages.append(_DumpedStage(f"stage{k}.", f"stage {k}", cut.step, stage.plan))
    return stages


def _part_files(part: _DumpedStage) -> Iterator[DebugFile]:
    of = "" if not part.prefix else f" of {part.name}"
    if part.prefix:
        yield DebugFile(
            f"{part.prefix}before.mlir",
            f"StableHLO{of} before sharding",
            lambda: _stage_before(part.step),
        )
    if part.plan.details is not None and part.plan.details.memory is not None:
        yield DebugFile(
            f"{part.prefix}memory.txt",
            f"memory at the predicted peak{of}",
            lambda: _memory(part.plan),
        )
    origin = part.plan.origin
    if not isinstance(origin, Origin):
        return
    yield DebugFile(
        f"{part.prefix}strategies.json",
        f"all strategies of every operator{of}, and the chosen one",
        lambda: _strategies(origin.sharding),
    )
    yield DebugFile(
        f"{part.prefix}resharding.txt",
        f"every value{of} that is produced in one layout and read in another",
        lambda: _resharding(origin.sharding),
    )
    yield DebugFile(
        f"{part.prefix}problem.lp",
        f"the solver's integer program{of}, as an .lp file",
        lambda: problem_text(
            origin.sharding.problem, origin.sharding.choice, _binding(part, origin)
        ),
    )


def _binding(part: _DumpedStage, origin: Origin) -> float | None:
    """The memory budget, if it was binding."""
    return origin.budget if part.plan.solver.unbounded else None


# -- programs before they were sharded


def _before(step: TracedStep) -> str:
    return _text_of(step.flat_fn, step, step.name)


def _stage_before(step: TracedStep) -> str:
    mesh = _jax.fresh_mesh(jax.devices()[:1], ("x",))
    return _text_of(annotated_function(step.program, unsharded(step.program), mesh), step, "stage")


def _text_of(function: Callable[..., Any], step: TracedStep, name: str) -> str:
    def run(*leaves: Any) -> list[Any]:
        return list(function(*leaves))

    run.__name__ = run.__qualname__ = name
    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in step.avals
    ]
    return _jax.lowered(jax.jit(run, keep_unused=True), *types).as_text()


# -- placement


def _places(plan: ParallelPlan) -> Iterator[dict[str, Any]]:
    groups = (("input", plan.inputs), ("output", plan.outputs), ("named value", plan.named))
    for kind, tensors in groups:
        for tensor in tensors:
            yield _place(plan, kind, tensor)


def _place(plan: ParallelPlan, kind: str, tensor: Tensor) -> dict[str, Any]:
    mesh_plan = plan.stages[tensor.stages[0]].plan or plan
    parts = [1] * len(tensor.shape)
    for entry, size in zip(tensor.layout, mesh_plan.mesh_shape, strict=True):
        if entry >= 0:
            parts[entry] *= size
    shard = [size // n for size, n in zip(tensor.held_shape(), parts, strict=True)]
    itemsize = _itemsize(tensor.dtype)
    return {
        "path": tensor.path,
        "kind": kind,
        "role": tensor.role,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "spec": layout_text(tensor.layout, len(tensor.shape), mesh_plan.axis_names),
        "layout": list(tensor.layout),
        "stages": list(tensor.stages),
        "mesh_shape": list(mesh_plan.mesh_shape),
        "axis_names": list(mesh_plan.axis_names),
        "shard_shape": shard,
        "bytes_per_device": None if itemsize is None else prod(shard) * itemsize,
    }


def _itemsize(dtype: str) -> int | None:
    try:
        return jax.numpy.dtype(dtype).itemsize
    except TypeError:  # random keys
        return None


def _placement(plan: ParallelPlan) -> str:
    header = ("path", "kind", "array", "spec", "shard", "stages")
    rows = [
        (
            place["path"],
            f"{place['kind']} ({place['role']})" if place["role"] else place["kind"],
            f"{place['dtype']}{place['shape']}",
            place["spec"],
            f"{place['shard_shape']}",
            ", ".join(map(str, place["stages"])),
        )
        for place in _places(plan)
    ]
    return "\n".join(table(header, rows)) + "\n"


# -- the solver's choice


def _strategies(sharding: GraphSharding) -> str:
    """Classes of operators with a common decision, and every operator with its class."""
    problem, graph, names = sharding.problem, sharding.graph, sharding.mesh.axis_names

    def texts(values: Sequence[int], layouts: Sequence[Any]) -> list[str]:
        return [
            layout_text(layout, len(graph.values[v].shape), names)
            for v, layout in zip(values, layouts, strict=True)
        ]

    classes = {}
    for owner, strategies in problem.strategies.items():
        node = graph.nodes[problem.representative[owner]]
        costs = problem.pairwise.costs[owner]
        classes[owner] = {
            "chosen": sharding.choice[owner],
            "strategies": [
                {
                    "operands": texts(node.operands, strategy.operands),
                    "results": texts(node.results, strategy.results),
                    "cost": float(costs[s]),
                }
                for s, strategy in enumerate(strategies)
            ],
        }
    nodes = [
        {
            "kind": node.kind.value,
            "operator": node.name,
            "module": node.module,
            "region": node.region,
            "runs": node.weight,
            "class": owner,
            "operands": list(node.operands),
            "results": list(node.results),
            "paths": [graph.values[v].path for v in node.results if graph.values[v].path],
        }
        for node, owner in zip(graph.nodes, problem.classes, strict=True)
    ]
    return json.dumps({"classes": classes, "nodes": nodes})


def _resharding(sharding: GraphSharding) -> str:
    graph, mesh = sharding.graph, sharding.mesh
    names = mesh.axis_names
    rows = []
    for index, node in enumerate(graph.nodes):
        for position, value in enumerate(node.operands):
            u, result = graph.producer[value]
            source = sharding.layouts[u][1][result]
            target = sharding.layouts[index][0][position]
            if source == target:
                continue
            info, producer = graph.values[value], graph.nodes[u]
            seconds, steps = reshard_steps(mesh, graph, value, source, target)
            times = edge_weight(producer, node)
            ndim = len(info.shape)
            local = info.num_bytes / num_shards(source, mesh.shape)
            rows.append(
                (
                    info.path or f"{info.dtype}{list(info.shape)}",
                    "an argument" if producer.kind is NodeKind.INPUT else producer.name,
                    f"{node.name} ({node.module or '-'}, {node.region})",
                    layout_text(source, ndim, names),
                    layout_text(target, ndim, names),
                    " then ".join(step_name(step, mesh) for step in steps),
                    f"{times:g}",
                    format_bytes(local),
                    format_seconds(times * seconds) if mesh.device else f"{times * seconds:.6g}",
                )
            )
    header = ("value", "producer", "consumer", "from", "to", "by", "times", "bytes", "cost")
    return "\n".join(table(header, rows)) + "\n" if rows else "No value is resharded.\n"


def _memory(plan: ParallelPlan) -> str:
    assert plan.details is not None and plan.details.memory is not None
    memory = plan.details.memory
    lines = [
        f"predicted peak {format_bytes(plan.estimated_peak_bytes)} per device, "
        f"{format_seconds(memory.peak_s)} after the start",
        *(
            f"  {name}: {format_bytes(held)}"
            for name, held in zip(MEMORY_CATEGORIES, memory.at_peak, strict=True)
            if held
        ),
        "",
        "largest arrays at the peak:",
    ]
    rows = [
        (array.what, array.module or "-", array.category, format_bytes(array.num_bytes))
        for array in memory.largest
    ]
    if rows:
        lines += table(("what", "module", "category", "bytes"), rows)
    return "\n".join(lines) + "\n"


# -- pipelines


def _schedule(plan: ParallelPlan) -> str:
    stage_mesh = [stage.mesh for stage in plan.stages]
    schedule = make_schedule(
        plan.schedule, len(plan.stages), plan.num_micro_batches, stage_mesh=stage_mesh
    )
    header = ("clock", *(f"mesh {m}" for m in range(max(stage_mesh) + 1)))
    rows = []
    for clock, tasks in enumerate(schedule.clocks):
        cells = [
            ""
            if task is None
            else f"{task.phase.value} {task.stage}"
            + ("" if task.micro_batch is None else f" of {task.micro_batch}")
            for task in tasks
        ]
        rows.append((str(clock), *cells))
    return "\n".join([plan.schedule, *table(header, rows)]) + "\n"


def _crossings(executable: Executable) -> Callable[[], list[dict[str, Any]]] | None:
    """The transfers of a pipeline, as data; None for a step on one mesh."""
    if isinstance(executable, PipelineExecutable):

        def local() -> list[dict[str, Any]]:
            pipeline, buffers = executable.pipeline, executable.buffers
            plans = plan_transfers(pipeline, buffers)
            return [
                _crossing(
                    number,
                    f"stage {t.source}",
                    f"stage {t.target}",
                    buffers[t.source, t.ref.value],
                    plans.get(number),
                )
                for number, t in enumerate(pipeline.transfers)
            ]

        return local
    if isinstance(executable, RemoteExecutable) and executable.transfers:

        def remote() -> list[dict[str, Any]]:
            known: Mapping[int, Any] = executable.transfers
            ends = {
                number: (f"mesh {mesh}", f"mesh {instruction.to_mesh}")
                for mesh, program in enumerate(executable.programs.meshes)
                for instruction in program.instructions
                if isinstance(instruction, Send)
                for number in instruction.transfers
            }
            return [
                _crossing(number, *ends.get(number, ("", "")), transfer.source, transfer.tiles)
                for number, transfer in sorted(known.items())
            ]

        return remote
    return None


def _crossing(
    number: int, source: str, target: str, array: Any, tiles: TilePlan | None
) -> dict[str, Any]:
    summary = {
        "transfer": number,
        "from": source,
        "to": target,
        "array": f"{array.dtype}{list(array.shape)}",
    }
    if tiles is None:
        return {**summary, "tiles": "as it is, shard by shard, or through the host"}
    return {
        **summary,
        "link_bytes": tiles.link_bytes,
        "lower_bound_bytes": tiles.lower_bound_bytes,
        "busiest_sender_bytes": tiles.max_sender_bytes,
        "busiest_receiver_bytes": tiles.max_receiver_bytes,
        **asdict(tiles),
    }


# -- versions


def _versions() -> str:
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    versions["autopar"] = getattr(sys.modules.get("autopar"), "__version__", "")
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    devices = sorted({f"{d.platform}: {d.device_kind}" for d in jax.devices()})
    return json.dumps({**versions, "devices": devices}, indent=1)
