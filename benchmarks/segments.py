"""Plans found from measured segments, against all other plans that were timed.

    python -m benchmarks.segments --json benchmarks/results/segments_cpu.json   (8 virtual CPUs)

For each model and mesh, the three passes run (analysis, profile, search). Then whole steps are
compiled and timed interleaved: the search's plan and its runners-up, the cost model's plan, and
plans that split products differently, good and poor ones. A row has the time of the passes, the
step composed of segments over the step as it runs, and the *regret*: the time of the search's plan
over that of the fastest plan, both before (`unchecked`) and after the search's best few were run as
whole steps.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPAR_CACHE"] = "off"  # ignore earlier runs

import jax

from autopar.compiler import plan_step
from autopar.measure.enumerate_plans import covering_plans
from autopar.measure.segments.passes import (
    load_analysis,
    load_segment_profile,
    prepare_step,
    run_passes,
)
from autopar.methods import ShardParallel
from autopar.runtime.timing import spread_of
from autopar.session import cluster_of_devices
from benchmarks.accuracy import NUM_DEVICES, Runner, mesh_shape, models
from benchmarks.pipeline_rows import machine
from benchmarks.script import command_line, script_parser, write_json


def measure(name: str, shape: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    example = models()[name]
    arguments = (example.abstract_state(), example.abstract_batch())
    devices = jax.devices()[:NUM_DEVICES]
    cluster = cluster_of_devices(devices)
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = pathlib.Path(name_of_folder)
        step = prepare_step(example.train_step, arguments, {}, cluster, shape)
        started = time.perf_counter()
        result = run_passes(
            step,
            folder,
            devices,
            top=options.top,
            limit_s=options.limit_s,
            check=options.check,
        )
        passes_s = time.perf_counter() - started
        assert result is not None
        analysis = load_analysis(folder / "analysis.json")
        profile = load_segment_profile(folder / "profile.json")
    plans = {"segments": result.planned}
    if result.candidates:
        plans["unchecked"] = result.candidates[0]
    method = ShardParallel(mesh_shape=shape)
    plans["cost model"] = plan_step(
        example.train_step, arguments, {}, cluster=cluster, method=method
    )
    others = covering_plans(
        example.train_step, arguments, devices, options.plans, mesh_shapes=[shape], cluster=cluster
    )
    plans.update({f"other {n}": planned for n, planned in enumerate(others)})
    runners = {who: Runner(planned, devices) for who, planned in plans.items()}
    order = random.Random(0)
    for _ in range(options.rounds):
        for who in order.sample(list(runners), len(runners)):
            runners[who].sample()
    taken = {who: statistics.median(runner.samples) for who, runner in runners.items()}
    fastest = min(taken, key=lambda who: taken[who])
    return {
        "model": name,
        "mesh": list(shape),
        "segments": [
            {
                "name": segment.name,
                "occurs": len(segment.parts),
                "strategies": segment.num_strategies,
                "timed": len(segment.combinations),
            }
            for segment in analysis.meshes[0].segments
        ],
        "analysis_s": analysis.seconds,
        "profile_s": profile.seconds,
        "compile_s": sum(s.compile_s for s in profile.combinations),
        "passes_s": passes_s,
        "noisy": sum(t.is_noisy for t in profile.timings) / len(profile.timings),
        "predicted_s": result.best.step_s,
        "symbolic_s": result.best.symbolic_s,
        "step_s": taken["segments"],
        "predicted_over_measured": result.best.step_s / taken.get("unchecked", taken["segments"]),
        "fastest": fastest,
        "fastest_s": taken[fastest],
        "regret": taken["segments"] / taken[fastest],
        "unchecked_regret": taken.get("unchecked", taken["segments"]) / taken[fastest],
        "cost_model_regret": taken["cost model"] / taken[fastest],
        "plans": {
            who: {"step_s": taken[who], "spread": spread_of(runner.samples)}
            for who, runner in runners.items()
        },
    }


def line(row: dict[str, Any]) -> str:
    num_timed = sum(segment["timed"] for segment in row["segments"])
    return (
        f"{row['model']} on {row['mesh']}: {len(row['segments'])} segments, "
        f"{num_timed} combinations in {row['profile_s']:.0f} s; "
        f"predicted {row['predicted_s'] * 1e3:.1f} ms, measured {row['step_s'] * 1e3:.1f} ms "
        f"({row['predicted_over_measured']:.2f}); regret {row['regret']:.3f} "
        f"(unchecked {row['unchecked_regret']:.3f}, the cost model's "
        f"{row['cost_model_regret']:.3f}) of {len(row['plans'])} plans, "
        f"fastest: {row['fastest']}"
    )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=list(models()), default=list(models()))
    parser.add_argument("--meshes", nargs="+", type=mesh_shape, default=[(8,)])
    parser.add_argument("--top", type=int, default=8, help="combinations per segment")
    parser.add_argument("--limit-s", type=float, default=1.0, help="for timing one program")
    parser.add_argument("--check", type=int, default=3, help="plans of the search to run")
    parser.add_argument("--plans", type=int, default=12, help="other plans to time")
    parser.add_argument("--rounds", type=int, default=7, help="timings per plan")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    rows = []
    for name in options.model:
        for shape in options.meshes:
            rows.append(measure(name, shape, options))
            print(line(rows[-1]), flush=True)
            about = {"command": command_line("benchmarks.segments"), **machine()}
            write_json(options.json, {**about, "load": os.getloadavg()[0], "rows": rows})


if __name__ == "__main__":
    main()
