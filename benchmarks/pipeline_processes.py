"""A pipeline in processes of its own against the same pipeline in one process, on CPUs.

    python -m benchmarks.pipeline_processes [--stages N] [--rounds N] [--steps N] [--json FILE]

Two or four stages with a device each: as so many processes (`autopar launch --platform cpu`), and
as virtual devices of one process. Both are started in turn, in several rounds, and train the same
GPT; a round's time is the median of its steps after the first few. All share the cores of this
machine, so the ratio says what processes of their own cost, not what they gain.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.script import command_line, script_parser, write_json

WARM_STEPS = 5
LIMIT_S = 300


def worker(num_stages: int, num_steps: int) -> None:
    """Trains; process 0 prints the median step in seconds."""
    import jax
    import numpy as np

    import autopar
    from examples.models import build

    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize()
    model = build("gpt-tiny", 64, hidden_size=128, num_layers=4, seq_len=32, vocab_size=256)
    stages = autopar.UniformStages(num_stages)
    step = autopar.parallelize(model.train_step, method=autopar.PipeshardParallel(8, stages=stages))
    state, batch = (jax.tree.map(np.asarray, x) for x in (model.create_state(), model.make_batch()))
    times = []
    for _ in range(WARM_STEPS + num_steps):
        begun = time.perf_counter()
        state, loss = step(state, batch)
        value = float(loss)
        times.append(time.perf_counter() - begun)
    if jax.process_index() == 0:
        print(f"median_s {statistics.median(times[WARM_STEPS:])!r} loss {value!r}", flush=True)


def run(num_stages: int, num_steps: int, num_processes: int) -> tuple[float, float]:
    """(median step, last loss) of a run in so many processes."""
    own = ["-m", "benchmarks.pipeline_processes", "--worker"]
    own += ["--stages", str(num_stages), "--steps", str(num_steps)]
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    if num_processes > 1:
        launch = ["-m", "autopar", "launch", "--ranks", str(num_processes), "--platform", "cpu"]
        command = [sys.executable, *launch, "--", sys.executable, *own]
    else:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_stages}"
        command = [sys.executable, *own]
    done = subprocess.run(
        command, env=environment, timeout=LIMIT_S, check=True, capture_output=True, text=True
    )
    line = next(line for line in done.stdout.splitlines() if "median_s" in line)
    words = line.partition("median_s")[2].split()
    return float(words[0]), float(words[2])


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--worker", action="store_true", help="be one of the processes")
    options = parser.parse_args()
    if options.worker:
        return worker(options.stages, options.steps)
    from benchmarks.pipeline_rows import machine

    rows: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        one, loss = run(options.stages, options.steps, 1)
        several, other = run(options.stages, options.steps, options.stages)
        rows.append({"one_process_s": one, "processes_s": several, "losses": [loss, other]})
        print(
            f"{options.stages} stages: one process {1e3 * one:.1f} ms, {options.stages} processes "
            f"{1e3 * several:.1f} ms, ratio {several / one:.2f}; losses {loss:.6f}, {other:.6f}",
            flush=True,
        )
    ratio = statistics.median(row["processes_s"] / row["one_process_s"] for row in rows)
    print(f"median ratio {ratio:.2f}")
    command = command_line("benchmarks.pipeline_processes", FILE=options.json)
    document = {"command": command, "machine": machine(), "ratio": ratio, "rows": rows}
    write_json(options.json, document)


if __name__ == "__main__":
    main()
