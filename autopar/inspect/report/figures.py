"""The few figures that a plan is judged by: from a `ParallelPlan` to a `Figures`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_seconds
from autopar.ir.timeline import Timeline


@dataclass(frozen=True)
class Figures:
    """`batch_rows`: leading dimension of the batch, None if arrays disagree. `peak_flops`: a
    device's vendor rate for the precision that most of the work is in, 0 if unknown. `bubble`: the
    share of the step in which devices wait. `limits`: what limits the step, in sentences."""

    num_devices: int
    batch_rows: int | None
    model_flops: float
    device_flops: float
    peak_flops: float
    bubble: float
    predicted: Timeline | None
    limits: tuple[str, ...]


def own_plans(plan: ParallelPlan) -> list[ParallelPlan]:
    """The plans of single meshes that it consists of: one per stage, or itself."""
    return [stage.plan or plan for stage in plan.stages]


def figures_of(plan: ParallelPlan) -> Figures:
    used = {device for stage in plan.stages for device in stage.devices}
    num_devices = len(used) or plan.num_devices
    detailed = [(p.details, p.num_devices) for p in own_plans(plan) if p.details is not None]
    predicted = _predicted(plan)
    rows = {t.shape[0] for t in plan.inputs if t.role == "batch" and t.shape}
    return Figures(
        num_devices=num_devices,
        batch_rows=rows.pop() if len(rows) == 1 else None,
        model_flops=sum(details.model_flops for details, _ in detailed),
        device_flops=sum(details.flops * n for details, n in detailed) / num_devices,
        peak_flops=_peak_flops(plan),
        bubble=predicted.bubble if predicted is not None and plan.is_pipeline else 0.0,
        predicted=predicted,
        limits=tuple(_limits(plan, predicted)),
    )


def _predicted(plan: ParallelPlan) -> Timeline | None:
    return plan.timeline()


def _peak_flops(plan: ParallelPlan) -> float:
    """Of one device, in the precision of most floating point operations."""
    if plan.cluster is None:
        return 0.0
    flops = {True: 0.0, False: 0.0}
    for own in own_plans(plan):
        if own.details is not None:
            ops = own.details.ops
            half = [text.startswith(("bfloat16", "float16")) for text in ops.strings]
            for array, count in zip(ops.array, ops.flops, strict=True):
                flops[half[array]] += count
    device = plan.cluster.spec
    return device.flops_16bit if flops[True] > flops[False] else device.flops_32bit


# -- what limits the step


def _limits(plan: ParallelPlan, predicted: Timeline | None) -> list[str]:
    step_s = plan.estimated_step_s
    if not step_s:
        return []
    sentences = []
    shares = _shares(plan, predicted)
    if shares:
        what, share = max(shares.items(), key=lambda item: item[1])
        others = {n: part for n, part in shares.items() if n != what and part >= 0.005}
        rest = ", ".join(f"{name} {part:.0%}" for name, part in others.items())
        rest = f" ({rest})" if rest else ""
        sentences.append(f"{what.capitalize()} takes {share:.0%} of the step{rest}.")
        if shares["communication"] >= 0.1:
            sentences += _largest_collective(plan)
        if shares.get("waiting for other stages", 0.0) >= 0.15 and plan.schedule:
            sentences.append(
                "Stages wait for each other while the pipeline fills and drains, and for slower "
                f"ones; with more than {plan.num_micro_batches} micro-batches the share falls."
            )
    if plan.solver.unbounded and plan.solver.objective:
        free_s = plan.solver.unbounded[0]
        sentences.append(
            f"The memory budget costs time: without it the solver would reach "
            f"{format_seconds(free_s)} instead of {format_seconds(plan.solver.objective)}."
        )
    return sentences


def _shares(plan: ParallelPlan, predicted: Timeline | None) -> dict[str, float]:
    """Of the step, on average over devices."""
    total_s: dict[str, float] = defaultdict(float)
    whole_s, devices = 0.0, 0
    for own in own_plans(plan):
        for module in own.modules:
            total_s["computing"] += module.compute_s * own.num_devices
            total_s["communication"] += module.communication_s * own.num_devices
    meshes = {stage.mesh: (stage.plan or plan).num_devices for stage in plan.stages}
    devices = sum(meshes.values())
    whole_s = plan.estimated_step_s * devices
    if not whole_s or not total_s:
        return {}
    if plan.is_pipeline and predicted is not None:
        busy_s = sum(s * meshes[mesh] for mesh, s in enumerate(predicted.busy_s()))
        total_s["waiting for other stages"] = max(0.0, whole_s - busy_s)
        rest_s = busy_s - total_s["computing"] - total_s["communication"]
        total_s["starting programs"] = max(0.0, rest_s)
    return {name: seconds / whole_s for name, seconds in total_s.items()}


def _largest_collective(plan: ParallelPlan) -> list[str]:
    seconds: dict[tuple[str, tuple[str, ...], str], float] = defaultdict(float)
    for own in own_plans(plan):
        for found in own.details.collectives if own.details is not None else ():
            seconds[found.kind, found.axes, found.cause] += found.seconds * own.num_devices
    if not seconds:
        return []
    (kind, axes, cause), largest = max(seconds.items(), key=lambda item: item[1])
    part = largest / sum(seconds.values())
    along = " and ".join(axes)
    return [f"Of communication, {part:.0%} is {kind} along {along}, because of {cause}."]
