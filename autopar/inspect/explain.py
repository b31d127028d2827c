"""`plan.explain()`: from a `ParallelPlan` to text that says what runs where, how, and at what cost.

Every section is a list of lines of at most `WIDTH` columns, made from the plan alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf

from autopar.errors import ArgumentError
from autopar.inspect.arrays_text import array_table
from autopar.inspect.blocks_text import blocks_line
from autopar.inspect.breakdown import (
    limits_of,
    mesh_plans,
    num_devices,
    rates_of,
    shares_of,
)
from autopar.inspect.costs_text import collective_lines, memory_line, memory_lines
from autopar.inspect.lines import WIDTH, counted, number_range, number_runs, paragraph
from autopar.inspect.memory_text import found_sentences, freeing_sentences, host_sentences
from autopar.inspect.module_tree import tree_lines
from autopar.inspect.search_text import search_lines, solver_lines, stages_text
from autopar.inspect.verdict import verdict_lines, warning_lines
from autopar.inspect.why_text import pin_lines
from autopar.ir.blocks import Blocks
from autopar.ir.plan import ParallelPlan, StagePlan
from autopar.ir.text import (
    format_bytes,
    format_rate,
    format_seconds,
    layer_names,
    seconds_like,
    table,
)

_ARGUMENT = re.compile(r"args\[\d+\]|[^.\[]*")  # at the beginning of an array's path


DETAILS = ("short", "full")


def explain(plan: ParallelPlan, depth: int | None = None, detail: str = "short") -> str:
    """The plan as text: one screen, or all that is known, with the blocks of its step."""
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 1):
        raise ArgumentError(f"explain(depth={depth!r}): needs a whole number ≥ 1, or None.")
    if detail not in DETAILS:
        raise ArgumentError(f"explain(detail={detail!r}): needs 'short' or 'full'.")
    if detail == "short":
        return explain_shortly(plan, depth)
    is_known = getattr(plan.origin, "choice", None) is not None  # of a plan on one mesh
    return explain_plan(plan, depth, plan.origin.blocks if is_known else None)


def explain_shortly(plan: ParallelPlan, depth: int | None = None) -> str:
    """One screen: head, step, limits, stages, modules without their parameters, memory, verdict."""
    stages = _stages(plan) if plan.is_pipeline else []
    room = MOST_SHORT_LINES - len(stages)
    return _joined(
        [
            _head(plan),
            _step(plan),
            _limits(plan),
            stages if len(stages) <= MOST_SHORT_LINES // 2 else stages_line(plan),
            tree_lines(plan, depth, _cost_of(plan), most=max(room, 6), parameters=False),
            [*memory_line(plan), *_memory_found(plan), *verdict_lines(plan)],
            warning_lines(plan),
            [MORE],
        ]
    )


MORE = 'more: plan.explain(detail="full"), plan.explain(PATH), plan.report("plan.html")'
MOST_SHORT_LINES = 18  # of stages and modules together


def _cost_of(plan: ParallelPlan) -> Callable[[float], str]:
    """Formats costs of modules and collectives in the unit of the step."""
    return seconds_like(plan.estimated_step_s) if plan.is_timed else _plain


def _joined(sections: list[list[str]]) -> str:
    lines = "\n\n".join("\n".join(section) for section in sections if section).split("\n")
    return "\n".join(_fitted(line).rstrip() for line in lines)


def explain_plan(plan: ParallelPlan, depth: int | None = None, blocks: Blocks | None = None) -> str:
    """`depth`: levels of modules; None for as many as fit on two screens. `blocks`: of the step, if
    known."""
    cost = _cost_of(plan)
    sections = [
        _head(plan),
        _step(plan),
        _limits(plan),
        _stages(plan) if plan.is_pipeline else [],
        tree_lines(plan, depth, cost),
        collective_lines(plan, cost),
        [*memory_lines(plan), *_memory_found(plan)],
        *_arrays(plan),
        solver_lines(plan),
        _blocks(blocks),
        search_lines(plan.search) if plan.search is not None else [],
        warning_lines(plan),
    ]
    return _joined(sections)


def _plain(cost: float) -> str:
    return f"{cost:.6g}"


def _fitted(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


# -- head


def where_text(plan: ParallelPlan) -> str:
    """The step, and the mesh or stages that run it."""
    devices = num_devices(plan)
    if plan.is_pipeline:
        meshes = len({stage.mesh for stage in plan.stages})
        on = f"{meshes} submeshes, " if meshes < plan.num_stages else ""
        stages = counted(plan.num_stages, "stage")
        return f"{plan.name}: a pipeline of {stages} on {on}{counted(devices, 'device')}"
    if devices == 1:
        return f"{plan.name}: on one device"
    axes = zip(plan.axis_names, plan.mesh_shape, strict=True)
    mesh = " × ".join(f"{name}={size}" for name, size in axes)
    return f"{plan.name}: on a mesh {mesh} of {devices} devices"


def _head(plan: ParallelPlan) -> list[str]:
    lines = paragraph(where_text(plan), "")
    chosen = f", which chose {plan.method}" if plan.asked not in (None, plan.method) else ""
    lines += paragraph(f"method    {plan.asked or plan.method}{chosen}")
    lines += paragraph(f"cluster   {cluster_text(plan)}")
    if (costs := costs_text(plan)) is not None:
        lines += paragraph(f"costs     {costs}")
    batch = (t.path for t in plan.inputs if t.role == "batch")
    names = dict.fromkeys(_ARGUMENT.match(path)[0] for path in batch)  # type: ignore[index]
    if len(names) > 1:
        lines += paragraph(f"batch     {', '.join(names)}")
    if plan.schedule:
        micro_batches = counted(plan.num_micro_batches, "micro-batch")
        lines.append(f"  schedule  {plan.schedule}, {micro_batches}")
    elif plan.is_pipeline:
        lines.append("  each stage computes its own outputs; there are no transfers")
    elif plan.num_micro_batches > 1:
        lines.append(f"  schedule  {plan.num_micro_batches} micro-batches, one after another")
    if plan.unrolled:
        lines += paragraph("scans over layers are written out")
    if plan.remat:
        lines += paragraph(f"recomputed in the backward pass: {layer_names(plan.remat)}")
    for line in pin_lines(plan):
        lines += paragraph(line)
    if plan.xla_options:
        given = ", ".join(f"{name}={value}" for name, value in plan.xla_options)
        lines += paragraph(f"options of XLA: {given}")
    return lines


def cluster_text(plan: ParallelPlan) -> str:
    cluster = plan.cluster
    if cluster is None or not plan.is_timed:
        return plan.device
    device = cluster.spec
    hosts = counted(cluster.num_hosts, "host")
    links = f"{format_bytes(device.intra_host_bandwidth)}/s between devices of a host"
    if cluster.num_hosts > 1:
        links += f", {format_bytes(device.host_bandwidth)}/s between hosts"
    return (
        f"{hosts} × {cluster.devices_per_host} {device.name} "
        f"({format_bytes(device.memory_bytes)} each), {links}"
    )


def costs_text(plan: ParallelPlan) -> str | None:
    """Which costs were measured, and which come from the data sheet."""
    profile = None if plan.cluster is None else plan.cluster.priced_by
    if profile is None or not plan.is_timed:
        return None
    text = f"measured: {', '.join(profile.parts) or 'overheads only'}, from {profile.text}"
    missing = [_UNMEASURED.get(part, part) for part in profile.missing]
    if missing:
        text += f"; from the data sheet: {', '.join(missing)}"
    return text


_UNMEASURED = {
    "collectives": "collectives (links)",
    "crossings": "transfers between meshes",
    "streams": "memory-bound operators",
}


# -- the step


# Without and with an estimate of what runs under compute.
_COMMUNICATION = ("communication (assumed not to overlap)", "communication that compute waits for")


def _step(plan: ParallelPlan) -> list[str]:
    lines = []
    if plan.is_timed:
        shares = shares_of(plan)
        lines.append(f"predicted step: {format_seconds(plan.estimated_step_s)}")
        parts = [
            ("compute", shares.compute),
            (_COMMUNICATION[plan.hidden_s is not None], shares.communication),
            ("pipeline bubble", shares.bubble),
            ("transfers from host memory", shares.host),
            ("launch overhead", shares.launch),
        ]
        text = seconds_like(plan.estimated_step_s)
        rows = [
            (f"  {name}", text(seconds), f"{seconds / shares.step:.0%}")
            for name, seconds in parts
            if seconds and shares.step and seconds / shares.step >= 5e-3
        ]
        width = max((len(row[0]) for row in rows), default=0)
        lines += [f"{name:{width}}  {seconds:>10}  {part:>4}" for name, seconds, part in rows]
        if shares.step and shares.hidden / shares.step >= 5e-3:
            lines.append(f"  and {text(shares.hidden)} of communication under compute")
    lines += [line for text in judged_sentences(plan) for line in paragraph(text, "")]
    rates = rates_of(plan)
    if rates is not None and rates.model:
        text = (
            f"{format_rate(rates.model)} per device, {rates.model / rates.peak:.1%} of the peak "
            f"of {format_rate(rates.peak)}"
        )
        for what, rate, before in (
            ("including recomputation", rates.distinct, rates.model),
            ("including redundant work", rates.computed, rates.distinct),
        ):
            if rate > 1.01 * before:
                text += f"; {format_rate(rate)} ({rate / rates.peak:.1%}) {what}"
        lines += paragraph(text)
    budget = plan.memory_budget_bytes
    limit = f", budget {format_bytes(budget)}" if budget < inf else ""
    lines.append(f"  peak memory {format_bytes(plan.estimated_peak_bytes)} per device{limit}")
    at_most = " at most" if plan.is_pipeline else ""
    lines.append(f"  sent {format_bytes(plan.communication_bytes)} per device{at_most}")
    return lines


def judged_sentences(plan: ParallelPlan) -> list[str]:
    """The step as its compiled program shows it, if that was read."""
    judged = plan.judged
    if judged is None:
        return []
    text = f"step by XLA's schedule: {format_seconds(judged.step_s)}"
    if plan.is_timed:
        text += f" ({judged.step_s / plan.estimated_step_s:.2f} × predicted)"
    if judged.links_s:
        text += (
            f"; collectives {format_seconds(judged.links_s)}, of which kernels wait for "
            f"{format_seconds(judged.exposed_s)}"
        )
    return [text]


def _limits(plan: ParallelPlan) -> list[str]:
    lines = [line for sentence in limits_of(plan) for line in paragraph(sentence)]
    return ["what limits the step:", *lines] if lines else []


def _memory_found(plan: ParallelPlan) -> list[str]:
    """XLA's figures, and what would free memory."""
    sentences = (*host_sentences(plan), *found_sentences(plan), *freeing_sentences(plan))
    return [line for sentence in sentences for line in paragraph(sentence, "")]


def _blocks(blocks: Blocks | None) -> list[str]:
    if blocks is None:
        return []
    return ["parallel blocks (details: plan.blocks()):", *paragraph(blocks_line(blocks))]


# -- stages


def _stages(plan: ParallelPlan) -> list[str]:
    header = ("stage", "layers", "submesh", "mesh", "devices")
    header += ("forward", "backward", "per step", "transfer", "peak", "budget")
    rows = []
    for number, (stage, mesh_plan) in enumerate(zip(plan.stages, mesh_plans(plan), strict=True)):
        budget, peak = mesh_plan.memory_budget_bytes, mesh_plan.estimated_peak_bytes
        rows.append(
            (
                str(number),
                number_range(*stage.layers),
                "×".join(map(str, stage.submesh)),
                "×".join(map(str, stage.mesh_shape)),
                number_runs(stage.devices),
                *(format_seconds(t) if t else "-" for t in _times(stage)),
                format_bytes(peak),
                f"{peak / budget:.0%}" if budget < inf else "-",
            )
        )
    lines = [
        "stages (times per micro-batch):",
        *table(header, rows, right=range(5, 11), width=WIDTH),
    ]
    for number, stage in enumerate(plan.stages):
        names = layer_names(plan.layers[slice(*stage.layers)])
        remat = "; recomputed in the backward pass" if stage.remat else ""
        lines += paragraph(f"stage {number}: {names}{remat}")
    return lines


def stages_line(plan: ParallelPlan) -> list[str]:
    """Many stages, those that are alike together."""
    return ["stages:", *paragraph(stages_text(plan.stages))]


def _times(stage: StagePlan) -> tuple[float, ...]:
    if not stage.forward_s:  # a stage of an initializer
        return (stage.cost, 0.0, 0.0, 0.0)
    return stage.forward_s, stage.backward_s, stage.once_s, stage.transfer_s


# -- arrays


def _arrays(plan: ParallelPlan) -> list[list[str]]:
    is_initializer = plan.is_pipeline and not plan.schedule
    outputs = tuple(t for t in plan.outputs if t.role != "state" or is_initializer)
    tables = []
    if plan.inputs and not is_initializer:
        tables.append(array_table("inputs", plan.inputs, plan))
    if outputs:
        title = "outputs" if is_initializer else "outputs other than state"
        tables.append(array_table(title, outputs, plan))
    if plan.named:
        tables.append(array_table("named values", plan.named, plan))
    copied = [f"{t.path} ({number_runs(t.stages[1:])})" for t in plan.inputs if t.stages[1:]]
    if copied and plan.schedule:
        tables.append(["copied to other stages every step:", *(f"  {c}" for c in copied)])
    return tables
