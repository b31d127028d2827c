"""The event simulator: its speed, and its predictions against measured steps.

    python -m benchmarks.simulator [--rounds N] [--json FILE]

*Events per second*: simulates a 1F1B step of 16 stages and 256 micro-batches repeatedly. An event
is a run, a send or a receive. The steps before the simulation are timed too: the schedule, the
instruction lists, and the simulator's input made from them.

*Simulated over measured*: times stage programs one at a time (`executable.time_stage_programs`),
simulates the step's instruction lists with these times and free transfers, and times whole steps.
Virtual devices share the cores of one machine, while a simulated mesh has its own machine. So:

    two meshes  of one device each, every program on one thread: side by side if two cores are
                free. The step is compared with the simulation with meshes side by side.
    8 devices   in two or four meshes. Stage programs of several devices keep all cores busy, so
                meshes gain nothing by running side by side: the step is compared with the
                simulation in which all stage programs run one after another on one machine.

Two independent processes measure how much a program slows down when the other core works too; a
simulated mesh does not slow down.

(Layers that wait in a callback instead of computing do not help: JAX runs a program with a callback
where it is dispatched.) On a busy machine, the fastest over the fastest says more.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false",
)

import jax

import autopar
from autopar.cost.pipeline_times import pipeline_of_times
from autopar.cost.simulator import simulate, simulation_input
from autopar.ir.pipeline import EACH
from autopar.ir.timeline import MeshTransferTime, PipelineTimes, StageProgramTime
from autopar.lower.instructions import emit_programs
from autopar.lower.schedules import make_schedule
from autopar.runtime.pipeline import PipelineExecutable
from benchmarks.pipeline_overhead import in_schedule_order
from benchmarks.pipeline_rows import machine
from benchmarks.script import script_parser, write_json
from examples.models import build

# -- events per second


def chain(num_stages: int) -> PipelineTimes:
    """Equal stages that send to their neighbours."""
    stage_programs = [
        StageProgramTime(stage, phase, 0, seconds)
        for stage in range(num_stages)
        for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("update", 1.0))
    ]
    crossings = [
        MeshTransferTime(
            source,
            target,
            phase,
            1.0,
            0.1,
            value=2 * min(source, target) + (phase == "backward"),
            micro_batch=EACH,
            writers=((3 * source + (phase == "backward"), EACH),),
            readers=((3 * target + (phase == "backward"), EACH),),
        )
        for stage in range(num_stages - 1)
        for phase, source, target in (
            ("forward", stage, stage + 1),
            ("backward", stage + 1, stage),
        )
    ]
    return PipelineTimes((), (), (), (), tuple(crossings), tuple(stage_programs))


def speed(num_stages: int, num_micro_batches: int, rounds: int) -> dict[str, Any]:
    """In processor seconds, which depend less on other load than wall time."""
    times = chain(num_stages)
    pipeline, stage_program_s, transfers = pipeline_of_times(
        times, range(num_stages), num_micro_batches
    )
    schedule_s, schedule = timed(lambda: make_schedule("1f1b", num_stages, num_micro_batches))
    lists_s, programs = timed(lambda: emit_programs(pipeline, schedule))
    work_s, work = timed(lambda: simulation_input(pipeline, programs, stage_program_s, transfers))
    best_s = min(timed(lambda: simulate(work))[0] for _ in range(rounds))
    return {
        "num_stages": num_stages,
        "num_micro_batches": num_micro_batches,
        "num_events": work.num_events,
        "simulate_s": best_s,
        "events_per_s": work.num_events / best_s,
        "schedule_s": schedule_s,
        "lists_s": lists_s,
        "work_s": work_s,
    }


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = run()
    return time.process_time() - started, result


# -- simulated over measured


@dataclass(frozen=True)
class Case:
    schedule: str
    num_stages: int
    num_meshes: int
    devices_per_mesh: int
    num_micro_batches: int = 8

    @property
    def name(self) -> str:
        return (
            f"{self.num_meshes} meshes of {self.devices_per_mesh}, {self.num_stages} stages, "
            f"{self.schedule}"
        )

    @property
    def side_by_side(self) -> bool:
        return self.devices_per_mesh == 1 and self.num_meshes <= (os.cpu_count() or 1)

    def method(self) -> autopar.PipeshardParallel:
        stages = autopar.UniformStages(self.num_stages)
        return autopar.PipeshardParallel(
            self.num_micro_batches, stages=stages, schedule=self.schedule
        )


CASES = [
    *(Case(name, 2, 2, 1) for name in ("gpipe", "1f1b", "1f1b_eager", "zero_bubble")),
    Case("interleaved_1f1b", 4, 2, 1),
    *(Case(name, 2, 2, 4) for name in ("gpipe", "1f1b")),
    *(Case(name, 4, 4, 2) for name in ("gpipe", "1f1b", "1f1b_eager", "zero_bubble")),
]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    model = build("gpt-tiny", 64, hidden_size=128, num_layers=4, seq_len=32, vocab_size=256)
    autopar.init(devices=jax.devices()[: case.num_meshes * case.devices_per_mesh])
    step = autopar.parallelize(model.train_step, method=case.method())
    batch = model.make_batch()
    state, loss = step(model.create_state(), batch)
    executable = step.last_executable
    assert isinstance(executable, PipelineExecutable)
    assert len(executable.meshes) == case.num_meshes
    places = executable.input_shardings
    placed = executable.place(jax.tree.leaves((model.create_state(), batch)))
    batch = jax.tree.unflatten(jax.tree.structure(batch), placed[-len(jax.tree.leaves(batch)) :])
    state, loss = step(state, batch)
    measured_s, simulated_s = [], []
    for _ in range(rounds):
        jax.block_until_ready((state, loss, batch))
        started = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        measured_s.append(time.perf_counter() - started)
        # A step consumes its state, so the stage programs get a copy.
        copied = jax.tree.map(lambda leaf: leaf.copy(), state)
        leaves = jax.block_until_ready(jax.device_put(jax.tree.leaves((copied, batch)), places))
        stage_programs = executable.time_stage_programs(leaves)
        if case.side_by_side:
            pipeline, programs = executable.pipeline, executable.programs
            simulated_s.append(in_schedule_order(stage_programs, pipeline, programs))
        else:
            simulated_s.append(sum(seconds for _, _, seconds in stage_programs))
    autopar.shutdown()
    return {
        "side_by_side": case.side_by_side,
        "measured_ms": 1e3 * statistics.median(measured_s),
        "simulated_ms": 1e3 * statistics.median(simulated_s),
        "ratio": statistics.median(simulated_s) / statistics.median(measured_s),
        "fastest_ratio": min(simulated_s) / min(measured_s),
        "ratios": [s / m for s, m in zip(simulated_s, measured_s, strict=True)],
        "num_instructions": executable.num_instructions(),
    }


_WORK = """
import sys, time
import jax, jax.numpy as jnp
product = jax.jit(lambda x: jnp.tanh(x @ x) * 0.01)
x = product(jnp.ones((256, 256))).block_until_ready()
print("ready", flush=True)
end, count = time.perf_counter() + float(sys.argv[1]), 0
while time.perf_counter() < end:
    x, count = product(x).block_until_ready(), count + 1
print(count, flush=True)
"""


def speed_beside_another(seconds: float = 4.0) -> float:
    """The speed of a single-threaded program next to another such process, over its speed alone."""

    def started() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _WORK, str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    alone, _ = started().communicate()
    both = [started(), started()]
    counts = [int(process.communicate()[0]) for process in both]
    return max(counts) / int(alone)


def show(name: str, row: dict[str, Any]) -> str:
    how = "side by side" if row["side_by_side"] else "one after another"
    return (
        f"{name:40s} measured {row['measured_ms']:7.1f} ms, simulated {row['simulated_ms']:7.1f} "
        f"ms ({how}), ratio {row['ratio']:.3f} ({min(row['ratios']):.2f} to "
        f"{max(row['ratios']):.2f}; fastest over fastest {row['fastest_ratio']:.3f})"
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    speeds = [speed(16, 256, options.rounds), speed(32, 512, options.rounds)]
    for row in speeds:
        print(
            f"{row['num_stages']} stages, {row['num_micro_batches']} micro-batches: "
            f"{row['num_events']} events in {row['simulate_s']:.3f} s, "
            f"{row['events_per_s'] / 1e3:.0f} thousand per second; schedule "
            f"{row['schedule_s']:.2f} s, lists {row['lists_s']:.2f} s, work {row['work_s']:.2f} s",
            flush=True,
        )
    speed_next_to_another = speed_beside_another()
    print(
        f"a program next to another runs at {speed_next_to_another:.2f} of its speed alone",
        flush=True,
    )
    rows = {}
    for case in CASES:
        rows[case.name] = measure(case, options.rounds)
        print(show(case.name, rows[case.name]), flush=True)
    document = {
        "machine": machine(),
        "load": [load, os.getloadavg()[0]],
        "rounds": options.rounds,
        "speed_beside_another": speed_next_to_another,
        "speed": speeds,
        "rows": rows,
    }
    write_json(options.json, document)


if __name__ == "__main__":
    main()
