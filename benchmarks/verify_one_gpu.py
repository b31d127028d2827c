"""`autopar.verify` for one GPU, against the same step compiled and run on it.

    python -m benchmarks.verify_one_gpu [--json FILE]

This needs a GPU with a description in the package. *Proved* is XLA's peak as compiled for the
described GPU, in a process without a GPU; *compiled* is XLA's peak of the program that runs here;
*seen* is the peak of JAX's allocator while it ran; *predicted* is the plan's. Times: the plan's
estimate and the median of the measured steps.
"""

from __future__ import annotations

import statistics
from typing import Any

import jax

import autopar
from autopar.ir.devices import preset_of
from benchmarks.pipeline_one_gpu import step_times
from benchmarks.pipeline_rows import machine
from benchmarks.script import script_parser, write_json
from examples.models import build

GIB = 2**30
# In growing size, since the allocator only reports its peak so far.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("gpt-1.3b", 8, {"num_layers": 4, "num_heads": 16}),
    ("gpt-1.3b", 16, {"num_layers": 4, "num_heads": 16, "attention": "cudnn"}),
    ("moe-380m", 16, {}),
]


def row(name: str, batch_size: int, **overrides: Any) -> dict[str, Any]:
    device = jax.devices()[0]
    example = build(name, batch_size=batch_size, **overrides)
    cluster = autopar.ClusterSpec(1, 1, preset_of(device.platform, device.device_kind))
    arguments = (example.abstract_state(), example.abstract_batch())
    plan = autopar.plan(example.train_step, *arguments, cluster=cluster)
    report = autopar.verify(example.train_step, *arguments, plan=plan)
    step = autopar.parallelize(example.train_step)
    state, batch = example.create_state(), example.make_batch()
    state, _ = step(state, batch)
    seconds, state = step_times(step, state, batch, 10)
    assert step.last_executable is not None
    stats = device.memory_stats() or {}
    return {
        "model": name,
        "batch": batch_size,
        **overrides,
        "predicted_gib": plan.estimated_peak_bytes / GIB,
        "proved_gib": report.peak_bytes / GIB,
        "compiled_gib": step.last_executable.memory_bytes() / GIB,
        "seen_gib": stats.get("peak_bytes_in_use", 0) / GIB,
        "predicted_step_ms": 1e3 * plan.estimated_step_s,
        "measured_step_ms": 1e3 * statistics.median(seconds),
    }


def main() -> None:
    parser = script_parser(__doc__)
    options = parser.parse_args()
    rows = []
    for name, batch_size, overrides in CASES:
        rows.append(row(name, batch_size, **overrides))
        print(rows[-1], flush=True)
    about = {**machine(), "device": jax.devices()[0].device_kind}
    write_json(options.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
