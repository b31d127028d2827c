"""Which plans were considered: from `SearchReport` to rows of a page."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from autopar.inspect.report_page.encode import short
from autopar.ir.plan import ParallelPlan
from autopar.ir.stages import PipelineChoice


def search_data(plan: ParallelPlan) -> dict[str, Any] | None:
    """The candidates that are known, the fastest first, and how many were looked at."""
    search = plan.search
    if search is None:
        return None
    rows: list[dict[str, Any]] = [
        {
            "what": _stages_text(choice),
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
    mine = [(s.layers, s.submesh, s.mesh_shape, s.remat) for s in plan.stages]
    same = [(s.layers, s.submesh, s.mesh_shape, s.remat) for s in choice.stages]
    return plan.is_pipeline and same == mine and choice.num_micro_batches == plan.num_micro_batches


def _stages_text(choice: PipelineChoice) -> str:
    """Stages in order, those alike with their number: 2 × (6 layers on 1×4 devices)."""

    def alike(stage: Any) -> tuple[Any, ...]:
        return stage.layers[1] - stage.layers[0], stage.submesh, stage.mesh_shape, stage.remat

    parts = []
    for (layers, submesh, shape, remat), group in groupby(choice.stages, key=alike):
        count = len(list(group))
        devices = "×".join(map(str, submesh))
        mesh = "×".join(map(str, shape))
        text = f"{layers} layer{'s' if layers != 1 else ''} on {devices} devices"
        text += f" as {mesh}" if mesh != devices else ""
        text += ", recomputed" if remat else ""
        parts.append(f"{count} × ({text})" if count > 1 else text)
    return ", ".join(parts)
