"""A plan as text: what is sharded how, what it costs, and what to doubt.

The table is by the user's own module names. Layers that are treated alike are shown once with
how many they are, so a 96-layer model fits on a screen.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.ir.plan import ModuleCost, ParallelPlan, Tensor

_NUMBER = re.compile(r"\d+")


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def format_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} µs"


def explain_plan(plan: ParallelPlan) -> str:
    mesh = " × ".join(
        f"{name}={size}" for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True)
    )
    solver = plan.solver
    proven = "proven optimal" if solver.gap == 0 else f"within {solver.gap:.2%} of optimal"
    timed = plan.device != "communication only"
    lines = [
        f"{plan.name}: {plan.method} on mesh {mesh} ({plan.device})",
        f"  objective {solver.objective:.6g} ({proven}"
        + (
            f", {solver.sizes['classes']} decisions for {solver.sizes['nodes']} ops)"
            if {"classes", "nodes"} <= set(solver.sizes)
            else ")"
        ),
    ]
    if timed:
        lines.append(
            f"  estimated step {format_seconds(plan.estimated_step_s)}, "
            f"peak {format_bytes(plan.estimated_peak_bytes)} per device, "
            f"communication {format_bytes(plan.communication_bytes)} per device"
        )
    lines += ["", *_tensor_table("inputs", plan.inputs, plan)]
    lines += ["", *_tensor_table("outputs that are not state", _plain_outputs(plan), plan)]
    lines += ["", *_module_table(plan.modules, timed)]
    for warning in plan.warnings:
        lines.append(f"warning: {warning}")
    return "\n".join(lines)


def _plain_outputs(plan: ParallelPlan) -> tuple[Tensor, ...]:
    return tuple(t for t in plan.outputs if t.role != "state")


def _rows(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    line = lambda row: (
        "  "
        + "  ".join(
            c.ljust(w) for c, w in zip(row, widths, strict=True)
        ).rstrip()
    )
    return [line(header), "  " + "  ".join("-" * w for w in widths), *map(line, rows)]


def _tensor_table(title: str, tensors: tuple[Tensor, ...], plan: ParallelPlan) -> list[str]:
    groups: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for tensor in tensors:
        shape = f"{tensor.dtype}{list(tensor.shape)}"
        groups[_NUMBER.sub("*", tensor.path), shape, str(plan.spec_of(tensor)), tensor.role] += 1
    rows = [
        (
            path if count > 1 else _only_path(tensors, path, plan, spec),
            shape,
            spec,
            role,
            str(count),
        )
        for (path, shape, spec, role), count in groups.items()
    ]
    return [f"{title}:", *_rows(("path", "array", "spec", "role", "count"), rows)]


def _only_path(tensors: tuple[Tensor, ...], pattern: str, plan: ParallelPlan, spec: str) -> str:
    for tensor in tensors:
        if _NUMBER.sub("*", tensor.path) == pattern and str(plan.spec_of(tensor)) == spec:
            return tensor.path
    return pattern


def _module_table(modules: tuple[ModuleCost, ...], timed: bool) -> list[str]:
    groups: dict[tuple[str, str], list[ModuleCost]] = defaultdict(list)
    for module in modules:
        groups[_NUMBER.sub("*", module.module), module.region].append(module)
    rows = []
    for (pattern, region), members in groups.items():
        name = pattern if len(members) > 1 else members[0].module
        collectives: dict[str, int] = defaultdict(int)
        for member in members:
            for kind, count in member.collectives:
                collectives[kind] += count
        communication = sum(m.communication_s for m in members)
        compute = sum(m.compute_s for m in members)
        rows.append(
            (
                name or "(no module)",
                region,
                str(len(members)),
                format_seconds(compute) if timed else "-",
                format_seconds(communication) if timed else f"{communication:.6g}",
                ", ".join(f"{n} {kind}" for kind, n in sorted(collectives.items())) or "-",
            )
        )
    header = ("module", "region", "count", "compute", "communication", "collectives")
    return ["cost by module:", *_rows(header, rows)]
