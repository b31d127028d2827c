"""Planning time relative to JAX's trace + lower time of the same step, in one run.

    python -m benchmarks.planning [--repeats 3] [--json FILE]

Both sides start from cleared caches each time and alternate; the ratio is that of the smallest
times, in seconds of this process's processors, since other work on the machine would stretch the
clock's. `--only NAME` selects rows. The last rows compare the solver's time (costs, reductions,
ILP; no tracing) at 96 and 12 layers, with room for all activations, and with every layer
recomputed: a search that must first find out which layers to recompute is another one.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from math import inf
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autopar
from autopar.cost.reshard import reshard_table
from autopar.sharding.strategies import enumerate_strategies
from benchmarks.script import script_parser, write_json
from examples.models import build

H100 = "h100-sxm"
DEPTHS = (12, 96)
ROOMY_BYTES = 1e15


def rows() -> dict[str, tuple[str, dict[str, Any], int, autopar.ClusterSpec, Any, float]]:
    """name -> (model, overrides, batch, cluster, mesh shape, target ratio)"""
    one_host = autopar.ClusterSpec(1, 8, H100)
    eight_hosts = autopar.ClusterSpec(8, 8, H100)
    return {
        "GPT 24 layers, (2, 4)": ("gpt-1.3b", {}, 64, one_host, (2, 4), 3),
        "GPT 24 layers, auto on 8": ("gpt-1.3b", {}, 64, one_host, "auto", 6),
        "Llama3-8B, (8, 8)": ("llama3-8b", {"seq_len": 2048}, 16, eight_hosts, (8, 8), 1.5),
        "Llama3-8B, (64,)": ("llama3-8b", {"seq_len": 2048}, 64, eight_hosts, (64,), 4),
    }


def _clear() -> None:
    jax.clear_caches()
    reshard_table.cache_clear()
    enumerate_strategies.cache_clear()
    gc.collect()


def jax_seconds(example: Any, arguments: tuple[Any, ...]) -> float:
    _clear()
    started = time.process_time()
    jax.jit(example.train_step).trace(*arguments).lower()
    return time.process_time() - started


def plan_seconds(
    example: Any,
    arguments: tuple[Any, ...],
    cluster: autopar.ClusterSpec,
    mesh_shape: Any,
    **options: Any,
) -> tuple[float, autopar.ParallelPlan]:
    _clear()
    method = autopar.ShardParallel(mesh_shape, options=autopar.ShardingOptions(**options))
    started = time.process_time()
    plan = autopar.plan(example.train_step, *arguments, cluster=cluster, method=method)
    return time.process_time() - started, plan


def measure_row(name: str, repeats: int) -> dict[str, Any]:
    model, overrides, batch, cluster, mesh_shape, aim = rows()[name]
    example = build(model, **overrides)
    arguments = (example.abstract_state(), example.abstract_batch(batch))
    theirs, ours, plan = [], [], None
    for _ in range(repeats):
        theirs.append(jax_seconds(example, arguments))
        seconds, plan = plan_seconds(example, arguments, cluster, mesh_shape)
        ours.append(seconds)
    assert plan is not None
    return {
        "name": name,
        "jax_s": min(theirs),
        "plan_s": min(ours),
        "ratio": min(ours) / min(theirs),
        "aim": aim,
        "gap": plan.solver.gap,
        "mesh": plan.mesh_shape,
        "passes_s": {k: round(v, 3) for k, v in plan.solver.seconds.items()},
        "sizes": plan.solver.sizes,
    }


def depth_rows(repeats: int) -> list[dict[str, Any]]:
    """Solver seconds at two depths, which take turns."""
    best: dict[tuple[str, int], float] = {}
    found = {}
    for _ in range(repeats):
        for remat, layers in itertools.product(("none", "all"), DEPTHS):
            example = build("gpt-1.3b", num_layers=layers)
            arguments = (example.abstract_state(), example.abstract_batch(64))
            cluster = autopar.ClusterSpec(1, 8, H100)
            options = {"remat": remat, "memory_budget_bytes": ROOMY_BYTES}
            _, plan = plan_seconds(example, arguments, cluster, (2, 4), **options)
            key = (remat, layers)
            best[key] = min(best.get(key, inf), plan.solver.seconds["shard"])
            found[key] = plan.solver.sizes
    return [
        {"remat": remat, "layers": layers, "solve_s": seconds, "sizes": found[remat, layers]}
        for (remat, layers), seconds in best.items()
    ]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=[*rows(), "depth"])
    arguments = parser.parse_args()
    results = []
    for name in rows():
        if arguments.only in (None, name):
            row = measure_row(name, arguments.repeats)
            results.append(row)
            print(
                f"{name:28s} JAX {row['jax_s']:6.2f} s  plan {row['plan_s']:6.2f} s  "
                f"ratio {row['ratio']:.2f} (aim ≤ {row['aim']})  gap {row['gap']:.1%}  "
                f"{row['passes_s']} {row['sizes']}",
                flush=True,
            )
    depth = depth_rows(arguments.repeats) if arguments.only in (None, "depth") else []
    for shallow, deep in itertools.pairwise(depth):
        if shallow["remat"] == deep["remat"]:
            ratio = deep["solve_s"] / shallow["solve_s"]
            print(
                f"recomputing {deep['remat']}: solve at {deep['layers']} layers "
                f"{deep['solve_s']:.2f} s over {shallow['layers']} layers "
                f"{shallow['solve_s']:.2f} s = {ratio:.2f} (aim ≤ 1.3)"
            )
    about = {"jax": jax.__version__, "cores": os.cpu_count()}
    write_json(arguments.json, {**about, "rows": results, "depth": depth})


if __name__ == "__main__":
    main()
