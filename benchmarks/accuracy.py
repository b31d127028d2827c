"""Predicted against measured step time and memory of many plans, and their order.

    python -m benchmarks.accuracy --profile cpu --json FILE     (8 virtual CPU devices)
    python -m benchmarks.accuracy --measured benchmarks/results/one_gpu_h200*.json --profile h200

The first form plans a GPT and an MoE on several meshes (`accuracy_plans`), including the choices of
each cost model, compiles all plans, times them interleaved, and compares the times with the
prediction of every cost model: `symbolic` is the preset of the device, `measured` the profile. It
prints the rank correlation (Spearman) over all plans and the *regret* of each cost model: the
measured time of its choice over that of the fastest plan.

The second form takes rows of `benchmarks.one_gpu`, measured on a GPU, and predicts them here:
planning needs no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

if "--measured" not in sys.argv:  # before JAX is imported
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autopar
from autopar.executables import make_executable
from autopar.lower.planned_step import PlannedStep
from autopar.measure.candidates import repriced
from autopar.measure.enumerate_plans import strategies_in_words
from autopar.measure.time_step import synthetic_array
from autopar.runtime.timing import spread_of
from autopar.session import cluster_of_devices
from benchmarks.accuracy_plans import MESHES, plans_of
from benchmarks.accuracy_tables import figures, one_gpu_text, plan_line, summary, summary_text
from benchmarks.interleaved import Runner, sample_in_turns
from benchmarks.one_gpu_cases import Case, allow_fused_attention, example_of, method_of
from benchmarks.pipeline_rows import machine
from benchmarks.script import command_line, script_parser, write_json
from examples.models import Example, gpt, moe

NUM_DEVICES = 8


def models() -> dict[str, Example]:
    """Small, and wide for their batches: parameter layouts matter as much as products."""
    small: dict[str, Any] = {"seq_len": 32, "vocab_size": 1024}
    return {
        "gpt": gpt.example(gpt.GPTConfig(256, 2, 8, **small), 8),
        "moe": moe.example(moe.MoEConfig(128, 2, 8, num_heads=8, group_size=64, **small), 16),
    }


class PlanRunner(Runner):
    """A planned step with made-up inputs on the devices."""

    def __init__(self, planned: PlannedStep, devices: Sequence[Any]) -> None:
        started = time.perf_counter()
        executable = make_executable(planned, devices)
        self.memory_bytes = float(executable.memory_bytes())
        self.compile_s = time.perf_counter() - started
        places = zip(executable.avals, executable.input_shardings, strict=True)
        leaves = [synthetic_array(a.shape, a.dtype, place) for a, place in places]

        def advance() -> Any:
            results = executable(leaves)
            for i, o in planned.traced.state:
                leaves[i] = results[o]
            return results

        super().__init__(advance)


def measure_plans(
    example: Example, clusters: dict[str, Any], options: argparse.Namespace, ends_s: float
) -> list[dict[str, Any]]:
    devices = jax.devices()[:NUM_DEVICES]
    plans = plans_of(example, clusters, options.plans, options.meshes)
    runners = []
    for chosen_by, planned in plans:
        if time.perf_counter() > ends_s and not chosen_by:
            break
        runners.append((chosen_by, planned, PlanRunner(planned, devices)))
    print(f"{example.name}: {len(runners)} of {len(plans)} plans compiled", flush=True)
    order = random.Random(0)
    for _ in range(options.rounds):
        sample_in_turns([runner for _, _, runner in runners], order)
    rows = []
    for chosen_by, planned, runner in runners:
        predicted = {
            name: figures(repriced(planned, cluster).plan) for name, cluster in clusters.items()
        }
        rows.append(
            {
                "model": example.name,
                "mesh": list(planned.plan.mesh_shape),
                "chosen_by": chosen_by,
                "strategies": dict(strategies_in_words(planned.plan)),
                "predicted": predicted,
                "predicted_bytes": planned.plan.estimated_peak_bytes,
                "step_s": runner.step_s,
                "spread": runner.spread,
                "processor_s": statistics.median(runner.processor_samples),
                "processor_spread": spread_of(runner.processor_samples),
                "xla_bytes": runner.memory_bytes,
                "compile_s": runner.compile_s,
            }
        )
    return sorted(rows, key=lambda row: row["step_s"])


def in_processor_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows in processor time, which depends less on other load than wall time."""
    return [{**r, "step_s": r["processor_s"], "spread": r["processor_spread"]} for r in rows]


def run_plans(options: argparse.Namespace) -> dict[str, Any]:
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    cluster = cluster_of_devices(jax.devices()[:NUM_DEVICES])
    clusters = {"symbolic": cluster}
    if options.profile:
        clusters["measured"] = dataclasses.replace(cluster, profile=options.profile)
    document: dict[str, Any] = {"rounds": options.rounds, "rows": [], "summary": {}}
    started = time.perf_counter()
    for index, name in enumerate(options.model):
        share = options.limit_s * (index + 0.6) / len(options.model)  # the rest is for timing
        rows = measure_plans(models()[name], clusters, options, started + share)
        for row in rows:
            print(plan_line(row), flush=True)
        document["rows"] += rows
        for clock, timed in (("", rows), (", processor time", in_processor_time(rows))):
            document["summary"][name + clock] = summary(timed)
            print(summary_text(name + clock, document["summary"][name + clock]), flush=True)
        write(options, document)
    return document


def run_measured(options: argparse.Namespace) -> dict[str, Any]:
    allow_fused_attention()
    files = [json.loads(pathlib.Path(path).read_text()) for path in options.measured]
    cluster = autopar.ClusterSpec(1, 1, options.device)
    clusters = {"symbolic": cluster}
    if options.profile:
        clusters["measured"] = dataclasses.replace(cluster, profile=options.profile)
    document: dict[str, Any] = {"measured": options.measured, "on": files[0]["device"], "rows": []}
    names = [field.name for field in dataclasses.fields(Case)]
    for row in (row for file in files for row in file["rows"]):
        if "error" in row:
            continue
        case = Case(**{name: row[name] for name in names})
        example = example_of(case)
        arguments = (example.abstract_state(), example.abstract_batch())
        predicted = {}
        peak_bytes = 0.0
        method = method_of(case)
        for name, priced in clusters.items():
            plan = autopar.plan(example.train_step, *arguments, cluster=priced, method=method)
            predicted[name] = figures(plan)
            peak_bytes = plan.estimated_peak_bytes
        document["rows"].append(
            {
                "label": case.label(),
                "model": case.model,
                "step_s": row.get("autopar_step_s", row["jit_step_s"]),
                "spread": row.get("autopar_spread"),
                "predicted": predicted,
                "predicted_bytes": peak_bytes,
                "xla_bytes": row.get("autopar_xla_bytes", row["jit_xla_bytes"]),
                "seen_bytes": row.get("seen_bytes"),
            }
        )
        write(options, document)
    print(one_gpu_text(document["rows"]))
    return document


def write(options: argparse.Namespace, document: dict[str, Any]) -> None:
    about = {
        "command": command_line("benchmarks.accuracy", FILE=options.json),
        **machine(),
        "profile": options.profile,
        "load": os.getloadavg()[0],
    }
    write_json(options.json, {**about, **document})


def mesh_shape(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=list(models()), default=list(models()))
    parser.add_argument("--plans", type=int, default=36, help="per model")
    parser.add_argument("--meshes", nargs="+", type=mesh_shape, default=list(MESHES))
    parser.add_argument("--rounds", type=int, default=7, help="timings per plan")
    parser.add_argument("--limit-s", type=float, default=480.0, help="stop compiling plans then")
    parser.add_argument("--profile", help="a profile's file, or the name of a shipped one")
    parser.add_argument("--measured", nargs="+", metavar="FILE", help="rows of one_gpu")
    parser.add_argument("--device", default="h200-sxm", help="preset, with --measured")
    options = parser.parse_args()
    if options.measured:
        run_measured(options)
    else:
        run_plans(options)


if __name__ == "__main__":
    main()
