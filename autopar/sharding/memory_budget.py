"""How much memory a plan may use, and what to tell the user when nothing fits.

The budget of a device is its memory less a reserve: `RESERVE_SHARE` of it is left to the CUDA
context, NCCL's buffers and fragmentation, which no compiler counts. `memory_budget_bytes` in
`ShardingOptions` is taken as it is. Methods in which the user decides the layouts have no budget;
their plans warn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from autopar.cost.holding import Holding
from autopar.cost.host_memory import with_host_memory
from autopar.cost.memory import MemoryProfile
from autopar.errors import MemoryBudgetError
from autopar.ir.graph import Graph, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.ir.text import format_bytes, name_pattern, name_skeleton
from autopar.ir.traced_step import TracedStep
from autopar.methods import (
    AnyMethod,
    DataParallel,
    ManualParallel,
    ShardingOptions,
    ShardParallel,
    options_of,
)
from autopar.tracer.costs import aval_bytes

RESERVE_SHARE = 0.10
_NUM_SHOWN = 6


@dataclass(frozen=True, eq=False)
class Miss:
    """A plan that does not fit: the graph, where it would run, and what it would hold when."""

    graph: Graph
    mesh: LogicalMesh
    memory: MemoryProfile


def device_budget(mesh: LogicalMesh) -> float | None:
    """What a device has for a step; None if its memory is not known."""
    return None if mesh.memory_bytes is None else mesh.memory_bytes * (1 - RESERVE_SHARE)


def memory_budget(mesh: LogicalMesh, method: AnyMethod) -> float | None:
    """Bytes per device that the solver must stay within; None for no limit."""
    given = options_of(method).memory_budget_bytes
    if given is not None:
        return float(given)
    if isinstance(method, (DataParallel, ManualParallel)):
        return None
    if mesh.num_devices == 1 and not _may_be_rewritten(mesh, method):
        return None
    return device_budget(mesh)


def _may_be_rewritten(mesh: LogicalMesh, method: AnyMethod) -> bool:
    """Whether a step on a single device is recomputed or cut into micro-batches if it is too large.
    A CPU shares its memory with all else and may swap: there, only a budget that is given counts.
    """
    on_cpu = mesh.device is not None and mesh.device.name == "cpu"
    return isinstance(method, ShardParallel) and not on_cpu


def corrected(graph: Graph, step: TracedStep, method: AnyMethod) -> Graph:
    """The graph with state in host memory, if the step has any, and with what XLA was found to keep
    beside the arguments of such steps, if that is known
    (`ShardingOptions(memory_correction=…)`)."""
    graph = with_host_memory(graph, step)
    known = options_of(method).memory_correction
    factor = 1.0 if known is None else known.factor(bool(step.remat))
    if factor == 1.0:
        return graph
    arguments = frozenset(graph.inputs)
    return replace(graph, liveness=graph.liveness.scaled(factor, arguments))


def out_of_memory(
    traced: TracedStep,
    misses: Sequence[Miss],
    method: AnyMethod,
) -> MemoryBudgetError:
    """The error for a step that fits on none of the meshes; `misses` are what came nearest."""
    nearest = min(misses, key=lambda s: s.memory.peak_bytes)
    peak = nearest.memory.peak_bytes
    options = options_of(method)
    budget = memory_budget(nearest.mesh, method)
    assert budget is not None
    held = nearest.memory.at(nearest.memory.peak_time)
    tried = f"the best of {len(misses)} meshes" if len(misses) > 1 else "the only mesh tried"
    source = (
        "ShardingOptions(memory_budget_bytes=…)"
        if options.memory_budget_bytes is not None
        else f"the device's {format_bytes(nearest.mesh.memory_bytes or 0)} less "
        f"{RESERVE_SHARE:.0%} kept in reserve"
    )
    lines = [
        f"{traced.name}: {_smallest(traced, nearest, tried)}, "
        f"{format_bytes(peak - budget)} more than the budget of {format_bytes(budget)} ({source}).",
        "At the peak a device holds:",
        *_dominating(nearest.graph, held),
    ]
    number, remedies = _remedies(traced, nearest, held, budget, options)
    arguments = frozenset(nearest.graph.inputs)
    return MemoryBudgetError(
        "\n".join(lines),
        peak,
        budget,
        remedies=remedies,
        num_micro_batches=number,
        argument_bytes=sum(h.num_bytes for h in held if h.value in arguments and not h.is_copy),
    )


def _smallest(traced: TracedStep, nearest: Miss, tried: str) -> str:
    peak, mesh = format_bytes(nearest.memory.peak_bytes), nearest.mesh
    number = traced.num_micro_batches
    cut = f" with {number} micro-batches" if number > 1 else ""
    if mesh.num_devices == 1:
        return f"does not fit on one device. The smallest peak found is {peak}{cut}"
    return (
        f"no sharding fits. The smallest peak found is {peak} per device on mesh {mesh.shape}{cut} "
        f"({tried})"
    )


def _kind(graph: Graph, holding: Holding, state: set[int]) -> tuple[str, str]:
    """(category, name in the user's words) of something held."""
    node = graph.nodes[graph.producer[holding.value][0]]
    if node.kind is NodeKind.FINISH:  # stands for the op whose sums it finishes
        node = graph.nodes[graph.producer[node.operands[0]][0]]
    value = graph.values[holding.value]
    if node.kind is NodeKind.INPUT and not holding.is_copy:
        path = value.path or "an array captured by the function"
        return ("state" if holding.value in state else "batch"), path
    if holding.is_copy:
        origin = value.path or node.module or node.name
        return "resharded copies", origin
    if node.region == "forward":
        return "activations", node.module or node.name
    return ("gradients and temporaries" if node.region == "backward" else "update"), (
        node.module or node.name
    )


def _dominating(graph: Graph, held: Sequence[Holding]) -> list[str]:
    """The largest groups of holdings, equal layers together."""
    state = {graph.inputs[i] for i, _ in graph.state}
    groups: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for holding in held:
        category, name = _kind(graph, holding, state)
        groups[category, name_skeleton(name)].append((name, holding.num_bytes))
    ranked = sorted(groups.items(), key=lambda item: -sum(b for _, b in item[1]))
    lines = []
    for (category, _), members in ranked[:_NUM_SHOWN]:
        names = list(dict.fromkeys(name for name, _ in members))
        total = format_bytes(sum(b for _, b in members))
        count = f" ({len(names)} of them)" if len(names) > 1 else ""
        lines.append(f"  {total:>10}  {category}: {name_pattern(names)}{count}")
    rest = sum(b for _, members in ranked[_NUM_SHOWN:] for _, b in members)
    if rest:
        lines.append(f"  {format_bytes(rest):>10}  everything else")
    return lines


def _remedies(
    traced: TracedStep,
    nearest: Miss,
    held: Sequence[Holding],
    budget: float,
    options: ShardingOptions,
) -> tuple[int | None, dict[str, str]]:
    """(a number of micro-batches that may be enough, what would help -> how)."""
    graph, mesh, peak = nearest.graph, nearest.mesh, nearest.memory.peak_bytes
    state = {graph.inputs[i] for i, _ in graph.state}
    by_kind: dict[str, float] = defaultdict(float)
    wide_state = 0.0
    for holding in held:
        category, _ = _kind(graph, holding, state)
        by_kind[category] += holding.num_bytes
        if category == "state" and graph.values[holding.value].dtype == "float32":
            wide_state += holding.num_bytes
    activations = peak - by_kind["state"] - by_kind["update"]
    excess = peak - budget
    remedies: dict[str, str] = {}
    number = None
    if activations > excess:
        least = traced.num_micro_batches * ceil(activations / (activations - excess))
        number = _number_from(least, traced)
    if number is not None:
        share = number // traced.num_micro_batches
        remedies["micro-batches"] = (
            f"num_micro_batches={number} or more keeps about 1/{share} of the "
            f"{format_bytes(activations)} that depend on the batch; or a smaller batch"
        )
    if options.remat == "none" and by_kind["activations"] > 0:
        remedies["rematerialisation"] = (
            f'ShardingOptions(remat="auto") computes activations '
            f"({format_bytes(by_kind['activations'])}) again in the backward pass instead of "
            "keeping them"
        )
    if wide_state / 2 > 0 and by_kind["state"] > 0.2 * peak:
        remedies["state in bfloat16"] = (
            f"halves {format_bytes(wide_state)} of float32 state, "
            f"{'enough' if wide_state / 2 >= excess else 'not enough by itself'}"
        )
    devices = ceil(mesh.num_devices * peak / budget)
    remedies["more devices"] = (
        f"about {devices} instead of {mesh.num_devices}, if all of it is split further; or devices "
        "with more memory"
    )
    return number, remedies


def _number_from(least: int, traced: TracedStep) -> int | None:
    """The smallest number of micro-batches from this one on that divides the batch's rows."""
    rows = next((traced.avals[i].shape[0] for i in traced.batch if traced.avals[i].shape), 0)
    return next((n for n in range(least, rows + 1) if rows % n == 0), None)


def state_floor(step: TracedStep, num_devices: int) -> float:
    """Bytes that every plan holds on some device: the state, divided evenly over all of them."""
    on_host = set() if step.host is None else set(step.host.inputs)
    total = sum(aval_bytes(step.avals[i]) for i, _ in step.state if i not in on_host)
    return total / num_devices
