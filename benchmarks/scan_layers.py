"""A scan over layers against the same layers written out: objectives and plans.

    python -m benchmarks.scan_layers [--json FILE]                      # objective, solve time
    python -m benchmarks.scan_layers --automatic [MODEL …] [--json FILE]  # plans of both forms

Each GPT is solved at two depths on a mesh that prices only communication, and on H100s, where
compute is priced too. There a scanned layer costs a little more: its carry goes through memory in
every iteration, and JAX hoists the attention mask out of the loop, so each iteration reads it.

With `--automatic`, both forms of each model are planned for H100s by the default method, with and
without `jax.checkpoint`: their predicted seconds and bytes should agree. The limit of 60 seconds is
one of CPU seconds here, so that other load does not matter. Nothing is compiled or run. Rows that
the file has are kept; models that are named are planned again.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from unittest import mock

import jax

import autopar
from benchmarks.planning_zoo import strangers
from benchmarks.provenance import provenance
from benchmarks.script import check_names, read_rows, script_parser, write_json
from examples.models import build

# name -> (model, overrides, batch)
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt-tiny": ("gpt-tiny", {}, 16),
    "gpt-768": ("gpt-2.6b", {"hidden_size": 768, "num_heads": 12}, 32),
    "gpt-1536": ("gpt-2.6b", {"hidden_size": 1536, "num_heads": 16}, 32),
    "gpt-2560": ("gpt-2.6b", {}, 32),
}
DEPTHS = (12, 24)
COMMUNICATION = autopar.LogicalMesh((2, 4), alpha=(1e-6, 1e-6), beta=(1e-9, 1e-9))
CLUSTER = autopar.ClusterSpec(1, 8, "h100-sxm")
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


def solve(model: str, depth: int, scan: bool, priced: str) -> tuple[float, float, float]:
    """(objective, gap, seconds for graph and solution)."""
    name, overrides, batch = MODELS[model]
    example = build(name, batch_size=batch, num_layers=depth, scan_layers=scan, **overrides)
    arguments = (example.abstract_state(), example.abstract_batch())
    started = time.perf_counter()
    if priced == "communication":
        plan = autopar.solve_sharding(example.train_step, *arguments, mesh=COMMUNICATION).plan
    else:
        method = autopar.ShardParallel((2, 4))
        plan = autopar.plan(example.train_step, *arguments, cluster=CLUSTER, method=method)
    total_s = time.perf_counter() - started
    seconds = total_s - plan.solver.seconds.get("trace", 0.0)
    return plan.solver.objective, plan.solver.gap, seconds


def rows() -> list[dict[str, Any]]:
    found = []
    for model in MODELS:
        for priced in ("communication", "communication and compute"):
            for scan in (False, True):
                first, second = (solve(model, depth, scan, priced) for depth in DEPTHS)
                row = {
                    "model": model,
                    "priced": priced,
                    "layers": "scan" if scan else "written out",
                    "objective_per_layer": (second[0] - first[0]) / (DEPTHS[1] - DEPTHS[0]),
                    "gap": second[1],
                    "plan_s": round(second[2], 2),
                }
                found.append(row)
                print(json.dumps(row), flush=True)
    return found


def arguments_of(name: str, scan: bool, remat: bool) -> tuple[Any, ...]:
    """The step of a model, and its abstract arguments."""
    model, overrides, batch, _ = AUTOMATIC[name]
    if model == "t5":
        zoo = strangers.t5(**overrides, rows=batch, scan=scan, remat=remat)
        return zoo.step, jax.eval_shape(zoo.make_state), *jax.eval_shape(lambda: zoo.make_batch(0))
    example = build(model, batch_size=batch, scan_layers=scan, remat=remat, **overrides)
    return example.train_step, example.abstract_state(), example.abstract_batch()


def automatic_plan(name: str, scan: bool, remat: bool) -> dict[str, Any]:
    num_devices = AUTOMATIC[name][-1]
    hosts = max(1, num_devices // PER_HOST)
    cluster = autopar.ClusterSpec(hosts, num_devices // hosts, H100)
    step, *arguments = arguments_of(name, scan, remat)
    started = time.process_time()
    with mock.patch.object(time, "monotonic", time.process_time):
        plan = autopar.plan(step, *arguments, cluster=cluster)
    return {
        "step_ms": round(1e3 * plan.estimated_step_s, 2),
        "peak_gib": round(plan.estimated_peak_bytes / 2**30, 2),
        "mesh": list(plan.mesh_shape),
        "stages": plan.num_stages,
        "micro_batches": plan.num_micro_batches,
        "recomputed": len(plan.remat),
        "written_out": bool(plan.unrolled),
        "stopped": plan.solver.stopped,
        "cpu_s": round(time.process_time() - started, 1),
    }


def automatic(names: list[str], path: str | None) -> None:
    """Plans the models named, and writes them beside the rows that the file has."""
    kept = read_rows(path) or []
    for name in names:
        for remat in (False, True):
            forms = {scan: automatic_plan(name, scan, remat) for scan in (True, False)}
            scanned, by_hand = forms[True], forms[False]
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
            kept.sort(key=lambda r: (list(AUTOMATIC).index(r["model"]), r["checkpoint"]))
            write_json(path, {"rows": kept})


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--automatic", nargs="*", metavar="MODEL", help="plans of both forms")
    options = parser.parse_args()
    if options.automatic is not None:
        check_names(parser, "--automatic", options.automatic, AUTOMATIC)
        automatic(options.automatic or list(AUTOMATIC), options.json)
        return
    document = {"jax": jax.__version__, "depths": DEPTHS, "mesh": [2, 4], "rows": rows()}
    write_json(options.json, document)


if __name__ == "__main__":
    main()
