"""Predicted memory beside XLA's, and what would free how much: from a plan to sentences.

XLA's figures are known once the plan is compiled, where it is run or by `plan_verified`.
"""

from __future__ import annotations

from math import inf

from autopar.inspect.breakdown import mesh_plans
from autopar.ir.details import MEMORY_CATEGORIES
from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_bytes, format_seconds

_TIGHT = 0.8  # share of the budget from which on it is told what would free memory
_WORTH_TELLING = 0.05  # of the peak


def host_sentences(plan: ParallelPlan) -> list[str]:
    """What lies in host memory, and what that takes."""
    host = plan.host
    if host is None:
        return []
    text = f"host memory: {format_bytes(host.num_bytes)} per device"
    if not host.num_groups:
        return [text]
    took = f", predicted {format_seconds(host.transfer_s)} in every step" if plan.is_timed else ""
    cast = len(host.parameters)
    what = [f"state that only the update reads ({len(host.inputs) - cast} arrays)"]
    if cast:
        what.append(f"parameters that are cast to a narrower type ({cast} arrays, fetched twice)")
    return [f"{text}, {' and '.join(what)}; fetched and stored in {host.num_groups} groups{took}"]


def found_sentences(plan: ParallelPlan) -> list[str]:
    """XLA's count beside the predicted one, mesh by mesh, and which plans were given up for it."""
    found = plan.memory_found
    if found is None:
        return []
    predicted: dict[int, float] = {}
    for stage, mesh_plan in zip(plan.stages, mesh_plans(plan), strict=True):
        predicted[stage.mesh] = predicted.get(stage.mesh, 0.0) + mesh_plan.estimated_peak_bytes
    texts = []
    for mesh, compiled in enumerate(found.compiled_bytes):
        where = f"mesh {mesh}: " if len(found.compiled_bytes) > 1 else ""
        said = predicted.get(mesh, 0.0)
        ratio = f" ({compiled / said:.2f} × predicted)" if said else ""
        texts.append(f"{where}{format_bytes(said)} predicted, {format_bytes(compiled)}{ratio}")
    limit = "" if found.limit_bytes is None else f"; the limit is {format_bytes(found.limit_bytes)}"
    lines = [f"memory by XLA, per device: {'; '.join(texts)}{limit}"]
    lines += [f"planned again: {why}" for why in found.replanned]
    if plan.correction is not None:
        factors = f"{plan.correction.kept:.2f}, {plan.correction.recomputed:.2f}"
        lines.append(
            f"predictions beside the arguments are corrected by {factors} (programs that keep, "
            "that recompute activations)"
        )
    return lines


def freeing_sentences(plan: ParallelPlan) -> list[str]:
    """What would free how much of the fullest device, for a plan that nearly fills its budget."""
    fullest = max(mesh_plans(plan), key=lambda mesh_plan: mesh_plan.estimated_peak_bytes)
    budget, peak = fullest.memory_budget_bytes, fullest.estimated_peak_bytes
    memory = None if fullest.details is None else fullest.details.memory
    if memory is None or budget == inf or peak < _TIGHT * budget:
        return []
    held = dict(zip(MEMORY_CATEGORIES, memory.at_peak, strict=True))
    rows = held["activations"] + held["batch"]
    ways = [
        (rows / 2, f"{2 * plan.num_micro_batches} micro-batches"),
        (held["optimizer state"] / 2, "optimizer state in half as many bits"),
        (held["resharded copies"], "layouts without copies (pins)"),
    ]
    if not plan.remat:
        ways.append((held["activations"], "recomputing every layer, at most"))
    told = sorted((way for way in ways if way[0] > _WORTH_TELLING * peak), reverse=True)
    if not told:
        return []
    texts = ", ".join(f"{what} {format_bytes(size)}" for size, what in told)
    return [f"what would free memory: {texts}"]
