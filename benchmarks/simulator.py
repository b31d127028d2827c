"""The event simulator: how fast it is, and what it says of steps that were measured.

    python -m benchmarks.simulator [--rounds N] [--json FILE]

*Events per second*: a 1F1B step of 16 stages and 256 micro-batches, simulated again and again. An
event is a run, a send or a receive. Beside the simulation itself stands what comes before it:
schedule, lists, and work made of lists.

*Simulated over measured*: pieces are timed one at a time (`executable.time_pieces`), the step's own
lists are simulated with these seconds, transfers taken as free, and steps are timed as they run.
Virtual devices share the cores of one machine, so that meshes cannot compute side by side as real
ones do. Two kinds of models get around that:

    waiting    each layer waits in a callback, forward and backward, and computes next to nothing:
               meshes wait side by side however few cores there are. What is compared is the
               schedule: order, who waits for whom, and what the runtime adds.
    computing  a GPT on two meshes of one device each, every program on one thread: fair where two
               cores are free, and no more meshes than that.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false",
)

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.cost.events import program_work, simulate
from autopar.cost.times import pipeline_of_times
from autopar.ir.program import EACH
from autopar.ir.timeline import CrossingTime, PieceTime, PipelineTimes
from autopar.lower.instructions import emit_programs
from autopar.runtime.pipeline import PipelineExecutable
from autopar.stages.schedules import make_schedule
from benchmarks.pipeline_overhead import in_schedule_order
from benchmarks.pipeline_rows import machine
from examples.models import build

FORWARD_S, BACKWARD_S = 0.010, 0.020


# -- events per second


def chain(num_stages: int) -> PipelineTimes:
    """Stages that send to their neighbours, all alike."""
    pieces = [
        PieceTime(stage, phase, 0, seconds)
        for stage in range(num_stages)
        for phase, seconds in (("forward", 1.0), ("backward", 2.0), ("update", 1.0))
    ]
    crossings = [
        CrossingTime(
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
    return PipelineTimes((), (), (), (), tuple(crossings), tuple(pieces))


def speed(num_stages: int, num_micro_batches: int, rounds: int) -> dict[str, Any]:
    """Processor seconds: those of the clock are others' too on a machine that is busy."""
    times = chain(num_stages)
    pipeline, piece_s, transfers = pipeline_of_times(times, range(num_stages), num_micro_batches)
    schedule_s, schedule = timed(lambda: make_schedule("1f1b", num_stages, num_micro_batches))
    lists_s, programs = timed(lambda: emit_programs(pipeline, schedule))
    work_s, work = timed(lambda: program_work(pipeline, programs, piece_s, transfers))
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


def waiting(seconds: float, x: jax.Array) -> jax.Array:
    """`x`, some time later."""

    def wait(value: Any) -> Any:
        time.sleep(seconds)
        return np.asarray(value)

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def waiting_layer(forward_s: float, backward_s: float) -> Callable[[jax.Array], jax.Array]:
    @jax.custom_vjp
    def layer(x: jax.Array) -> jax.Array:
        return waiting(forward_s, x)

    layer.defvjp(lambda x: (waiting(forward_s, x), None), lambda _, g: (waiting(backward_s, g),))
    return layer


def waiting_step(scales: Sequence[float]) -> tuple[Callable[..., Any], Any, Any]:
    """A train step whose layers wait, each as long as its scale says, and its arguments."""
    layers = [waiting_layer(FORWARD_S * scale, BACKWARD_S * scale) for scale in scales]

    def loss_of(weights: Any, batch: jax.Array) -> jax.Array:
        x = batch
        for number, layer in enumerate(layers):
            if number:
                autopar.mark_layer_boundary()
            x = layer(jnp.tanh(x @ weights[number]))
        return jnp.mean(x**2)

    def train_step(weights: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], loss

    weights = [0.1 * jnp.ones((8, 8)) for _ in scales]
    return train_step, weights, jnp.ones((64, 8))


@dataclass(frozen=True)
class Case:
    """`scales`: of the waiting layers, one per stage; None for the model that computes."""

    name: str
    schedule: str
    scales: tuple[float, ...] | None
    num_micro_batches: int = 8

    def build(self) -> tuple[Callable[..., Any], Any, Any, Any]:
        """(step, state, batch, method)"""
        if self.scales is None:
            model = build("gpt-tiny", 32, hidden_size=128, num_layers=4, seq_len=64)
            step, state, batch = model.train_step, model.create_state(), model.make_batch()
            stages: Any = autopar.ManualStages([[0, 1], [2, 3, 4]], [(1, 1)] * 2)
            layers: Any = autopar.AutoLayers(5)
        else:
            step, state, batch = waiting_step(self.scales)
            count = len(self.scales)
            stages = autopar.ManualStages([[k] for k in range(count)], [(1, 1)] * count)
            layers = autopar.ManualLayers()
        method = autopar.PipeshardParallel(
            self.num_micro_batches, layers=layers, stages=stages, schedule=self.schedule
        )
        return step, state, batch, method


TRAINING = ("gpipe", "1f1b", "1f1b_eager", "zero_bubble")
UNEQUAL = (1.0, 2.0, 0.5, 1.5)
CASES = [
    *(Case(f"waiting, 4 equal stages, {name}", name, (1.0,) * 4) for name in TRAINING),
    *(Case(f"waiting, 4 unequal stages, {name}", name, UNEQUAL) for name in TRAINING),
    Case("waiting, 8 equal stages, 1f1b", "1f1b", (1.0,) * 8),
    *(Case(f"computing, 2 stages, {name}", name, None) for name in ("gpipe", "1f1b")),
]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    fn, state, batch, method = case.build()
    num_stages = len(case.scales or (1, 1))
    autopar.init(devices=jax.devices()[:num_stages])
    step = autopar.parallelize(fn, method=method)
    state, loss = step(state, batch)
    executable = step.last_executable
    assert isinstance(executable, PipelineExecutable)
    batch = jax.tree.unflatten(
        jax.tree.structure(batch),
        executable.place(jax.tree.leaves((state, batch)))[-len(jax.tree.leaves(batch)) :],
    )
    state, loss = step(state, batch)
    measured_s, simulated_s, pieces_s = [], [], []
    for _ in range(rounds):
        jax.block_until_ready((state, loss, batch))
        started = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        measured_s.append(time.perf_counter() - started)
        copied = jax.tree.map(lambda leaf: leaf.copy(), state)
        own = jax.tree.leaves((copied, batch))
        one_by_one = executable.time_pieces(own)
        pieces_s.append(sum(seconds for _, _, seconds in one_by_one))
        simulated_s.append(in_schedule_order(one_by_one, executable.pipeline, executable.programs))
    autopar.shutdown()
    measured, simulated = statistics.median(measured_s), statistics.median(simulated_s)
    return {
        "measured_ms": 1e3 * measured,
        "simulated_ms": 1e3 * simulated,
        "one_by_one_ms": 1e3 * statistics.median(pieces_s),
        "ratio": simulated / measured,
        "fastest_ratio": min(simulated_s) / min(measured_s),
        "ratios": [s / m for s, m in zip(simulated_s, measured_s, strict=True)],
        "num_instructions": executable.num_instructions(),
    }


def show(name: str, row: dict[str, Any]) -> str:
    return (
        f"{name:38s} measured {row['measured_ms']:7.1f} ms, simulated {row['simulated_ms']:7.1f} "
        f"ms, ratio {row['ratio']:.3f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f}; "
        f"fastest over fastest {row['fastest_ratio']:.3f}); one by one {row['one_by_one_ms']:.1f} "
        "ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="write all rows to this file")
    options = parser.parse_args()
    os.environ.setdefault("PJRT_NPROC", "32")  # as many programs may wait at a time
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
    rows = {}
    for case in CASES:
        rows[case.name] = measure(case, options.rounds)
        print(show(case.name, rows[case.name]), flush=True)
    if options.json:
        document = {
            "machine": machine(),
            "load": [load, os.getloadavg()[0]],
            "rounds": options.rounds,
            "speed": speeds,
            "rows": rows,
        }
        pathlib.Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
