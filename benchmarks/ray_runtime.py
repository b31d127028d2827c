"""The cost of running a pipeline on Ray over the same plan in this process, and its start time.

    python -m benchmarks.ray_runtime [--rounds N] [--case NAME] [--starts N] [--json FILE]

CPU meshes, a local Ray.

**Steps.** A GPT is planned once. The plan runs on Ray, with one worker process per device, and in
this process on as many virtual devices, alternating: a step there, a step here, each waited for,
with a batch that was placed before. The ratio is the median over these rounds. On a busy machine,
two more ratios help:

    cpu_ratio    processor seconds of all workers and the driver over those of a local step: the
                 added work. Other load hardly changes it, but it does not see idle waits.
    quiet_ratio  the fastest step on Ray over the fastest local one.

To compare like with like, XLA runs every program on one thread
(`--xla_cpu_multi_thread_eigen=false`, passed on to the workers): otherwise one process would share
one thread pool between all its devices, while each worker would have its own pool. Local devices
are then threads and remote devices processes. The system shares its cores fairly between them if
their priorities are equal: Ray lowers its workers' priority (niceness 15), which is turned off here
(`RAY_worker_niceness=0`). Two differences remain: arrays move by TCP on Ray and by a copy in memory
here, and a mesh of two processes reduces by gloo on Ray and by shared memory here.

`piece_ms` is the processor time of a local step over the number of its forward and backward
stage programs, all devices of a mesh together. It is a mean: a forward stage program takes less.
It should be well over 50 ms.

**Driver.** `call_ms` is the time in `step(…)` when another step may be dispatched and the batch is
on the workers; `upload_call_ms` is the same with a batch of NumPy arrays. `num_calls` are remote
calls per step, `store_bytes` and `store_objects` what Ray's object store reports as created per
step.

**Start.** From `autopar.init` to the end of the first step, in a separate process: `cold` without
Ray, `warm` with Ray running, `again` by a second `init` in the same process. Its parts: Ray
(including reserving resources), planning, workers, compiling (including exporting and sending
programs), the first step (including sending the state).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false",
)
os.environ.setdefault("RAY_worker_niceness", "0")

import jax
import numpy as np

import autopar
from autopar import session
from autopar.executables import make_executable
from autopar.runtime.pipeline import PipelineExecutable
from autopar.runtime.remote.executable import RemoteExecutable
from benchmarks.pipeline_rows import machine
from benchmarks.script import script_parser, write_json
from examples.models import Example, build

NUM_MICRO_BATCHES = 4
STORE_STEPS = 4
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    """A GPT with one layer per stage. `rows` of a micro-batch are chosen so that its stage programs
    take 50 ms."""

    num_stages: int
    processes_per_stage: int = 1
    rows: int = 6
    schedule: str = "1f1b"

    @property
    def name(self) -> str:
        each = f" of {self.processes_per_stage} processes" if self.processes_per_stage > 1 else ""
        return f"{self.num_stages} stages{each}, {self.schedule}"

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.processes_per_stage

    def example(self) -> Example:
        sizes = {
            "hidden_size": 256,
            "num_layers": self.num_stages,
            "seq_len": 128,
            "vocab_size": 512,
        }
        return build("gpt-tiny", self.rows * NUM_MICRO_BATCHES, **sizes)

    def method(self) -> autopar.PipeshardParallel:
        stages = autopar.UniformStages(self.num_stages)
        return autopar.PipeshardParallel(NUM_MICRO_BATCHES, stages=stages, schedule=self.schedule)

    def init(self) -> None:
        autopar.init(cluster="ray", num_hosts=self.num_devices, devices_per_host=1)


CASES = [Case(2), Case(4), Case(2, 2, 12), Case(2, schedule="1f1b_eager")]


# -- steps


class Sides:
    """The same planned step on Ray and here, each with its own state and batch."""

    def __init__(self, case: Case) -> None:
        model = case.example()
        self.host_batch = jax.tree.map(np.asarray, model.make_batch())
        self.step = autopar.parallelize(model.train_step, method=case.method())
        self.state, loss = self.step(model.create_state(), self.host_batch)
        remote = self.step.last_executable
        assert isinstance(remote, RemoteExecutable) and self.step.last_planned is not None
        self.remote = remote
        here = make_executable(self.step.last_planned, jax.devices()[: case.num_devices])
        assert isinstance(here, PipelineExecutable)
        self.here = here
        leaves = jax.tree.leaves((model.create_state(), self.host_batch))
        treedef = jax.tree.structure(self.host_batch)
        self.num_state = len(leaves) - treedef.num_leaves
        positions = range(self.num_state, len(leaves))
        inputs = {position: leaves[position] for position in positions}
        remote_inputs = remote.place_inputs(inputs)
        self.batch = jax.tree.unflatten(treedef, [remote_inputs[p] for p in positions])
        placed = here.place_inputs(inputs)
        self.batch_here = [placed[p] for p in positions]
        self.state_here = here(leaves)[: self.num_state]
        jax.block_until_ready((self.state, loss, self.state_here))
        self.pids = [w.hello.pid for mesh in remote.meshes for w in mesh.group.workers]

    def run_there(self) -> float:
        """Runs a step on Ray; returns the seconds in the call."""
        started = time.perf_counter()
        self.state, loss = self.step(self.state, self.batch)
        called = time.perf_counter() - started
        jax.block_until_ready((self.state, loss))
        return called

    def run_here(self) -> None:
        results = self.here([*self.state_here, *self.batch_here])
        self.state_here = jax.block_until_ready(results)[: self.num_state]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    case.init()
    try:
        sides = Sides(case)
        return {**step_figures(sides, rounds), **driver_figures(sides)}
    finally:
        autopar.shutdown()


def step_figures(sides: Sides, rounds: int) -> dict[str, Any]:
    there_s, here_s, called_s, cpu_there_s, cpu_here_s = [], [], [], [], []
    loads = [os.getloadavg()[0]]
    driver = [os.getpid()]
    sides.run_there()
    sides.run_here()
    for _ in range(rounds):
        seconds, cpu_s, called = timed(sides.run_there, [*sides.pids, *driver])
        there_s.append(seconds)
        cpu_there_s.append(cpu_s)
        called_s.append(called)
        seconds, cpu_s, _ = timed(sides.run_here, driver)
        here_s.append(seconds)
        cpu_here_s.append(cpu_s)
        loads.append(os.getloadavg()[0])
    counts = sides.here.num_instructions()
    num_stage_programs = 2 * len(sides.here.meshes) * NUM_MICRO_BATCHES
    return {
        "step_ms": 1e3 * statistics.median(there_s),
        "here_ms": 1e3 * statistics.median(here_s),
        "ratio": statistics.median(a / b for a, b in zip(there_s, here_s, strict=True)),
        "quiet_ratio": min(there_s) / min(here_s),
        "cpu_ratio": statistics.median(cpu_there_s) / statistics.median(cpu_here_s),
        "piece_ms": 1e3 * statistics.median(cpu_here_s) / num_stage_programs,
        "call_ms": 1e3 * statistics.median(called_s),
        "num_instructions": counts,
        "there_s": there_s,
        "here_s": here_s,
        "cpu_there_s": cpu_there_s,
        "cpu_here_s": cpu_here_s,
        "load": [min(loads), max(loads)],
    }


def timed(run: Callable[[], Any], pids: list[int]) -> tuple[float, float, Any]:
    """Seconds, processor seconds of these processes, and the function's result."""
    cpu_s, started = sum(map(cpu_seconds, pids)), time.perf_counter()
    value = run()
    seconds = time.perf_counter() - started
    return seconds, sum(map(cpu_seconds, pids)) - cpu_s, value


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def driver_figures(sides: Sides) -> dict[str, Any]:
    """The driver's cost of a call that sends a batch."""
    called_s = []
    before = object_store()
    for _ in range(STORE_STEPS):
        started = time.perf_counter()
        sides.state, loss = sides.step(sides.state, sides.host_batch)
        called_s.append(time.perf_counter() - started)
        jax.block_until_ready(sides.state)
        float(loss)
    created = [after - b for b, after in zip(before, object_store(), strict=True)]
    last = sides.remote.last_call
    assert last is not None
    return {
        "upload_call_ms": 1e3 * statistics.median(called_s),
        "num_calls": last.num_calls,
        "num_workers": len(sides.pids),
        "uploaded_bytes": last.uploaded_bytes,
        "store_objects": created[0] / STORE_STEPS,
        "store_bytes": created[1] / STORE_STEPS,
    }


def object_store() -> tuple[int, int]:
    """(objects, bytes) ever put into Ray's object store."""
    import ray
    from ray._private.internal_api import node_stats

    objects = num_bytes = 0
    for node in ray.nodes():
        if node["Alive"]:
            address, port = node["NodeManagerAddress"], node["NodeManagerPort"]
            stats = node_stats(address, port, include_memory_info=False).store_stats
            objects += stats.cumulative_created_objects
            num_bytes += stats.cumulative_created_bytes
    return objects, num_bytes


# -- start


def start_once(case: Case) -> dict[str, float]:
    """Seconds from `init` to the end of the first step, by part; leaves the session open."""
    model = case.example()
    state, batch = model.create_state(), model.make_batch()
    jax.block_until_ready((state, batch))
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    case.init()
    mark()
    step = autopar.parallelize(model.train_step, method=case.method())
    plan = step.plan(state, batch)
    mark()
    remote = session.current().remote
    assert remote is not None
    remote.meshes([tuple(stage.devices) for stage in plan.stages])
    mark()
    _, executable = step._compile((state, batch), {})
    mark()
    executable(jax.tree.leaves((state, batch)))
    assert isinstance(executable, RemoteExecutable)
    executable.wait()
    mark()
    names = ("ray_s", "planning_s", "workers_s", "compiling_s", "first_step_s")
    parts = [after - before for before, after in pairwise(marks)]
    return {**dict(zip(names, parts, strict=True)), "total_s": marks[-1] - marks[0]}


def measure_start(kind: str) -> dict[str, float]:
    """Measures a start in this fresh process."""
    case = CASES[0]
    load = os.getloadavg()[0]
    if kind != "cold":
        import ray

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address="local", include_dashboard=False)
    try:
        if kind == "again":
            start_once(case)
            autopar.shutdown()
        return {**start_once(case), "load": load}
    finally:
        autopar.shutdown()


def starts(times: int) -> dict[str, list[dict[str, float]]]:
    rows: dict[str, list[dict[str, float]]] = {"cold": [], "warm": [], "again": []}
    for _ in range(times):
        for kind, samples in rows.items():
            command = [sys.executable, "-m", "benchmarks.ray_runtime", "--start", kind]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                raise RuntimeError(f"{kind} start failed:\n{done.stderr[-4000:]}")
            samples.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"start, {kind}: {show_start(samples[-1])}", flush=True)
    return rows


# -- output


def show(name: str, row: dict[str, Any]) -> str:
    return (
        f"{name:36s} step {row['step_ms']:.0f} ms, here {row['here_ms']:.0f} ms, ratio "
        f"{row['ratio']:.3f} (fastest {row['quiet_ratio']:.3f}, processor {row['cpu_ratio']:.3f}); "
        f"a stage program {row['piece_ms']:.0f} ms; driver {row['call_ms']:.1f} ms, with a batch "
        f"{row['upload_call_ms']:.1f} ms; {row['num_calls']} calls to {row['num_workers']} "
        f"workers, {row['uploaded_bytes']} bytes sent, {row['store_bytes']:.0f} in the object "
        f"store; load {row['load'][0]:.1f} to {row['load'][1]:.1f}"
    )


def show_start(row: dict[str, float]) -> str:
    parts = ", ".join(f"{n.removesuffix('_s')} {s:.1f}" for n, s in row.items() if n != "total_s")
    return f"{row['total_s']:.1f} s ({parts})"


def write(path: str | None, rows: dict[str, Any], begun: dict[str, Any]) -> None:
    document = {
        "model": "GPT of width 256, a layer per stage, sequences of 128, 4 micro-batches",
        "machine": {**machine(), "ray": version("ray")},
        "rows": rows,
        "start": begun,
    }
    write_json(path, document)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--case", help="only cases whose name contains this")
    parser.add_argument("--starts", type=int, default=2, help="starts of each kind")
    parser.add_argument("--start", choices=("cold", "warm", "again"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        print(json.dumps(measure_start(options.start)))
        return
    rows: dict[str, Any] = {}
    for case in CASES:
        if options.case is None or options.case in case.name:
            rows[case.name] = measure(case, options.rounds)
            print(show(case.name, rows[case.name]), flush=True)
            write(options.json, rows, {})
    if options.starts:
        write(options.json, rows, starts(options.starts))


if __name__ == "__main__":
    main()
