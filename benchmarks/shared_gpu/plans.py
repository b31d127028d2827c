"""The plan phase: from models and a machine profile to files of candidate plans with predictions.

    case, clusters → DIR/CASE.json: the experts' names; plans with what each cost model predicts

`profile` prices with the measured profile, `preset` with the device's data sheet (of a shared GPU,
an equal share of it). Both choose a plan; ten or more others are known methods, the best plans of
other meshes, and random ones. The preset's choice has a twin that merges collectives by XLA's own
sizes. Each model is planned in a process of its own, on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import autopar
from autopar.errors import AutoparError
from autopar.ir.devices import DEVICES, share_of
from autopar.ir.files import write_whole
from autopar.ir.profile import find_profile
from autopar.lower.planned_step import PlannedStep
from autopar.measure.candidates import repriced
from autopar.measure.enumerate_plans import strategies_in_words
from benchmarks.accuracy_plans import quick_plans_of
from benchmarks.accuracy_tables import figures
from benchmarks.experts.grid import families_in_turns, plain_experts
from examples.models import Example

from .cases import CASES

NUM_RANKS = 8
DEFAULT = "preset"  # in `chosen_by`: what autopar takes by default
MERGED_BY_XLA = "preset, XLA's merging"
_USED_MEMORY = 0.9  # of a share of the GPU, as `autopar launch` gives it to a rank
_GRACE_S = 60.0  # beyond the time limit, for the plan that is being made then


def clusters_of(
    device: str, profile: str | None, num_ranks: int = NUM_RANKS, ranks_per_gpu: int = NUM_RANKS
) -> dict[str, autopar.ClusterSpec]:
    """One host of `num_ranks` devices, priced by the preset and, if there is one, the profile."""
    preset = DEVICES[device] if device == "cpu" else share_of(DEVICES[device], ranks_per_gpu)
    memory_bytes = preset.memory_bytes * _USED_MEMORY
    measured = None if profile is None else find_profile(profile)
    if measured is not None and measured.usable_memory_bytes is not None:
        memory_bytes = min(memory_bytes, measured.usable_memory_bytes)
    size: dict[str, Any] = {"memory_bytes": memory_bytes}
    found = {DEFAULT: autopar.ClusterSpec(1, num_ranks, preset, **size)}
    if measured is not None:
        found["profile"] = autopar.ClusterSpec(1, num_ranks, device, profile=measured, **size)
    return found


def plan_case(
    example: Example,
    clusters: dict[str, autopar.ClusterSpec],
    *,
    num_plans: int,
    num_experts: int,
    limit_s: float,
) -> dict[str, Any]:
    """The document of a model's plans. After `limit_s` no further candidates are sought."""
    started = time.monotonic()
    cluster = list(clusters.values())[-1]
    plans = quick_plans_of(example, clusters, num_plans, meshes_of(cluster), limit_s)
    rows = [plan_row(chosen_by, planned, clusters) for chosen_by, planned in plans]
    rows += [
        plan_row([MERGED_BY_XLA], merged_by_xla(planned), clusters)
        for chosen_by, planned in plans
        if DEFAULT in chosen_by and planned.plan.xla_options
    ]
    for number, row in enumerate(rows):
        row["name"] = f"autopar {number}"
    experts = families_in_turns(plain_experts(example, cluster.num_devices))[:num_experts]
    return {
        "plans": rows,
        "experts": [{"name": expert.name, "family": expert.family} for expert in experts],
        "search": None,
        "planned_s": time.monotonic() - started,
    }


def meshes_of(cluster: autopar.ClusterSpec) -> list[tuple[int, ...]]:
    """One axis, and every grid of two."""
    num = cluster.num_devices
    return [(num,), *((n, num // n) for n in range(2, num // 2 + 1) if num % n == 0)]


def plan_row(
    chosen_by: Sequence[str], planned: PlannedStep, clusters: dict[str, autopar.ClusterSpec]
) -> dict[str, Any]:
    plan = planned.plan
    predicted = {name: figures(repriced(planned, c).plan) for name, c in clusters.items()}
    return {
        "chosen_by": list(chosen_by),
        "mesh": list(plan.mesh_shape),
        "num_micro_batches": plan.num_micro_batches,
        "remat_layers": len(plan.remat),
        "strategies": dict(strategies_in_words(plan)),
        "predicted": predicted,
        "predicted_bytes": plan.estimated_peak_bytes,
        "plan": json.loads(plan.to_json()),
    }


def merged_by_xla(planned: PlannedStep) -> PlannedStep:
    """The same plan without the sizes up to which it has XLA merge collectives."""
    return replace(planned, plan=replace(planned.plan, xla_options=None))


def pipeline_search(example: Example, cluster: autopar.ClusterSpec) -> dict[str, Any]:
    """What the default method chooses when it may also use pipelines."""
    arguments = (example.abstract_state(), example.abstract_batch())
    try:
        plan = autopar.plan(example.train_step, *arguments, cluster=cluster)
    except AutoparError as error:
        return {"error": str(error)}
    return {
        "is_pipeline": plan.is_pipeline,
        "num_stages": len(plan.stages),
        "step_s": plan.estimated_step_s,
    }


# -- many models at once


def plan_all(names: Sequence[str], folder: Path, arguments: Sequence[str], limit_s: float) -> None:
    """Plan each model in a process of its own, as many at once as there are cores; models whose
    files exist are left out. A process that takes too long is ended; its plans are in its file
    if it has found them by then."""
    wanted = [name for name in names if not plan_file(folder, name).exists()]
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "2"}
    try:
        while wanted or running:
            while wanted and len(running) < (os.cpu_count() or 1):
                name = wanted.pop(0)
                command = [sys.executable, "-m", "benchmarks.shared_gpu", "plan-one"]
                command += [*arguments, "--out", str(folder), "--model", name]
                process = subprocess.Popen(command, env=env)
                running[name] = process, time.monotonic()
            for name, (process, began_s) in list(running.items()):
                late = time.monotonic() - began_s > limit_s + _GRACE_S
                if late:
                    process.kill()
                if late or process.poll() is not None:
                    process.wait()
                    del running[name]
                    if not plan_file(folder, name).exists():
                        print(f"{name}: no plans{' in time' if late else ''}", flush=True)
            time.sleep(0.1)
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()


def plan_one(name: str, options: Any) -> None:
    """The work of one process."""
    example = CASES[name].example(tiny=options.tiny)
    clusters = clusters_of(options.device, options.profile, options.ranks, options.ranks_per_gpu)
    document = plan_case(
        example,
        clusters,
        num_plans=options.candidates,
        num_experts=options.experts,
        limit_s=options.plan_limit_s,
    )
    digest = None if options.profile is None else find_profile(options.profile).digest
    document = {"case": name, "tiny": options.tiny, "profile": digest, **document}
    path = plan_file(Path(options.out), name)
    write_whole(path, json.dumps(document))
    chosen = [row["mesh"] for row in document["plans"] if row["chosen_by"]]
    print(
        f"{name}: {len(document['plans'])} plans and {len(document['experts'])} experts in "
        f"{document['planned_s']:.0f} s; chosen meshes {chosen}",
        flush=True,
    )
    if document["planned_s"] < options.plan_limit_s:  # a search may take long, and be ended
        document["search"] = pipeline_search(example, list(clusters.values())[-1])
        write_whole(path, json.dumps(document))


def plan_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.plans.json"
