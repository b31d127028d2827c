"""A parallelized step beside `jax.jit` on the GPUs of one host; ratios within one run.

    python -m benchmarks.one_gpu [--json FILE]

On one GPU there is nothing to shard: this checks that autopar costs nothing where it cannot help,
and gives the absolute figures of a GPT-1.3B step (bf16 compute, float32 parameters and Adam, cuDNN
attention) to hold against published ones.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from typing import Any

import jax

import autopar
from examples.models import build


def median_step_s(step: Any, state: Any, batch: Any, steps: int) -> tuple[float, Any]:
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        times.append(time.perf_counter() - started)
    return statistics.median(times), state


def compare(name: str, batch_size: int, steps: int, **overrides: Any) -> dict[str, Any]:
    example = build(name, batch_size=batch_size, **overrides)
    batch = example.make_batch()
    row: dict[str, Any] = {"model": name, "batch": batch_size}
    jitted = jax.jit(example.train_step, donate_argnums=0)
    parallel = autopar.parallelize(example.train_step)
    for label, step in (("jit", jitted), ("autopar", parallel), ("jit", jitted)):
        state = example.create_state()
        started = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready(loss)
        row.setdefault(f"{label}_first_s", time.perf_counter() - started)
        seconds, state = median_step_s(step, state, batch, steps)
        row[f"{label}_step_ms"] = min(row.get(f"{label}_step_ms", 1e9), 1e3 * seconds)
        row[f"{label}_loss"] = float(loss)
        del state, loss
    row["ratio"] = row["autopar_step_ms"] / row["jit_step_ms"]
    flops = example.flops_per_step()
    row["tflops"] = flops / row["autopar_step_ms"] / 1e9
    row["tokens_per_s"] = 1e3 * batch_size * example.config.seq_len / row["autopar_step_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write all rows to this file")
    parser.add_argument("--tiny", action="store_true", help="a dry run on any device")
    arguments = parser.parse_args()
    if arguments.tiny:
        rows = [compare("gpt-tiny", 8, 3)]
    else:
        rows = [
            compare("gpt-1.3b", 16, 10, attention="cudnn", num_heads=16),
            compare("gpt-1.3b", 32, 10, attention="cudnn", num_heads=16),
            compare("moe-380m", 16, 10),
        ]
    for row in rows:
        print(row)
    if arguments.json:
        device = jax.devices()[0]
        about = {
            "jax": jax.__version__,
            "device": device.device_kind,
            "devices": len(jax.devices()),
        }
        pathlib.Path(arguments.json).write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
