"""Modules, operators and arrays of a plan: from `PlanDetails` and `Tensor`s to rows of a page.

Equal layers have equal operators, so an operator is a number into a table of distinct rows and one
into the texts for its module: ten thousand of them take little room.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Any

import numpy as np

from autopar.inspect.breakdown import own_plans
from autopar.inspect.report_page.encode import Texts, run_text, short
from autopar.ir.details import OpRow
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.spec import num_shards, to_partition_spec
from autopar.ir.text import name_pattern, name_skeleton


def model_data(plan: ParallelPlan, texts: Texts) -> dict[str, Any]:
    """`rows`: distinct operators without their module. `ops`: per stage, (row, module) in program
    order. `params`: parameters with what is known of them."""
    rows: dict[tuple[Any, ...], int] = {}
    ops = []
    for own in own_plans(plan):
        numbers: list[int] = []
        modules: list[int] = []
        for op in _operators(own):
            key = (
                *map(texts.number, (op.name, op.region, op.array, op.spec, op.words, op.source)),
                *map(short, op[7:]),
            )
            numbers.append(rows.setdefault(key, len(rows)))
            modules.append(texts.number(op.module))
        ops.append([numbers, modules])
    return {"rows": [list(row) for row in rows], "ops": ops, "params": _params(plan, texts)}


def _operators(own: ParallelPlan) -> list[OpRow]:
    if own.details is not None:
        return list(own.details.ops.rows())
    return [  # of a plan without details, sums are known
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
        for cost in own.modules
    ]


def _params(plan: ParallelPlan, texts: Texts) -> list[list[Any]]:
    """[path, module, stage, array, spec, words, reason, bytes per device] of each."""
    tensors = {tensor.path: tensor for tensor in plan.inputs}
    rows = []
    seen = set()
    for stage, own in enumerate(own_plans(plan)):
        known = {t.path: t for t in own.inputs}
        for use in own.details.parallelism if own.details is not None else ():
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
                    texts.number(str(plan_spec(own, tensor))),
                    texts.number(words),
                    texts.number(use.reason),
                    short(held_bytes(tensor, own)),
                ]
            )
    return rows


def array_rows(plan: ParallelPlan) -> list[dict[str, Any]]:
    """Arguments, results that are not state, and named values; those alike but for numbers in
    their paths are one row with their count."""
    kinds = (
        ("argument", plan.inputs),
        ("result", tuple(t for t in plan.outputs if t.role != "state")),
        ("named value", plan.named),
    )
    rows = []
    for kind, tensors in kinds:
        groups: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            key = (_array_text(tensor), str(plan.spec_of(tensor)), tensor.role)
            groups[name_skeleton(tensor.path), *key].append(tensor)
        for (_, array, spec, role), members in groups.items():
            own = own_plans(plan)[members[0].stages[0]]
            rows.append(
                {
                    "kind": f"{kind}, {role}" if role else kind,
                    "path": name_pattern([t.path for t in members]),
                    "array": array,
                    "spec": spec,
                    "count": len(members),
                    "stages": run_text(sorted({s for t in members for s in t.stages})),
                    "bytes": short(held_bytes(members[0], own)),
                }
            )
    return rows


def plan_spec(own: ParallelPlan, tensor: Tensor) -> Any:
    return to_partition_spec(tensor.layout, len(tensor.shape), own.axis_names)


def held_bytes(tensor: Tensor, own: ParallelPlan) -> float:
    """Of one device of the mesh on which it lies."""
    return (
        prod(tensor.shape) * _item_bytes(tensor.dtype) / num_shards(tensor.layout, own.mesh_shape)
    )


def _item_bytes(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # random keys: two words of 32 bits
        return 8


def _array_text(tensor: Tensor) -> str:
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
