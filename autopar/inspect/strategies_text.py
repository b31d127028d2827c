"""How every operator of a plan is sharded: from a `ParallelPlan` to a table."""

from __future__ import annotations

from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_seconds, table

_HEADER = (
    "operator",
    "module",
    "region",
    "array",
    "spec",
    "parallelism",
    "runs",
    "compute",
    "communication",
)


def strategy_text(plan: ParallelPlan) -> str:
    """A line per operator, in program order, and a table per stage."""
    parts = []
    for number, stage in enumerate(plan.stages):
        mesh_plan = plan if stage.plan is None else stage.plan
        where = f"stage {number} of {plan.name}" if plan.is_pipeline else plan.name
        sizes = zip(mesh_plan.axis_names, mesh_plan.mesh_shape, strict=True)
        mesh = ", ".join(f"{name}={size}" for name, size in sizes)
        parts.append("\n".join([f"operators of {where} (mesh {mesh}):", *_lines(mesh_plan)]))
    return "\n\n".join(parts)


def _lines(plan: ParallelPlan) -> list[str]:
    if plan.details is None or not len(plan.details.ops):
        return ["  not recorded in this plan"]
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
