"""A plan as text: what is sharded how, what it costs, and what to doubt.

The table is by the user's own module names. Layers that are treated alike are shown once with
how many they are, so a 96-layer model fits on a screen.
"""

from __future__ import annotations

from collections import defaultdict

from autopar.ir.plan import ModuleCost, ParallelPlan, SolverReport, Tensor
from autopar.ir.text import (
    format_bytes,
    format_seconds,
    layer_names,
    name_pattern,
    name_skeleton,
    rows_of,
)


def explain_plan(plan: ParallelPlan) -> str:
    mesh = " × ".join(
        f"{name}={size}" for name, size in zip(plan.axis_names, plan.mesh_shape, strict=True)
    )
    timed = plan.device != "communication only"
    micro = f", {plan.num_micro_batches} micro-batches" if plan.num_micro_batches > 1 else ""
    lines = [
        f"{plan.name}: {plan.method} on mesh {mesh} ({plan.device}){micro}",
        f"  objective {plan.solver.objective:.6g} ({_proof(plan.solver)})",
    ]
    if timed:
        lines.append(
            f"  estimated step {format_seconds(plan.estimated_step_s)}, "
            f"peak {format_bytes(plan.estimated_peak_bytes)} per device, "
            f"communication {format_bytes(plan.communication_bytes)} per device"
        )
    if plan.solver.unbounded:
        objective, peak = plan.solver.unbounded
        free = format_seconds(objective) if timed else f"{objective:.6g}"
        lines.append(
            f"  memory budget {format_bytes(plan.memory_budget_bytes)} per device; without it "
            f"{free} with a peak of {format_bytes(peak)}"
        )
    if plan.remat:
        lines.append(f"  recomputed in the backward pass: {layer_names(plan.remat)}")
    lines += ["", *tensor_table("inputs", plan.inputs, plan)]
    plain_outputs = tuple(t for t in plan.outputs if t.role != "state")
    if plain_outputs:
        lines += ["", *tensor_table("outputs that are not state", plain_outputs, plan)]
    if plan.named:
        lines += ["", *tensor_table("named values", plan.named, plan)]
    if plan.modules:
        lines += ["", *module_table(plan.modules, timed)]
    if plan.search is not None:
        from autopar.inspect.pipeline_table import search_lines

        lines += ["", *search_lines(plan.search)]
    if plan.warnings:
        lines += ["", *(f"warning: {warning}" for warning in plan.warnings)]
    return "\n".join(lines)


def _proof(solver: SolverReport) -> str:
    """How good the objective is known to be. Folding is a restriction, so it is said."""
    proven = "proven optimal" if solver.gap == 0 else f"within {solver.gap:.2%} of optimal"
    classes, nodes = solver.sizes.get("classes"), solver.sizes.get("nodes")
    if classes is None or classes == nodes:
        return proven
    return f"{proven} with equal layers alike, {classes} decisions for {nodes} ops"


def tensor_table(title: str, tensors: tuple[Tensor, ...], plan: ParallelPlan) -> list[str]:
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for tensor in tensors:
        columns = (f"{tensor.dtype}{list(tensor.shape)}", str(plan.spec_of(tensor)), tensor.role)
        groups[name_skeleton(tensor.path), *columns].append(tensor.path)
    rows = [(name_pattern(paths), *key[1:], str(len(paths))) for key, paths in groups.items()]
    return [f"{title}:", *rows_of(("path", "array", "spec", "role", "count"), rows)]


def module_table(modules: tuple[ModuleCost, ...], timed: bool) -> list[str]:
    groups: dict[tuple[str, str], list[ModuleCost]] = defaultdict(list)
    for module in modules:
        groups[name_skeleton(module.module), module.region].append(module)
    rows = []
    cost = format_seconds if timed else "{:.6g}".format
    for (_, region), members in groups.items():
        name = name_pattern([member.module for member in members])
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
                format_seconds(compute) if compute else "-",
                cost(communication) if communication else "-",
                ", ".join(f"{n} {kind}" for kind, n in sorted(collectives.items())) or "-",
            )
        )
    header = ("module", "region", "count", "compute", "communication", "collectives")
    return ["cost by module:", *rows_of(header, rows)]
