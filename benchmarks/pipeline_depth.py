"""How long a pipeline's stage programs take to compile, by depth: a scanned GPT as two stages.

    python -m benchmarks.pipeline_depth [--depth N …] [--json FILE]

Equal layers of a stage run as one loop, so the time should hardly depend on their number. CPU
seconds on 8 virtual devices, of lowering and of compiling all stage programs; planning is apart.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

import autopar
from autopar.compiler import plan_step
from autopar.executables import make_executable
from autopar.runtime.pipeline import PipelineExecutable
from benchmarks.pipeline_rows import machine
from benchmarks.script import command_line, script_parser, write_json
from examples.models import build

DEPTHS = (20, 80)
CLUSTER = autopar.ClusterSpec(1, 8, "h100-sxm")


def measure(depth: int) -> dict[str, Any]:
    model = build("gpt-tiny", num_layers=depth, scan_layers=True)
    method = autopar.PipeshardParallel(4, stages=autopar.UniformStages(2))
    arguments = (model.abstract_state(), model.abstract_batch())
    planned = plan_step(model.train_step, arguments, {}, cluster=CLUSTER, method=method)
    times = [time.process_time()]
    executable = make_executable(planned, jax.devices())
    assert isinstance(executable, PipelineExecutable)
    times.append(time.process_time())
    num_programs = len(executable.compiled)
    times.append(time.process_time())
    return {
        "layers": depth,
        "lowered_s": times[1] - times[0],
        "compiled_s": times[2] - times[1],
        "programs": num_programs,
        "xla_bytes": list(executable.mesh_memory_bytes()),
        "predicted_bytes": [s.plan.estimated_peak_bytes for s in planned.plan.stages if s.plan],
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--depth", type=int, nargs="+", default=DEPTHS, metavar="N")
    options = parser.parse_args()
    measure(4)  # what a process does once
    rows = []
    for depth in options.depth:
        rows.append(row := measure(depth))
        memory = zip(row["predicted_bytes"], row["xla_bytes"], strict=True)
        print(
            f"{depth} layers: lowered in {row['lowered_s']:.1f} CPU s, {row['programs']} stage "
            f"programs compiled in {row['compiled_s']:.1f} CPU s "
            f"({row['compiled_s'] / rows[0]['compiled_s']:.2f} of the first); predicted memory / "
            f"XLA's {', '.join(f'{ours / xla:.2f}' for ours, xla in memory)}",
            flush=True,
        )
        command = command_line("benchmarks.pipeline_depth", FILE=options.json)
        write_json(options.json, {"command": command, "machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
