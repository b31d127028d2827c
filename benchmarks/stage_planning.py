"""Seconds that each pass of planning a pipeline takes, for models of growing size and depth.

    python -m benchmarks.stage_planning [--only NAME] [--json FILE]

Nothing is compiled and no device is needed: arguments are shapes. `cpu` is the processor time of a
row, which a busy machine changes less than the clock's.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pathlib
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import autopar
from autopar.compiler import StepOptions, rewritten, trace, trace_micro_batch
from autopar.cost.reshard import reshard_table
from autopar.ir.stages import LayerTable
from autopar.sharding.strategies import enumerate_strategies
from autopar.stage_tables import node_places, stage_tables
from autopar.stages.submeshes import candidate_submeshes
from autopar.trace.attach import attach, loop_batch
from autopar.trace.build import build_graph
from autopar.trace.layers import find_layers
from examples.models import Example, build

H100 = "h100-sxm"
BATCH = 1024


@dataclass(frozen=True)
class Case:
    hosts: int
    num_micro_batches: int
    sizes: dict[str, int] = field(default_factory=dict)

    def example(self) -> Example:
        return build("gpt-1.3b", BATCH, dtype=jnp.bfloat16, **self.sizes)


def gpt(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, int]:
    return {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}


CASES = {
    "GPT-6.7B on 2×8": Case(2, 64, gpt(32, 4096, 32)),
    "GPT-39B on 8×8": Case(8, 64, gpt(48, 8192, 64)),
    "24 layers on 8×8": Case(8, 64, gpt(24, 8192, 64)),
    "96 layers on 8×8": Case(8, 64, gpt(96, 8192, 64)),
}


def measure(case: Case) -> dict[str, Any]:
    example = case.example()
    arguments = (example.abstract_state(), example.abstract_batch())
    cluster = autopar.ClusterSpec(case.hosts, 8, H100)
    _clear()
    seconds: dict[str, float] = {}
    started = time.process_time()

    @contextmanager
    def lap(name: str):
        begun = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - begun

    options, num = StepOptions(), case.num_micro_batches
    with lap("trace"):
        full = trace(example.train_step, arguments, {}, options)
        micro = trace_micro_batch(full, example.train_step, options, num)
    with lap("accumulate"):
        step = rewritten(full, micro, num, ())
    assert step.loop is not None
    with lap("graph"):
        graph = build_graph(step)
    with lap("layers"):
        loop = step.program.equations[step.loop]
        found = find_layers(loop.bodies[0], batch=loop_batch(loop))
        layers = attach(loop.bodies[0], found)
        places = node_places(graph, step, layers)
    with lap("tables"):
        tables = stage_tables(graph, places, cluster, candidate_submeshes(cluster), num)
    return {
        "seconds": seconds,
        "total_s": sum(seconds.values()),
        "cpu_s": time.process_time() - started,
        "num_nodes": len(graph.nodes),
        "num_layers": len(found),
        "num_tables": len(tables),
        "best": _best(tables, num),
    }


def _best(tables: list[LayerTable], num: int) -> dict[str, float]:
    """Per submesh, the seconds of a step of all layers on it, memory aside."""
    found: dict[str, float] = {}
    for table in tables:
        hosts, per_host = table.submesh
        total = num * float(table.latency_s.sum()) + float(table.once_s.sum())
        name = f"{hosts}×{per_host}"
        found[name] = min(total, found.get(name, total))
    return found


def _clear() -> None:
    jax.clear_caches()
    reshard_table.cache_clear()
    enumerate_strategies.cache_clear()
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--json", help="write all rows to this file")
    options = parser.parse_args()
    rows = {}
    for name, case in CASES.items():
        if options.only in (None, name):
            row = rows[name] = measure(case)
            passes = "  ".join(f"{k} {v:.1f}" for k, v in row["seconds"].items())
            print(
                f"{name:18s} {row['total_s']:6.1f} s ({row['cpu_s']:.1f} cpu): {passes}; "
                f"{row['num_nodes']} nodes, {row['num_layers']} layers, {row['num_tables']} tables",
                flush=True,
            )
    if options.json:
        document = {"jax": jax.__version__, "cores": os.cpu_count(), "rows": rows}
        pathlib.Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
