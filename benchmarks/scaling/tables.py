"""Rows as text: a line for each, and tables next to the measurements of others."""

from __future__ import annotations

from typing import Any

from autopar.ir.devices import DEVICES
from benchmarks.pipeline_rows import shape_text
from benchmarks.published import MAXTEXT, MAXTEXT_LLAMA2_7B_TOKENS_S, PUBLISHED

Row = dict[str, Any]

CLUSTERS = ("v100", "h100")
FAMILIES = {"gpt": "GPT", "llama2": "Llama 2", "moe": "MoE", "wresnet": "Wide-ResNet"}
H100_PEAK_TFLOPS = DEVICES["h100-sxm"].flops_16bit / 1e12
H100_PEAK_TFLOPS_32BIT = DEVICES["h100-sxm"].flops_32bit / 1e12


def line(row: Row) -> str:
    took = f"{row['case']:26s} {row['planned_s']:6.0f} s"
    if "error" in row:
        return f"{took}: {first_line(row)}"
    published = row.get("published_tflops")
    also = "" if published is None else f" ({published:.1f} as published ones are counted)"
    return (
        f"{took}: {row['tflops_per_device']:.1f} TFLOPS per GPU{also}, "
        f"{row['items_per_gpu_s']:.4g} tokens or images/s, {row['peak_gib']:.1f} GiB, "
        f"{row['num_micro_batches']} micro-batches, {plan_text(row)}"
    )


def first_line(row: Row) -> str:
    return row["error"].split("\n")[0]


def best_rows(rows: list[Row], cluster: str, family: str) -> list[Row]:
    """The best row for each number of GPUs, in their order; a failure if there is no other."""
    found: dict[int, Row] = {}
    for row in rows:
        if row["cluster"] != cluster or row["family"] != family:
            continue
        known = found.get(row["devices"])
        if known is None or _throughput(row) > _throughput(known):
            found[row["devices"]] = row
    return [found[gpus] for gpus in sorted(found)]


def _throughput(row: Row) -> float:
    return row.get("items_per_gpu_s", 0.0)


def plan_text(row: Row) -> str:
    """`2 stages: 1×8 as (4, 2), 1×8 as (8,); recomputing in 1`, or `one mesh (8,)`."""
    stages = row["stages"]
    if len(stages) <= 1:
        shape = stages[0]["mesh"] if stages else row["mesh"]
        text = "one GPU" if row["devices"] == 1 else "one mesh " + shape_text(shape)
    else:
        counts: dict[str, int] = {}
        for stage in stages:
            hosts, per_host = stage["submesh"]
            name = f"{hosts}×{per_host} as {shape_text(stage['mesh'])}"
            counts[name] = counts.get(name, 0) + 1
        each = [name if count == 1 else f"{count} of {name}" for name, count in counts.items()]
        text = f"{len(stages)} stages: " + ", ".join(each)
    noted = f" ({row['note']})" if "note" in row else ""
    again = sum(stage["remat"] for stage in stages) if len(stages) > 1 else 0
    if again and again < len(stages):
        text += f"; recomputing in {again}"
    elif again or row["remat_layers"]:
        text += "; recomputing"
    return text + noted


def v100_table(rows: list[Row], family: str) -> list[str]:
    lines = [
        "| model | GPUs | autopar, predicted | Alpa, measured | baseline, measured there "
        "| our plan | micro-batches | peak, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in best_rows(rows, "v100", family):
        theirs = PUBLISHED[row["model"]]
        failed = "failed" if theirs.theirs is None else f"{theirs.theirs:g}"
        beside = f"{theirs.alpa:g} | {theirs.baseline} {failed}"
        head = f"| {row['model']} | {row['devices']}"
        if "error" in row:
            lines.append(f"{head} | – | {beside} | {first_line(row)} | | |")
            continue
        lines.append(
            f"{head} | {row['published_tflops']:.1f} | {beside} | {plan_text(row)} | "
            f"{row['num_micro_batches']} | {row['peak_gib']:.1f} |"
        )
    return lines


def h100_table(rows: list[Row], family: str) -> list[str]:
    what = "images" if family == "wresnet" else "tokens"
    lines = [
        f"| model | GPUs | batch | {what}/s per GPU | TFLOPS per GPU | of peak | plan | "
        "micro-batches | peak, GiB | planned in |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in best_rows(rows, "h100", family):
        took = f"{row['planned_s']:.0f} s"
        head = f"| {row['model']} | {row['devices']:,}"
        if "error" in row:
            lines.append(f"{head} | | – | – | – | {first_line(row)} | | | {took} |")
            continue
        lines.append(
            f"{head} | {row['batch_size']:,} | {row['items_per_gpu_s']:,.0f} | "
            f"{row['tflops_per_device']:.0f} | {100 * share_of_peak(row):.0f} % | {plan_text(row)} "
            f"| {row['num_micro_batches']} | {row['peak_gib']:.1f} | {took} |"
        )
    return lines


def share_of_peak(row: Row) -> float:
    """The share of an H100's peak: TF32 for Wide-ResNet, whose products are float32."""
    is_32bit = row["family"] == "wresnet"
    peak = H100_PEAK_TFLOPS_32BIT if is_32bit else H100_PEAK_TFLOPS
    return row["tflops_per_device"] / peak


def cluster_tables(rows: list[Row], cluster: str) -> str:
    """The tables of a cluster, in Markdown."""
    table = {"v100": v100_table, "h100": h100_table}[cluster]
    parts: list[str] = []
    for family, name in FAMILIES.items():
        if best_rows(rows, cluster, family):
            parts += [f"**{name}, {cluster.upper()}**", "", *table(rows, family), ""]
            if family == "llama2":
                measured = f"{MAXTEXT_LLAMA2_7B_TOKENS_S:,} tokens/s per GPU"
                parts += [f"{MAXTEXT}, measured by its authors: {measured}.", ""]
    return "\n".join(parts)


def tables(rows: list[Row]) -> str:
    return "\n".join(filter(None, (cluster_tables(rows, cluster) for cluster in CLUSTERS)))


def in_page(page: str, rows: list[Row]) -> str:
    """The page with the tables of each cluster between its markers (see docs/scaling.md)."""
    for cluster in CLUSTERS:
        first, last = f"<!-- scaling:{cluster} -->", f"<!-- /scaling:{cluster} -->"
        before, found, rest = page.partition(first)
        _, ended, after = rest.partition(last)
        if not found or not ended:
            raise ValueError(f"the page has no {first} … {last}")
        page = f"{before}{first}\n{cluster_tables(rows, cluster)}{last}{after}"
    return page
