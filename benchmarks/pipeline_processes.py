"""A pipeline in processes of its own against the same pipeline in one process, on CPUs.

    python -m benchmarks.pipeline_processes [--stages N] [--rounds N] [--steps N] [--json FILE]

Two or four stages with a device each: as so many processes (`autopar launch --platform cpu`), and
as virtual devices of one process. Both are started in turn, in several rounds, and train the same
GPT. Wall time is the median of a round's steps after the first few; processor time is that of all
processes and threads, over the same steps. All share the cores of this machine, so the ratio says
what processes of their own cost, not what they gain; where other programs run, only that of
processor time says so.

XLA splits operations among its threads (`PJRT_NPROC`). Processes have what `autopar launch` gives
them, a share of the cores; the one process has as many as all of them together.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

from benchmarks.script import command_line, script_parser, write_json

WARM_STEPS = 5
LIMIT_S = 300


class StepTimes(NamedTuple):
    wall_s: float
    processor_s: float
    loss: float


def worker(num_stages: int, num_steps: int) -> None:
    """Trains; every process prints its processor time and the median step."""
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
    times, processor_s, value = [], 0.0, 0.0
    for number in range(WARM_STEPS + num_steps):
        if number == WARM_STEPS:
            processor_s = time.process_time()
        begun = time.perf_counter()
        state, loss = step(state, batch)
        value = float(loss)
        times.append(time.perf_counter() - begun)
    processor_s = (time.process_time() - processor_s) / num_steps
    median_s = statistics.median(times[WARM_STEPS:])
    print(f"wall_s={median_s!r} processor_s={processor_s!r} loss={value!r};", flush=True)


def run(num_stages: int, num_steps: int, num_processes: int) -> StepTimes:
    own = ["-m", "benchmarks.pipeline_processes", "--worker"]
    own += ["--stages", str(num_stages), "--steps", str(num_steps)]
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    environment.pop("PJRT_NPROC", None)
    if num_processes > 1:
        launch = ["-m", "autopar", "launch", "--ranks", str(num_processes), "--platform", "cpu"]
        command = [sys.executable, *launch, "--", sys.executable, *own]
    else:
        share = max(1, (os.cpu_count() or 1) // num_stages)
        environment["PJRT_NPROC"] = str(num_stages * share)
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_stages}"
        command = [sys.executable, *own]
    done = subprocess.run(
        command, env=environment, timeout=LIMIT_S, check=True, capture_output=True, text=True
    )
    found = re.findall(r"wall_s=(\S+) processor_s=(\S+) loss=(\S+);", done.stdout)
    assert len(found) == num_processes, done.stdout
    walls, processors, losses = (list(map(float, column)) for column in zip(*found, strict=True))
    assert len(set(losses)) == 1, losses
    return StepTimes(max(walls), sum(processors), losses[0])


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

    num_stages = options.stages
    rows: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        one = run(num_stages, options.steps, 1)
        several = run(num_stages, options.steps, num_stages)
        rows.append({"one_process": one._asdict(), "processes": several._asdict()})
        print(
            f"{num_stages} stages, one process and {num_stages}: wall {1e3 * one.wall_s:.1f} and "
            f"{1e3 * several.wall_s:.1f} ms, ratio {several.wall_s / one.wall_s:.2f}; processor "
            f"{1e3 * one.processor_s:.1f} and {1e3 * several.processor_s:.1f} ms, ratio "
            f"{several.processor_s / one.processor_s:.2f}; losses {one.loss:.6f}, "
            f"{several.loss:.6f}",
            flush=True,
        )
    ratios = {
        name: statistics.median(row["processes"][name] / row["one_process"][name] for row in rows)
        for name in ("wall_s", "processor_s")
    }
    print(f"median ratio: wall {ratios['wall_s']:.2f}, processor {ratios['processor_s']:.2f}")
    command = command_line("benchmarks.pipeline_processes", FILE=options.json)
    document = {"command": command, "machine": machine(), "ratios": ratios, "rows": rows}
    write_json(options.json, document)


if __name__ == "__main__":
    main()
