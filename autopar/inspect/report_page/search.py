"""The plans that were considered: from a `SearchReport` to rows of a page."""

from __future__ import annotations

from typing import Any

from autopar.inspect.report_page.encode import short
from autopar.inspect.search_text import stage_key, stages_text
from autopar.ir.plan import ParallelPlan
from autopar.ir.stages import PipelineChoice


def search_data(plan: ParallelPlan) -> dict[str, Any] | None:
    """The recorded candidates, the fastest first, and how many were searched."""
    search = plan.search
    if search is None:
        return None
    rows: list[dict[str, Any]] = [
        {
            "what": stages_text(choice.stages),
            "stages": len(choice.stages),
            "micro_batches": choice.num_micro_batches,
            "step_s": short(choice.step_s),
            "peak_bytes": short(max((s.peak_bytes for s in choice.stages), default=0.0)),
            "chosen": _is_chosen(plan, choice),
        }
        for choice in search.best
    ]
    if search.intra_only_s is not None:
        rows.append(
            {
                "what": "one mesh, without a pipeline",
                "stages": 1,
                "micro_batches": None if plan.is_pipeline else plan.num_micro_batches,
                "step_s": short(search.intra_only_s),
                "peak_bytes": None if plan.is_pipeline else short(plan.estimated_peak_bytes),
                "chosen": not plan.is_pipeline,
            }
        )
    return {
        "rows": rows,
        "layers": search.num_layers,
        "candidates": search.num_candidates,
        "pruned": search.num_pruned,
        "bounds": search.num_bounds,
        "seconds": {name: short(value) for name, value in search.seconds.items()},
        "checked": [[short(tables), short(solved)] for tables, solved in search.checked],
        "notes": list(search.notes),
        "tried": [
            {
                "what": one.what,
                "predicted_s": short(one.predicted_s),
                "measured_s": _short(one.measured_s),
                "spread": short(one.spread),
                "compiled_s": _short(one.compiled_s),
                "memory_bytes": short(one.memory_bytes) if one.memory_bytes else None,
                "failure": one.failure,
                "chosen": one.is_chosen,
            }
            for one in search.tried
        ],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else short(value)


def _is_chosen(plan: ParallelPlan, choice: PipelineChoice) -> bool:
    return (
        plan.is_pipeline
        and choice.num_micro_batches == plan.num_micro_batches
        and [stage_key(s) for s in choice.stages] == [stage_key(s) for s in plan.stages]
    )
