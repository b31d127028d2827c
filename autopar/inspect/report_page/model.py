"""Modules, operators and arrays of a plan: from `PlanDetails` and `Tensor`s to rows of a page.

Equal layers have equal operators, so an operator is an index into distinct rows and one into the
texts for its module: ten thousand operators take little space.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Any

from autopar.inspect.breakdown import mesh_plans
from autopar.inspect.report_page.encode import Texts, run_text, short
from autopar.ir.details import OpRow
from autopar.ir.plan import ParallelPlan, Tensor, item_bytes
from autopar.ir.spec import num_shards
from autopar.ir.text import name_pattern, name_skeleton


def model_data(plan: ParallelPlan, texts: Texts) -> dict[str, Any]:
    """`rows`: distinct operators without their module. `ops`: per stage, (row, module) in program
    order. `params`: parameters with their parallelism."""
    rows: dict[tuple[Any, ...], int] = {}
    ops = []
    for mesh_plan in mesh_plans(plan):
        numbers: list[int] = []
        modules: list[int] = []
        for op in _operators(mesh_plan):
            key = (
                *map(texts.number, (op.name, op.region, op.array, op.spec, op.words, op.source)),
                *map(short, op[7:]),
            )
            numbers.append(rows.setdefault(key, len(rows)))
            modules.append(texts.number(op.module))
        ops.append([numbers, modules])
    return {"rows": [list(row) for row in rows], "ops": ops, "params": _params(plan, texts)}


def _operators(plan: ParallelPlan) -> list[OpRow]:
    if plan.details is not None:
        return list(plan.details.ops.rows())
    return [  # a plan without details has sums per module
        OpRow(
            name="all operators",
            module=cost.module,
            region=cost.region,
            array="",
            spec="",
            words="",
            source="",
            runs=1,
            flops=0,
            compute_s=cost.compute_s,
            communication_s=cost.communication_s,
            communication_bytes=cost.communication_bytes,
        )
        for cost in plan.modules
    ]


def _params(plan: ParallelPlan, texts: Texts) -> list[list[Any]]:
    """Rows of path, module, stage, array, spec, words, reason and bytes per device."""
    tensors = {tensor.path: tensor for tensor in plan.inputs}
    rows = []
    seen = set()
    for stage, mesh_plan in enumerate(mesh_plans(plan)):
        known = {t.path: t for t in mesh_plan.inputs}
        for use in mesh_plan.details.parallelism if mesh_plan.details is not None else ():
            tensor = known.get(use.path) or tensors.get(use.path)
            if tensor is None or (stage, use.path) in seen:
                continue
            seen.add((stage, use.path))
            words = ", ".join(f"{axis}: {word}" for axis, word in use.words)
            rows.append(
                [
                    use.path,
                    texts.number(use.module),
                    stage,
                    texts.number(_array_text(tensor)),
                    texts.number(str(mesh_plan.spec_of(tensor))),
                    texts.number(words),
                    texts.number(use.reason),
                    short(held_bytes(tensor, mesh_plan)),
                ]
            )
    return rows


def array_rows(plan: ParallelPlan) -> list[dict[str, Any]]:
    """Inputs, outputs other than state, and named values. Paths that differ only in numbers share
    a row with their count."""
    kinds = (
        ("input", plan.inputs),
        ("output", tuple(t for t in plan.outputs if t.role != "state")),
        ("named value", plan.named),
    )
    rows = []
    for kind, tensors in kinds:
        groups: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            key = (_array_text(tensor), str(plan.spec_of(tensor)), tensor.role)
            groups[name_skeleton(tensor.path), *key].append(tensor)
        for (_, array, spec, role), members in groups.items():
            mesh_plan = mesh_plans(plan)[members[0].stages[0]]
            rows.append(
                {
                    "kind": f"{kind}, {role}" if role else kind,
                    "path": name_pattern([t.path for t in members]),
                    "array": array,
                    "spec": spec,
                    "count": len(members),
                    "stages": run_text(sorted({s for t in members for s in t.stages})),
                    "bytes": short(held_bytes(members[0], mesh_plan)),
                    "shape": list(members[0].shape),
                    "layout": list(members[0].layout),
                    "mesh": list(mesh_plan.mesh_shape),
                }
            )
    return rows


def held_bytes(tensor: Tensor, mesh_plan: ParallelPlan) -> float:
    """Bytes of an array on one device of its mesh."""
    shards = num_shards(tensor.layout, mesh_plan.mesh_shape)
    return prod(tensor.held_shape()) * item_bytes(tensor.dtype) / shards


def _array_text(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
