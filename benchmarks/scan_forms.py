"""Models with scanned layers and with the same layers written out, both planned for H100s.

`python -m benchmarks.scan_layers --automatic` plans eight models by the default method, with and
without `jax.checkpoint`, `--pipelines` Llama-70B as given numbers of stages: predicted seconds and
bytes of both forms should agree. The limit of 60 seconds is one of CPU seconds here, so that other
load does not matter. Nothing is compiled or run. Rows that the file has are kept; those that are
named are planned again. Both write docs/scan_layers.md.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import autopar
from autopar.inspect.lines import counted
from benchmarks.planning_zoo import strangers
from benchmarks.provenance import provenance
from benchmarks.script import read_rows, write_json
from benchmarks.zoo.page import markdown_row
from examples.models import build

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "scan_forms.json"
PAGE = ROOT / "docs" / "scan_layers.md"
H100 = "h100-sxm"
PER_HOST = 8

GPT: dict[str, Any] = {
    "hidden_size": 1024,
    "num_layers": 12,
    "num_heads": 16,
    "seq_len": 1024,
    "vocab_size": 32768,
}
CUDNN: dict[str, Any] = {"attention": "cudnn"}
# name -> (model, overrides, batch, devices); `t5` is the stranger's, with its sizes
AUTOMATIC: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "gpt-1": ("gpt-2.6b", GPT, 8, 1),
    "gpt-8": ("gpt-2.6b", GPT, 64, 8),
    "llama3-8b-8": ("llama3-8b", CUDNN, 16, 8),
    "llama3-8b-64": ("llama3-8b", CUDNN, 128, 64),
    "llama3-8b-einsum-8": ("llama3-8b", {}, 16, 8),
    "t5-8": ("t5", {"depth": 12, "dim": 2048, "heads": 32, "width": 5120}, 256, 8),
    "vit-8": ("vit-304m", {}, 1024, 8),
    "moe-8": ("moe-2.4b", {}, 64, 8),
}
# name -> stages of Llama-70B on 64 H100s, as MaxText writes it
PIPELINES = {"llama-70b-pp4": 4, "llama-70b-pp8": 8}
PIPELINE_MICRO_BATCHES = 64

INTRODUCTION = """# Scanned and written out

<!-- Written by `python -m benchmarks.scan_layers --automatic`: change that, not this page. -->

The same models with their layers in a `lax.scan` and written out by hand, planned for H100s, 8 to a
host. Nothing was compiled or run: steps and memory are predictions from the data sheet. The number
in a model's name is that of its devices. With `jax.checkpoint`, each layer is under it, without a
policy. A plan says its mesh, its micro-batches if it has more than one, and how many layers it
recomputes beside those of the user.
"""

AUTOMATIC_TEXT = """## By the default method

Everything is automatic, within 60 CPU seconds. A scan is planned as a scan first, and written out
if time and memory are left; `stopped` in `benchmarks/results/scan_forms.json` says what was left
out.

Under `jax.checkpoint` neither form lacks memory, and they spend it differently, as `plan.explain()`
shows. A scan stacks the gradients of all layers until the update, where written-out layers are
updated one by one: on one device the GPT has 677 MiB of gradients at its peak, and none written
out. Written-out layers may keep gathered weights from the forward pass to the backward pass,
a scan's trips may not: by `Zero3Parallel` on eight devices Llama3-8B keeps 20.1 GiB of them, 0.3
scanned, and the mixture of experts 8.3 and 0.9. And where weights are split is chosen by time alone
as long as memory is not short: the scanned ViT splits all of its state, written out a part of it.

A scan that is written out keeps its stacks, and the update of a stack takes XLA more kernels: the
mixture of experts is 1 % slower for that. Compiled for one H100, not run, XLA updates experts (four
of 1024 × 2048, four layers, Adam, 16-bit gradients) in one kernel per layer where layers are
written out by hand, which moves the parameters 6.5 times, and in one of 7 times after a scan. Where
a scan is written out, a kernel for each moment puts the gradients of the layers together, and a
third reads both moments again: 9 times. Prices are the same.
"""

PIPELINES_TEXT = """## Llama-70B as a pipeline

On 64 H100s, with a batch of 512 × 4,096 tokens, 64 micro-batches and equal stages, every layer
under `jax.checkpoint` (`python -m benchmarks.scan_layers --pipelines`). Memory is that of the
fullest stage.
"""


def arguments_of(name: str, scan: bool, remat: bool) -> tuple[Any, ...]:
    """The step of a model, and its abstract arguments."""
    if name in PIPELINES:
        from benchmarks.scanned_llama import MODELS

        example = MODELS["70b"].example(scan=scan, remat=remat)
        return example.train_step, example.abstract_state(), example.abstract_batch()
    model, overrides, batch, _ = AUTOMATIC[name]
    if model == "t5":
        zoo = strangers.t5(**overrides, rows=batch, scan=scan, remat=remat)
        return zoo.step, jax.eval_shape(zoo.make_state), *jax.eval_shape(lambda: zoo.make_batch(0))
    example = build(model, batch_size=batch, scan_layers=scan, remat=remat, **overrides)
    return example.train_step, example.abstract_state(), example.abstract_batch()


def plan_of(name: str, scan: bool, remat: bool) -> dict[str, Any]:
    num_devices = 64 if name in PIPELINES else AUTOMATIC[name][-1]
    hosts = max(1, num_devices // PER_HOST)
    cluster = autopar.ClusterSpec(hosts, num_devices // hosts, H100)
    method: Any = autopar.AutoParallel()
    if name in PIPELINES:
        stages = autopar.UniformStages(PIPELINES[name])
        method = autopar.PipeshardParallel(PIPELINE_MICRO_BATCHES, stages=stages)
    step, *arguments = arguments_of(name, scan, remat)
    started = time.process_time()
    with mock.patch.object(time, "monotonic", time.process_time):
        plan = autopar.plan(step, *arguments, cluster=cluster, method=method)
    return {
        "step_ms": round(1e3 * plan.estimated_step_s, 2),
        "peak_gib": round(plan.estimated_peak_bytes / 2**30, 2),
        "mesh": list(plan.mesh_shape),
        "stages": plan.num_stages,
        "micro_batches": plan.num_micro_batches,
        "recomputed": len(plan.remat),
        "in_part": sum(layer.endswith(" in part") for layer in plan.remat),
        "written_out": bool(plan.unrolled),
        "stopped": plan.solver.stopped,
        "cpu_s": round(time.process_time() - started, 1),
    }


def compare(names: list[str], path: str | None) -> None:
    """Plans both forms of the models named, and writes them beside the rows that the file has."""
    path = path or str(RESULTS)
    kept = read_rows(path) or []
    every = [*AUTOMATIC, *PIPELINES]
    for name in names:
        for remat in (True,) if name in PIPELINES else (False, True):
            scanned, by_hand = (plan_of(name, scan, remat) for scan in (True, False))
            row = {
                "model": name,
                "checkpoint": remat,
                "scanned": scanned,
                "by_hand": by_hand,
                "step_ratio": round(scanned["step_ms"] / by_hand["step_ms"], 4),
                "peak_ratio": round(scanned["peak_gib"] / by_hand["peak_gib"], 4),
                "made": provenance(),
            }
            print(json.dumps({k: v for k, v in row.items() if k != "made"}), flush=True)
            same = [(r["model"], r["checkpoint"]) == (name, remat) for r in kept]
            kept = [r for r, is_same in zip(kept, same, strict=True) if not is_same] + [row]
            kept.sort(key=lambda r: (every.index(r["model"]), r["checkpoint"]))
            write_json(path, {"rows": kept})
    if path == str(RESULTS):
        PAGE.write_text(page(kept))


# -- the page


def page(rows: list[dict[str, Any]]) -> str:
    lines = [INTRODUCTION]
    for text, known in ((AUTOMATIC_TEXT, AUTOMATIC), (PIPELINES_TEXT, PIPELINES)):
        own = [row for row in rows if row["model"] in known]
        if own:
            lines += [text, *_table(own), "", _summary(own), ""]
    made = sorted({row["made"]["commit"][:8] for row in rows})
    versions = sorted({row["made"]["versions"]["jax"] for row in rows})
    lines.append(f"Made at {', '.join(made)}, with JAX {', '.join(versions)}.\n")
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    titles = ("model", "`jax.checkpoint`", "scanned", "written out", "step", "memory")
    lines = [*markdown_row(*titles), *markdown_row(*["---"] * len(titles))]
    for row in rows:
        forms = [_form(row[form]) for form in ("scanned", "by_hand")]
        checkpoint = "yes" if row["checkpoint"] else "no"
        ratios = [f"{row['step_ratio']:.3f}", f"{row['peak_ratio']:.2f}"]
        lines += markdown_row(row["model"], checkpoint, *forms, *ratios)
    return lines


def _form(plan: dict[str, Any]) -> str:
    said = [f"{plan['step_ms']:,.1f} ms", f"{plan['peak_gib']:.1f} GiB"]
    is_pipeline = plan["stages"] > 1
    said.append(f"{plan['stages']} stages" if is_pipeline else "×".join(map(str, plan["mesh"])))
    if plan["micro_batches"] > 1:
        said.append(f"{plan['micro_batches']} micro-batches")
    if plan["recomputed"]:
        part = f", {plan['in_part']} in part" if plan.get("in_part") else ""
        said.append(f"recomputes {counted(plan['recomputed'], 'layer')}{part}")
    return "; ".join(said)


def _summary(rows: list[dict[str, Any]]) -> str:
    counts = [
        sum(abs(row[ratio] - 1) <= 0.02 for row in rows) for ratio in ("step_ratio", "peak_ratio")
    ]
    return (
        f"Of {len(rows)} pairs, {counts[0]} agree within 2 % in their step and {counts[1]} in "
        "memory. Ratios are those of scanned to written out."
    )
