"""Planning a step whose plan is in the cache, relative to JAX's own trace of it, in one run.

    python -m benchmarks.plan_cache [--model gpt-2.6b] [--batch 32] [--repeats 5] [--json FILE]

CPU seconds of this process; both sides start from cleared caches and alternate. The demo's step is
planned once without the cache, too, after everything is imported.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autopar
from autopar.cli.demo_models import make_model
from benchmarks.script import script_parser, write_json
from examples.models import build


def cpu_s(work: Callable[[], Any]) -> tuple[float, Any]:
    jax.clear_caches()
    gc.collect()
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def measure(
    step: Any, arguments: tuple[Any, ...], cluster: autopar.ClusterSpec, method: Any, repeats: int
) -> dict[str, Any]:
    def plan() -> autopar.ParallelPlan:
        return autopar.plan(step, *arguments, cluster=cluster, method=method)

    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_CACHE_DIR"] = folder
        miss_s, solved = cpu_s(plan)
        traces, hits = [], []
        for _ in range(repeats):
            traces.append(cpu_s(lambda: jax.jit(step).trace(*arguments))[0])
            seconds, read = cpu_s(plan)
            assert read.cached and read == solved
            hits.append(seconds)
    trace_s, hit_s = statistics.median(traces), statistics.median(hits)
    return {
        "trace_s": trace_s,
        "hit_s": hit_s,
        "miss_s": miss_s,
        "ratio": hit_s / trace_s,
        "ratio_of_least": min(hits) / min(traces),
        "micro_batches": solved.num_micro_batches,
        "stages": solved.num_stages,
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="gpt-2.6b")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    example = build(given.model)
    demo = make_model("gpt")
    cases = {
        given.model: (
            example.train_step,
            (example.abstract_state(), example.abstract_batch(given.batch)),
            autopar.ClusterSpec(1, 8, "h100-sxm"),
            autopar.ShardParallel(),
        ),
        "the demo": (
            demo.train_step,
            (demo.state, next(demo.batches(1, 16))),
            autopar.ClusterSpec(1, 8, "cpu"),
            None,
        ),
    }
    rows = []
    for name, case in cases.items():
        row = {"name": name, **measure(*case, given.repeats)}
        rows.append(row)
        print(
            f"{name:12s} JAX's trace {row['trace_s']:.2f} s, from the cache {row['hit_s']:.2f} s, "
            f"ratio {row['ratio']:.2f} (of the least {row['ratio_of_least']:.2f}); "
            f"planned in {row['miss_s']:.2f} s",
            flush=True,
        )
    write_json(given.json, {"jax": jax.__version__, "cores": os.cpu_count(), "rows": rows})


if __name__ == "__main__":
    main()
