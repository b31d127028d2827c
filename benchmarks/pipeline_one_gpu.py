"""The cost of a pipeline's programs on one GPU: two stages that take turns, against one program.

    python -m benchmarks.pipeline_one_gpu --json benchmarks/results/pipeline_one_gpu.json

On one device a pipeline gains nothing, so the ratio is the cost of running a step as many programs
with buffers between them instead of one, with the same number of micro-batches: residuals that are
written and read, launches, transfers from stage to stage. Medians of steps, interleaved.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import jax

import autopar
from benchmarks.script import script_parser, write_json
from examples.models import build, gpt

CASES = {
    "gpt-350m": (16, 4),
    "gpt-1.3b": (16, 4),
}


def step_times(step: Any, state: Any, batch: Any, count: int) -> tuple[list[float], Any]:
    """Seconds of each of `count` steps, each waited for, and the state after them."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        times.append(time.perf_counter() - started)
    return times, state


def measure(name: str, rows: int, number: int, count: int, attention: str) -> dict:
    overrides = {"attention": attention} if attention else {}
    if name == "tiny":
        example = build("gpt-tiny", batch_size=rows)
    else:
        config = build(name).config
        fields = {**config.__dict__, **overrides}
        example = gpt.example(type(config)(**fields), rows)
    batch = example.make_batch()
    methods = {
        "one program": autopar.ShardParallel(num_micro_batches=number),
        "pipeline": autopar.PipeshardParallel(
            number, stages=autopar.UniformStages(2), schedule="interleaved_1f1b"
        ),
    }
    row: dict = {"model": name, "batch": rows, "micro_batches": number}
    for label, method in methods.items():
        step = autopar.parallelize(example.train_step, method=method)
        started = time.perf_counter()
        state, loss = step(example.create_state(), batch)
        jax.block_until_ready(loss)
        first_s = time.perf_counter() - started
        seconds, state = step_times(step, state, batch, count)
        flops = example.flops_per_step(rows)
        median = statistics.median(seconds)
        row[label] = {
            "first_call_s": round(first_s, 2),
            "step_ms": round(median * 1e3, 3),
            "spread_ms": [round(min(seconds) * 1e3, 3), round(max(seconds) * 1e3, 3)],
            "tflops": round(flops / median / 1e12, 1),
            "loss": float(loss),
        }
        if label == "pipeline":
            executable = step.last_executable
            row["instructions"] = executable.num_instructions()
            timed = executable.time_stage_programs(executable_leaves(step, state, batch))
            row["sum_of_pieces_ms"] = round(sum(s for *_, s in timed) * 1e3, 3)
        del state, step
    row["ratio"] = round(row["pipeline"]["step_ms"] / row["one program"]["step_ms"], 3)
    return row


def executable_leaves(step, state, batch):
    planned = step.planned((state, batch), {})
    return planned.traced.call.arrays_among(jax.tree.leaves((state, batch)))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--attention", default="")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    autopar.init(devices=jax.devices()[:1])
    cases = {"tiny": (8, 4)} if args.tiny else CASES
    device = jax.devices()[0]
    document = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "rows": [],
    }
    for name, (rows, number) in cases.items():
        row = measure(name, rows, number, args.steps, args.attention)
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
        write_json(args.json, document)


if __name__ == "__main__":
    main()
