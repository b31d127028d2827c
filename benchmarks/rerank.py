"""Re-ranking: what running the best few plans gains and costs, the first and the second time.

    python -m benchmarks.rerank --json FILE    (8 virtual CPU devices)

Each model is planned without and with `ShardingOptions(rerank=…)`, the latter twice with its own
database, empty at first. A row has the measured step of the plan predicted to be best and of the
chosen plan, and the planning time in all three cases.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autopar
from benchmarks.accuracy import models
from benchmarks.pipeline_rows import machine
from benchmarks.script import script_parser, write_json
from examples.models import Example, build

NUM_DEVICES = 8


def planned_in(example: Example, num: int) -> tuple[autopar.ParallelPlan, float]:
    """A plan on one mesh, and the seconds spent planning."""
    method = autopar.ShardParallel(options=autopar.ShardingOptions(rerank=num))
    step = autopar.parallelize(example.train_step, method=method)
    started = time.perf_counter()
    plan = step.plan(example.abstract_state(), example.abstract_batch())
    return plan, time.perf_counter() - started


def row_of(example: Example, num: int) -> dict[str, Any]:
    _, predicted_s = planned_in(example, 0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_CACHE"] = folder
        first, first_s = planned_in(example, num)
        again, again_s = planned_in(example, num)
    assert first.search is not None and again.search is not None
    assert all(one.is_known for one in again.search.tried)
    ran = [one for one in first.search.tried if one.measured_s is not None]
    chosen = next(one for one in ran if one.is_chosen)
    return {
        "model": example.name,
        "plans": len(first.search.tried),
        "best_predicted_s": ran[0].measured_s,
        "chosen_s": chosen.measured_s,
        "spread": chosen.spread,
        "slowest_s": max(one.measured_s or 0.0 for one in ran),
        "planning_s": {"without": predicted_s, "first time": first_s, "second time": again_s},
        "tried": [
            {"what": one.what, "predicted_s": one.predicted_s, "measured_s": one.measured_s}
            for one in first.search.tried
        ],
    }


def line(row: dict[str, Any]) -> str:
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in row["planning_s"].items())
    return (
        f"{row['model']:>12}: best predicted {row['best_predicted_s'] * 1e3:.1f} ms, "
        f"taken {row['chosen_s'] * 1e3:.1f} ms ± {row['spread']:.0%}, "
        f"slowest {row['slowest_s'] * 1e3:.1f} ms of {row['plans']} plans; planning: {seconds}"
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--plans", type=int, default=6)
    parser.add_argument("--tiny", action="store_true", help="only a small model")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    examples = [build("mlp-tiny")] if options.tiny else list(models().values())
    document: dict[str, Any] = {
        "command": "python -m benchmarks.rerank",
        "machine": machine(),
        "rows": [],
    }
    for example in examples:
        row = row_of(example, options.plans)
        print(line(row), flush=True)
        document["rows"].append(row)
        write_json(options.json, document)


if __name__ == "__main__":
    main()
