"""Whether a plan fits, how good it is known to be, and what to mind: from a plan to lines."""

from __future__ import annotations

from math import inf

from autopar.inspect.lines import paragraph
from autopar.inspect.search_text import proof_text
from autopar.ir.plan import WALL, ParallelPlan
from autopar.ir.text import format_bytes, format_seconds


def verdict_lines(plan: ParallelPlan) -> list[str]:
    """One paragraph: fit, optimality, what else was found, and how long it took."""
    parts = [_fit(plan), proof_text(plan.solver)]
    if plan.solver.stopped is not None:
        parts.append(plan.solver.stopped.rstrip("."))
    search = plan.search
    if plan.is_pipeline and search is not None and search.intra_only_s not in (None, inf):
        parts.append(f"without a pipeline it would take {format_seconds(search.intra_only_s or 0)}")
    wall_s = plan.solver.seconds.get(WALL)
    if wall_s is not None:
        took = f"planned in {format_seconds(wall_s)}"
        parts.append(f"{took} earlier, now from the plan cache" if plan.cached else took)
    return paragraph(f"verdict: {'; '.join(filter(None, parts))}", "")


def _fit(plan: ParallelPlan) -> str:
    budget, peak = plan.memory_budget_bytes, plan.estimated_peak_bytes
    if budget == inf:
        return f"peak {format_bytes(peak)} per device, with no budget given"
    fits = "fits" if peak <= budget else "does NOT fit"
    share = f"{peak / budget:.0%}" if peak >= 0.01 * budget else "less than 1%"
    return f"{fits}: {format_bytes(peak)} per device, {share} of the budget {format_bytes(budget)}"


def warning_lines(plan: ParallelPlan) -> list[str]:
    return [line for text in plan.warnings for line in paragraph(f"warning: {text}", "")]
