"""A scan over layers against the same layers written out: objectives and plans.

    python -m benchmarks.scan_layers [--json FILE]                      # objective, solve time
    python -m benchmarks.scan_layers --automatic [MODEL …] [--json FILE]  # plans of both forms
    python -m benchmarks.scan_layers --pipelines [MODEL …] [--json FILE]  # of given stages

Each GPT is solved at two depths on a mesh that prices only communication, and on H100s, where
compute is priced too. There a scanned layer costs a little more: its carry goes through memory in
every iteration, and JAX hoists the attention mask out of the loop, so each iteration reads it.

`benchmarks.scan_forms` says what the others do.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autopar
from benchmarks.scan_forms import AUTOMATIC, PIPELINES, compare
from benchmarks.script import check_names, script_parser, write_json
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


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--automatic", nargs="*", metavar="MODEL", help="plans of both forms")
    parser.add_argument("--pipelines", nargs="*", metavar="MODEL", help="of given stages")
    options = parser.parse_args()
    for flag, known in (("automatic", AUTOMATIC), ("pipelines", PIPELINES)):
        names = getattr(options, flag)
        if names is not None:
            check_names(parser, f"--{flag}", names, known)
            return compare(names or list(known), options.json)
    document = {"jax": jax.__version__, "depths": DEPTHS, "mesh": [2, 4], "rows": rows()}
    write_json(options.json, document)


if __name__ == "__main__":
    main()
