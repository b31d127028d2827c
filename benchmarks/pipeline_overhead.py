"""The cost of running a pipeline beyond its programs, on 8 virtual CPU devices.

    python -m benchmarks.pipeline_overhead [--rounds N] [--json FILE]

A warm step is timed interleaved with the same step run one stage program at a time, waiting for
each (`executable.time_stage_programs`). The times of the stage programs give two references:

    sum       all of them one after another: the time on a machine that one stage program keeps busy
    schedule  in schedule order, stages side by side, transfers free: the time on machines whose
              meshes share nothing

Virtual devices share the cores of one machine. A stage program of several devices keeps all cores
busy, so stages gain nothing by running side by side, and a step is compared with the sum: the
excess is instructions, transfers and dispatch. A ratio below 1 means that stage programs alone left
cores idle which another stage then used. Ratios are medians over rounds that timed both; on a busy
machine, the fastest step over the fastest sum says more. The schedule needs one machine per mesh
and is given for scale.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax

import autopar
from autopar.cost.simulator import TransferTime, simulate, simulation_input
from autopar.ir.pipeline import Pipeline, PipelinePrograms, StageProgram
from autopar.runtime.pipeline import PipelineExecutable
from benchmarks.pipeline_rows import machine
from benchmarks.script import script_parser, write_json
from examples.models import Example, build

TimedProgram = tuple[StageProgram, int | None, float]  # stage program, micro-batch, seconds


@dataclass(frozen=True)
class Case:
    num_stages: int
    schedule: str
    num_micro_batches: int = 8

    @property
    def name(self) -> str:
        return f"{self.num_stages} stages, {self.schedule}, {self.num_micro_batches} micro-batches"

    def method(self) -> autopar.PipeshardParallel:
        stages = autopar.UniformStages(self.num_stages)
        return autopar.PipeshardParallel(
            self.num_micro_batches, stages=stages, schedule=self.schedule
        )


CASES = [Case(stages, name) for stages in (2, 4) for name in ("1f1b", "1f1b_eager")]


def example() -> Example:
    """A GPT whose stage programs take some ten milliseconds on two cores."""
    return build("gpt-tiny", 64, hidden_size=128, num_layers=4, seq_len=32, vocab_size=256)


def measure(model: Example, case: Case, rounds: int) -> dict[str, Any]:
    step = autopar.parallelize(model.train_step, method=case.method())
    batch = model.make_batch()
    state, loss = step(model.create_state(), batch)
    executable = step.last_executable
    assert isinstance(executable, PipelineExecutable)
    places = executable.input_shardings
    leaves = jax.tree.leaves((model.create_state(), batch))
    batch = jax.tree.unflatten(
        jax.tree.structure(batch),
        jax.block_until_ready(executable.place(leaves)[-len(jax.tree.leaves(batch)) :]),
    )
    jax.block_until_ready((state, loss))
    state, _ = step(state, batch)
    step_s, stage_programs_s, schedule_s, ratios = [], [], [], []
    timed: list[TimedProgram] = []
    for _ in range(rounds):
        jax.block_until_ready(state)
        started = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        step_s.append(time.perf_counter() - started)
        # A step consumes its state, so the stage programs get a copy.
        copied = jax.tree.map(lambda leaf: leaf.copy(), state)
        leaves = jax.block_until_ready(jax.device_put(jax.tree.leaves((copied, batch)), places))
        timed = executable.time_stage_programs(leaves)
        stage_programs_s.append(sum(seconds for _, _, seconds in timed))
        schedule_s.append(in_schedule_order(timed, executable.pipeline, executable.programs))
        ratios.append(step_s[-1] / stage_programs_s[-1])
    leaves = jax.block_until_ready(jax.device_put(jax.tree.leaves((state, batch)), places))
    _, stats = executable.run_tracked(leaves)
    each = [seconds for _, number, seconds in timed if number is not None]
    return {
        "step_ms": 1e3 * statistics.median(step_s),
        "sum_ms": 1e3 * statistics.median(stage_programs_s),
        "schedule_ms": 1e3 * statistics.median(schedule_s),
        "ratio": statistics.median(ratios),
        "quiet_ratio": min(step_s) / min(stage_programs_s),
        "ratios": ratios,
        "piece_ms": 1e3 * statistics.median(each),
        "num_instructions": executable.num_instructions(),
        "num_arrays_sent": stats.num_transfers,
        "sent_bytes": stats.transfer_bytes,
    }


def in_schedule_order(
    timed: Sequence[TimedProgram], pipeline: Pipeline, programs: PipelinePrograms
) -> float:
    """Seconds of a step in schedule order, with median stage program times and free transfers."""
    stage_program_s = [
        statistics.median(
            seconds for stage_program, _, seconds in timed if stage_program == program
        )
        for program in pipeline.stage_programs
    ]
    free = [TransferTime(0.0, 0.0)] * len(pipeline.transfers)
    return simulate(simulation_input(pipeline, programs, stage_program_s, free)).step_s


def show(name: str, row: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(row["num_instructions"].items()))
    return (
        f"{name:40s} step {row['step_ms']:.0f} ms, sum of stage programs {row['sum_ms']:.0f} ms, "
        f"ratio {row['ratio']:.3f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f}; fastest "
        f"over fastest {row['quiet_ratio']:.3f}); in schedule order {row['schedule_ms']:.0f} ms; a "
        f"stage program {row['piece_ms']:.1f} ms; {counts}; "
        f"{row['num_arrays_sent']} arrays sent, {row['sent_bytes'] / 2**20:.1f} MiB"
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    model, rows = example(), {}
    load = os.getloadavg()[0]
    for case in CASES:
        rows[case.name] = measure(model, case, options.rounds)
        print(show(case.name, rows[case.name]), flush=True)
    document = {
        "model": "GPT 4 × 128, batch 64 × 32, float32",
        "machine": machine(),
        "load": [load, os.getloadavg()[0]],
        "rows": rows,
    }
    write_json(options.json, document)


if __name__ == "__main__":
    main()
