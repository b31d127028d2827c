"""How every operator of a plan is sharded, as a table: from a `ParallelPlan` to text."""

from __future__ import annotations

from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_seconds, table

_HEADER = (
    "operator",
    "module",
    "region",
    "array",
    "as",
    "axes",
    "runs",
    "compute",
    "communication",
)


def strategy_text(plan: ParallelPlan) -> str:
    """One line per operator, in program order; a pipeline's by stage."""
    parts = []
    for number, stage in enumerate(plan.stages):
        own = plan if stage.plan is None else stage.plan
        where = f"stage {number} of {plan.name}" if plan.is_pipeline else plan.name
        sizes = zip(own.axis_names, own.mesh_shape, strict=True)
        mesh = ", ".join(f"{name}={size}" for name, size in sizes)
        parts.append("\n".join([f"operators of {where} (mesh {mesh}):", *_lines(own)]))
    return "\n\n".join(parts)


def _lines(plan: ParallelPlan) -> list[str]:
    if plan.details is None or not len(plan.details.ops):
        return ["  none are known"]
    rows = [
        (
            op.name,
            op.module or "-",
            op.region,
            op.array,
            op.spec,
            op.words or "-",
            f"{op.runs:g}",
            format_seconds(op.compute_s),
            format_seconds(op.communication_s) if op.communication_s else "-",
        )
        for op in plan.details.ops.rows()
    ]
    return table(_HEADER, rows)
