"""How long `autopar plan` takes from start to finish for 200, 1,024 and 4,096 devices.

    python -m benchmarks.planning_at_scale [--only NAME] [--json FILE]

Each row runs the command as a user types it, in its own process: Python and JAX start, the model's
file is imported, the step is traced, planned and saved, and its report written. No device is
needed. `cpu_s` is the processor time of that process and its children, which depends less on other
load than wall time. With --json, rows already in the file are kept unless they are measured again.
"""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import autopar
from benchmarks.pipeline_rows import machine
from benchmarks.script import read_rows, script_parser, write_json

ROOT = pathlib.Path(__file__).parents[1]

# Name -> the arguments of `autopar plan`.
CASES: dict[str, list[str]] = {
    "Llama2-13B on 50×4 V100": [
        "examples/llama.py:make_step", "--set", "size=13b", "--set", "batch=1024",
        "--cluster", "50x4:v100-32gb",
    ],
    "GPT-39B on 128×8 H100": [
        "examples/gpt.py:make_step", "--set", "size=39b", "--set", "batch=2048",
        "--cluster", "128x8:h100-sxm",
    ],
    "Llama-70B on 512×8 H100": [
        "examples/llama.py:make_step", "--set", "size=70b", "--set", "batch=4096",
        "--cluster", "512x8:h100-sxm",
    ],
}  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        saved, page = pathlib.Path(folder, "plan.json"), pathlib.Path(folder, "plan.html")
        typed = [*CASES[name], "--method", "auto", "--quiet"]
        command = [sys.executable, "-m", "autopar", "plan", *typed]
        command += ["--save", str(saved), "--report", str(page)]
        load = os.getloadavg()[0]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr}")
        plan = autopar.ParallelPlan.load(saved)
        sizes = {"plan_bytes": saved.stat().st_size, "report_bytes": page.stat().st_size}
    return {
        "command": "autopar plan " + " ".join(typed),
        "devices": plan.num_devices,
        "seconds": seconds,
        "cpu_s": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
        "max_rss_gib": used.ru_maxrss / 2**20,
        "load": load,
        "passes_s": plan.solver.seconds,
        "stages": [[list(s.layers), list(s.submesh), list(s.mesh_shape)] for s in plan.stages],
        "num_micro_batches": plan.num_micro_batches,
        "step_s": plan.estimated_step_s,
        "peak_gib": plan.estimated_peak_bytes / 2**30,
        "notes": [] if plan.search is None else list(plan.search.notes),
        **sizes,
        "machine": machine(),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", choices=list(CASES), action="append")
    options = parser.parse_args()
    rows = read_rows(options.json) or {}
    for name in options.only or CASES:
        row = rows[name] = measure(name)
        print(
            f"{name:26s} {row['seconds']:7.1f} s ({row['cpu_s']:.1f} s cpu), "
            f"{len(row['stages'])} stages, {row['num_micro_batches']} micro-batches, "
            f"step {row['step_s']:.2f} s, peak {row['peak_gib']:.1f} GiB",
            flush=True,
        )
        write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
