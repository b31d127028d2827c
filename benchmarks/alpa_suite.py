"""The models of the Alpa paper on its clusters: our predictions beside its measurements.

    python -m benchmarks.alpa_suite --model gpt-2.6b --json-dir DIR
    python -m benchmarks.alpa_suite --model wresnet-2b --micro-batches 32 --json-dir DIR
    python -m benchmarks.alpa_suite --collect DIR --json benchmarks/results/alpa_suite.json

8, 16, 32 and 64 V100s of 16 GB, 8 to a host, 25 Gb/s between hosts. The first two make one row, in
a file of its own; the third puts all rows of a folder together and prints the tables. Nothing is
compiled and no device is needed. Ours are predictions of a cost model (which takes products to run
at 55 % of the V100's peak), Alpa's were measured: the columns show whether plans of the same kind
and order come out, not who is faster.

Flops are the model's products, forward once and backward twice, by closed forms (`Example.
flops_per_step`); for GPT that is Megatron-LM's 72 B S L H² (1 + S / 6H) + 6 B S H V, which Alpa's
benchmarks use. What is computed again counts in the seconds, not in the flops; a second column
counts it in the flops too, as Megatron-LM does with its 96 in place of 72. We do not know which of
the two the published figures are.

GPT and MoE compute in 16 bits with float32 parameters and Adam, Wide-ResNet in float32 with SGD and
momentum. They are planned with everything automatic, but for Wide-ResNet: its BatchNorm has other
statistics in micro-batches, so a number of them must be given; several are tried.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import autopar
from benchmarks.pipeline_rows import line, machine, planned_row, shape_text
from examples.models import build

V100 = "v100"
DEVICES_PER_HOST = 8

# TFLOPS per GPU that were measured: "Alpa: Automating Inter- and Intra-Operator Parallelism for
# Distributed Deep Learning" (OSDI'22), and its baselines there (None: it failed).
PUBLISHED: dict[str, tuple[int, float, str, float | None]] = {
    "gpt-2.6b": (8, 61.6, "Megatron-LM", 50.4),
    "gpt-6.7b": (16, 60.0, "Megatron-LM", 56.6),
    "gpt-15b": (32, 59.9, "Megatron-LM", 58.2),
    "gpt-39b": (64, 57.0, "Megatron-LM", 57.8),
    "moe-2.4b": (8, 45.8, "DeepSpeed", 40.0),
    "moe-10b": (16, 45.4, "DeepSpeed", 12.9),
    "moe-27b": (32, 38.8, "DeepSpeed", 3.8),
    "moe-70b": (64, 36.6, "DeepSpeed", None),
    "wresnet-2b": (8, 8.0, "pipeline + data", 7.7),
    "wresnet-4b": (16, 6.8, "pipeline + data", 0.4),
    "wresnet-6.8b": (32, 6.6, "pipeline + data", None),
    "wresnet-13b": (64, 5.3, "pipeline + data", None),
}
# What the paper says of the plans it found (its case study).
PUBLISHED_STAGES = {"wresnet-4b": "3 stages of 4, 4 and 8 GPUs"}


def cluster_for(model: str) -> autopar.ClusterSpec:
    return autopar.ClusterSpec(PUBLISHED[model][0] // DEVICES_PER_HOST, DEVICES_PER_HOST, V100)


def method_for(micro_batches: int | None) -> autopar.AutoParallel | autopar.PipeshardParallel:
    if micro_batches is None:
        return autopar.AutoParallel()
    return autopar.PipeshardParallel(micro_batches)


def make_row(model: str, micro_batches: int | None) -> dict[str, Any]:
    row = planned_row(build(model), cluster_for(model), method_for(micro_batches))
    return {**row, "machine": machine()}


def best_rows(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each model the row with the most TFLOPS, in the order of the paper; a failure if there is
    nothing else."""
    found: dict[str, dict[str, Any]] = {}
    for model in PUBLISHED:
        own = [row for row in rows if row["model"] == model]
        if own:
            found[model] = max(own, key=lambda row: row.get("tflops_per_device", 0.0))
    return found


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | GPUs | ours, predicted | with recomputation | Alpa | baseline | our stages | "
        "micro-batches | peak, GiB | planned in |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, row in best_rows(rows).items():
        devices, alpa, baseline, theirs = PUBLISHED[model]
        beside = f"{alpa:g} | {baseline} " + ("failed" if theirs is None else f"{theirs:g}")
        took = f"{row['planned_s']:.0f} s"
        if "error" in row:
            why = row["error"].split("\n")[0]
            lines.append(f"| {model} | {devices} | – | – | {beside} | {why} | | | {took} |")
            continue
        lines.append(
            f"| {model} | {devices} | {row['tflops_per_device']:.1f} | "
            f"{executed_tflops(row):.1f} | {beside} | "
            f"{stages_text(row)} | {row['num_micro_batches']} | {row['peak_gib']:.1f} | {took} |"
        )
    return lines


def executed_tflops(row: dict[str, Any]) -> float:
    """TFLOPS per GPU if the forward pass counts again, a third of the flops, in the layers that are
    computed again."""
    layers = max(row["num_layers"], row["remat_layers"], 1)
    return row["tflops_per_device"] * (1 + row["remat_layers"] / layers / 3)


def stages_text(row: dict[str, Any]) -> str:
    """`8 × 1×8 as (2, 4), remat in 3`: how many stages, their submeshes and logical meshes."""
    counts: dict[str, int] = {}
    for stage in row["stages"]:
        hosts, per_host = stage["submesh"]
        name = f"{hosts}×{per_host} as {shape_text(stage['mesh'])}"
        counts[name] = counts.get(name, 0) + 1
    text = ", ".join(f"{count} of {name}" for name, count in counts.items())
    if len(row["stages"]) == 1:
        text = "one mesh " + shape_text(row["stages"][0]["mesh"])
    again = sum(stage["remat"] for stage in row["stages"])
    if again or row["remat_layers"]:
        text += ", recomputing " + ("" if again else f"{row['remat_layers']} layers")
        if again:
            text += "all" if again == len(row["stages"]) else f"in {again}"
    return text


def collect(folder: str, target: str | None) -> None:
    rows = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("*.json"))]
    published = {
        model: {"gpus": gpus, "alpa_tflops": alpa, "baseline": name, "baseline_tflops": theirs}
        for model, (gpus, alpa, name, theirs) in PUBLISHED.items()
    }
    for model, stages in PUBLISHED_STAGES.items():
        published[model]["stages"] = stages
    if target:
        about = {
            "about": "ours: predicted, nothing was run; published: measured, Alpa, OSDI'22",
            "published": published,
        }
        pathlib.Path(target).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(PUBLISHED))
    parser.add_argument("--micro-batches", type=int, help="cut the batch so; else it is searched")
    parser.add_argument("--json-dir", help="write the row into this folder")
    parser.add_argument("--collect", metavar="DIR", help="put the rows of a folder together")
    parser.add_argument("--json", help="with --collect: write all rows to this file")
    options = parser.parse_args()
    if options.collect:
        return collect(options.collect, options.json)
    if options.model is None:
        parser.error("give --model or --collect")
    row = make_row(options.model, options.micro_batches)
    print(line(options.model, row), flush=True)
    if options.json_dir:
        folder = pathlib.Path(options.json_dir)
        folder.mkdir(parents=True, exist_ok=True)
        name = options.model
        if options.micro_batches is not None:
            name += f"-micro{options.micro_batches}"
        (folder / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
