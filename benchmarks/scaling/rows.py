"""One case as a row: from a `Case` to a dict for JSON, planned in this process."""

from __future__ import annotations

from typing import Any

from benchmarks.one_gpu_cases import allow_fused_attention
from benchmarks.pipeline_rows import machine, planned_row
from benchmarks.published import PUBLISHED, published_flops
from benchmarks.scaling.cases import Case


def make_row(case: Case) -> dict[str, Any]:
    allow_fused_attention()
    example = case.example()
    row = planned_row(example, case.cluster_spec(), case.method())
    return {
        "case": case.name,
        "cluster": case.cluster,
        "family": case.family,
        **row,
        **figures_of(case, row),
        "machine": machine(),
    }


def figures_of(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    """Throughput per GPU in the tables' units; empty without a plan."""
    if "error" in row:
        return {}
    example = case.example()
    per_gpu_s = row["step_s"] * case.gpus
    config: Any = example.config
    per_row = getattr(config, "seq_len", 1)  # an image counts as one
    found = {"items_per_gpu_s": example.batch_size * per_row / per_gpu_s}
    if case.model in PUBLISHED:
        found["published_tflops"] = published_flops(example) / per_gpu_s / 1e12
    return found
