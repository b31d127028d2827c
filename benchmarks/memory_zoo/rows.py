"""A case → a row: the peak that its plan predicts, and XLA's.

python -m benchmarks.memory_zoo.rows MODEL KIND [no-compiling]     # prints the row as JSON
python -m benchmarks.memory_zoo.rows MODEL KIND budget SHARE       # of a plan to a budget
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from datetime import UTC, datetime
from typing import Any

from benchmarks.provenance import commit
from benchmarks.zoo.planning import row_of_a_process, versions, without_folders

BY_HAND = "benchmarks.memory_zoo.by_hand"


def case_in_a_process(model: str, kind: str, compiles: bool, limit_s: float) -> dict[str, Any]:
    """The row of a case, or what went wrong."""
    arguments = [model, kind] if compiles else [model, kind, "no-compiling"]
    row = row_of_a_process("benchmarks.memory_zoo.rows", arguments, limit_s)
    return {"model": model, "kind": kind, **_made_by(), **row}


def case_row(model: str, kind: str, compiles: bool) -> dict[str, Any]:
    import autopar
    from benchmarks.memory_zoo.cases import case_of

    case = case_of(model, kind)
    step, arguments = case.step()
    cluster = autopar.ClusterSpec(1, case.num_devices, "h100-sxm")
    try:
        plan = autopar.plan(step, *arguments, cluster=cluster, method=case.method())
        row: dict[str, Any] = {
            "held_out": case.held_out,
            "devices": case.num_devices,
            "meshes": [list(stage.mesh_shape) for stage in plan.stages],
            "remat_layers": len(plan.remat),
            "layouts": layouts_digest(plan),
            "predicted_bytes": [(s.plan or plan).estimated_peak_bytes for s in plan.stages],
        }
        if compiles:
            started = time.perf_counter()
            report = autopar.verify(step, *arguments, plan=plan)
            row["xla_bytes"] = [mesh.peak_bytes.xla for mesh in report.meshes]
            row["compiled_s"] = time.perf_counter() - started
    except autopar.AutoparError as error:
        return {"error": without_folders(f"{type(error).__name__}: {error}")}
    return row


def budget_in_a_process(model: str, kind: str, share: float, limit_s: float) -> dict[str, Any]:
    """The row of a plan to a budget, or what went wrong. A refused one has the peaks of plans
    written by hand, unless nothing can fit."""
    ends = time.monotonic() + limit_s
    arguments = [model, kind, "budget", str(share)]
    row = row_of_a_process("benchmarks.memory_zoo.rows", arguments, limit_s)
    if "refused" in row and row["state_bytes"] <= row["budget_bytes"]:
        left_s = max(1.0, ends - time.monotonic())
        peaks = row_of_a_process(BY_HAND, [model, kind], left_s)
        row["not_by_hand" if "error" in peaks else "by_hand"] = peaks
    return {"model": model, "kind": kind, "share": share, **_made_by(), **row}


def _made_by() -> dict[str, str | None]:
    """When, and by which code."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"made": now, "commit": commit("benchmarks/results", "docs"), **versions()}


def budget_row(model: str, kind: str, share: float) -> dict[str, Any]:
    """A plan to this share of the predicted peak of the plan without a budget, after the loop."""
    from dataclasses import replace

    import autopar
    from benchmarks.memory_zoo.cases import NO_BUDGET_BYTES, case_of

    case = case_of(model, kind)
    step, arguments = case.step()
    cluster = autopar.ClusterSpec(1, case.num_devices, "h100-sxm")
    pipeline = case.method() if kind == "stages" else None
    free = replace(
        pipeline or case.method(),
        options=autopar.ShardingOptions(memory_budget_bytes=NO_BUDGET_BYTES),
    )
    try:
        plan = autopar.plan(step, *arguments, cluster=cluster, method=free)
    except autopar.AutoparError as error:
        return {"error": without_folders(f"{type(error).__name__}: {error}")}
    try:
        budget = share * plan.estimated_peak_bytes
        options = autopar.ShardingOptions(memory_budget_bytes=budget, host_memory="never")
        method = replace(pipeline or autopar.AutoParallel(), options=options)
        row = {"free_bytes": plan.estimated_peak_bytes, "budget_bytes": budget}
        row["state_bytes"] = state_bytes(arguments[0], case.num_devices)
        started = time.perf_counter()
        plan = autopar.plan_verified(step, *arguments, cluster=cluster, method=method)
    except autopar.MemoryBudgetError as error:
        return {**row, "refused": without_folders(str(error))[:2000]}
    except autopar.AutoparError as error:
        return {"error": without_folders(f"{type(error).__name__}: {error}")}
    found = plan.memory_found
    return {
        **row,
        "stages": plan.num_stages,
        "micro_batches": plan.num_micro_batches,
        "remat_layers": len(plan.remat),
        "predicted_bytes": plan.estimated_peak_bytes,
        "xla_bytes": found.peak_bytes,
        "within": found.peak_bytes <= budget,
        "replanned": len(found.replanned),
        "seconds": time.perf_counter() - started,
    }


def state_bytes(state: Any, num_devices: int) -> float:
    """Bytes per device of a step's state, divided evenly."""
    import jax

    leaves = [leaf for leaf in jax.tree.leaves(state) if hasattr(leaf, "dtype")]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / num_devices


def layouts_digest(plan: Any) -> str:
    """A hash of all that XLA's memory depends on: the program and its layouts. While it stays the
    same, a new prediction can be compared with an earlier figure of XLA."""
    parts = [
        (
            one.fingerprint.program,
            repr(one.program),
            one.mesh_shape,
            one.num_micro_batches,
        )
        for one in (plan, *(stage.plan for stage in plan.stages if stage.plan is not None))
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def main() -> None:
    warnings.simplefilter("ignore")  # of other people's packages
    model, kind, *rest = sys.argv[1:]
    if rest[:1] == ["budget"]:
        print(json.dumps(budget_row(model, kind, float(rest[1]))))
        return
    print(json.dumps(case_row(model, kind, compiles=not rest)))


if __name__ == "__main__":
    main()
