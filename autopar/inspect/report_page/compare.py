"""Plans beside a plan, for the question whether it was worth it: from plans to rows of a page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.inspect.breakdown import shares_of
from autopar.inspect.diff import diff
from autopar.inspect.explain import where_text
from autopar.inspect.lines import counted
from autopar.inspect.report_page.encode import short
from autopar.ir.plan import ParallelPlan


def compare_data(
    plan: ParallelPlan, others: Mapping[str, ParallelPlan | str]
) -> dict[str, Any] | None:
    """`others`: by name, plans, or why there is none. With a single plan, what differs as text."""
    if not others:
        return None
    rows = [_row("this plan", plan, plan)]
    for name, other in others.items():
        if isinstance(other, str):
            rows.append({"name": name, "failure": other})
        else:
            rows.append(_row(name, other, plan))
    plans = [other for other in others.values() if isinstance(other, ParallelPlan)]
    return {
        "rows": rows,
        "diff": str(diff(plan, plans[0])) if len(others) == len(plans) == 1 else "",
    }


def _row(name: str, plan: ParallelPlan, base: ParallelPlan) -> dict[str, Any]:
    shares = shares_of(plan)
    ratio = plan.estimated_step_s / base.estimated_step_s if base.estimated_step_s else 1.0
    return {
        "name": name,
        "failure": "",
        "where": _where(plan),
        "step_s": short(plan.estimated_step_s),
        "ratio": short(ratio),
        "compute_s": short(shares.compute),
        "communication_s": short(shares.communication),
        "waiting_s": short(shares.bubble + shares.launch),
        "peak_bytes": short(plan.estimated_peak_bytes),
        # Methods that search nothing have no budget of their own.
        "fits": plan.estimated_peak_bytes
        <= min(plan.memory_budget_bytes, base.memory_budget_bytes),
    }


def _where(plan: ParallelPlan) -> str:
    """The mesh or stages, micro-batches and recomputation."""
    parts = [where_text(plan).partition(": ")[2]]
    if plan.num_micro_batches > 1:
        parts.append(counted(plan.num_micro_batches, "micro-batch"))
    recomputed = len(plan.remat) or sum(stage.remat for stage in plan.stages)
    if recomputed:
        parts.append(f"recomputing {counted(recomputed, 'layer' if plan.remat else 'stage')}")
    return ", ".join(parts)
