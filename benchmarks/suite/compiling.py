"""One plan of one row, compiled for H100s without having them, and judged: a `Job` → a result.

    python -m benchmarks.suite.compiling JOB.json RESULT.json

runs as a process of `pool`. A job is a row and its planner: "autopar", a hand-written layout, or
"3-D by hand". A layout that does not fit is compiled again with its expert's memory savings until
it fits. Of the hand-written pipelines with the same number of stages, all are planned and the one
predicted to be fastest is compiled. This needs JAX's CUDA plugin but no GPU. Steps of one program
keep XLA's text beside RESULT.json, for `judging`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import autopar
from autopar import _jax
from autopar.compiler import plan_step
from autopar.executables import make_executable
from autopar.ir.pipeline import PER_MICRO_BATCH
from autopar.measure.judge import Judgement, judge
from autopar.measure.verify.targets import load_target
from autopar.runtime.pipeline import PipelineExecutable
from autopar.stages.simulate import predicted_timeline
from benchmarks.experts import Expert, chains_for
from benchmarks.provenance import provenance
from benchmarks.suite.cases import DEVICES_PER_HOST, Row, example_of
from benchmarks.suite.programs import SUFFIX, write_program

TARGET = "h100-80gb"
PRESET = "h100-sxm"
JUDGE = "schedule"  # of XLA, as autopar.measure.judge reads it
USABLE_BYTES = 0.9 * 80e9
AUTOPAR = "autopar"
PIPELINES = "3-D by hand"
AGAIN = ", remat full"  # ends the name of a pipeline that recomputes
_NOT_COMPILED = "its arguments alone need more than a device has"


def cluster_of(row: Row) -> autopar.ClusterSpec:
    return autopar.ClusterSpec(*row.hosts, PRESET)


def devices_of(row: Row) -> list[Any]:
    return _jax.gpu_topology_devices(*row.hosts, load_target(TARGET).config)


def planners(row: Row) -> list[tuple[str, str]]:
    """(planner, family) of every job of a row."""
    chains = chains_for(example_of(row), row.devices, DEVICES_PER_HOST)
    found = {AUTOPAR: AUTOPAR}
    for first in (chain[0] for chain in chains):
        name = first.layout.name if first.layout is not None else _pipeline_name(first)
        found[name] = first.family
    return list(found.items())


def _pipeline_name(expert: Expert) -> str:
    """Pipelines with the same number of stages are one job."""
    stages, _, _ = expert.name.partition(" of ")
    return f"{PIPELINES}, {stages}"


# -- results


def figures_of(
    programs: Sequence[tuple[int, Judgement]], step_s: float, peak_bytes: float
) -> dict[str, Any]:
    """A step's time, and the work of its busiest device: its programs with their runs. `judge` says
    whose figures these are: rows of an older formula have none."""
    places: dict[str, list[float]] = {}
    kinds: Counter[str] = Counter()
    for runs, one in programs:
        for use in one.links:
            sums = places.setdefault(use.place, [0.0, 0.0])
            sums[0] += runs * use.sent_bytes / 1e9
            sums[1] += runs * 1e3 * use.seconds
            kinds[use.kind] += runs * use.count
    return {
        "judge": JUDGE,
        "step_ms": 1e3 * step_s,
        "compute_ms": 1e3 * sum(runs * one.compute_s for runs, one in programs),
        "communication_ms": 1e3 * sum(runs * one.links_s for runs, one in programs),
        "exposed_ms": 1e3 * sum(runs * one.exposed_s for runs, one in programs),
        "tflop": sum(runs * one.flops for runs, one in programs) / 1e12,
        "peak_gb": peak_bytes / 1e9,
        "fits": peak_bytes <= USABLE_BYTES,
        "sent_gb": {place: sent for place, (sent, _) in places.items()},
        "place_ms": {place: ms for place, (_, ms) in places.items()},
        "collectives": dict(kinds),
    }


def _judged(compiled: Any, row: Row, kept: Path | None = None) -> Judgement:
    """What the judge says of a program, whose text is written to the file `kept`."""
    text, hosts = compiled.as_text() or "", _hosts(compiled)
    if kept is not None:
        write_program(kept, text, hosts)
    return judge(text, cluster_of(row), hosts)


def _hosts(compiled: Any) -> list[int] | None:
    """The host of every device, in the order in which the program numbers them."""
    for sharding in jax.tree.leaves(compiled.input_shardings):
        if isinstance(sharding, jax.sharding.NamedSharding):
            return [device.id // DEVICES_PER_HOST for device in sharding.mesh.devices.flat]
    return None


def _peak_bytes(compiled: Any) -> int:
    stats = compiled.memory_analysis()
    sizes = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return sizes - stats.alias_size_in_bytes


def figures_of_plan(planned: Any, row: Row, kept: Path | None = None) -> dict[str, Any]:
    """The figures of XLA's programs for an autopar plan. The step of a pipeline is simulated with
    the judged time of every stage program; transfers between stages take the plan's time."""
    executable = make_executable(planned, devices_of(row))
    if not isinstance(executable, PipelineExecutable):
        compiled: Any = executable.compiled
        judged = _judged(compiled, row, kept)
        return figures_of([(1, judged)], judged.step_s, _peak_bytes(compiled))
    stage_programs = [_judged(program, row) for program in executable.compiled.values()]
    plan = planned.plan
    assert plan.times is not None and len(plan.times.stage_programs) == len(stage_programs)
    timed = [
        replace(old, seconds=new.step_s)
        for old, new in zip(plan.times.stage_programs, stage_programs, strict=True)
    ]
    judged_plan = replace(plan, times=replace(plan.times, stage_programs=tuple(timed)))
    step_s = predicted_timeline(judged_plan).step_s
    of_stage: dict[int, list[tuple[int, Judgement]]] = {}
    for stage_program, judged in zip(
        executable.pipeline.stage_programs, stage_programs, strict=True
    ):
        num_runs = plan.num_micro_batches if stage_program.phase in PER_MICRO_BATCH else 1
        of_stage.setdefault(stage_program.stage, []).append((num_runs, judged))
    most = max(of_stage.values(), key=lambda stage: sum(runs * one.step_s for runs, one in stage))
    return figures_of(most, step_s, executable.memory_bytes())


def _plan_words(plan: Any) -> dict[str, Any]:
    stages = [f"{'×'.join(map(str, stage.mesh_shape))}" for stage in plan.stages]
    return {
        "mesh": ", ".join(stages) if plan.is_pipeline else "×".join(map(str, plan.mesh_shape)),
        "num_stages": len(plan.stages) if plan.is_pipeline else 1,
        "num_micro_batches": plan.num_micro_batches,
        "remat_layers": len(plan.remat),
        "predicted_ms": 1e3 * plan.estimated_step_s,
        "predicted_gb": plan.estimated_peak_bytes / 1e9,
    }


# -- planners


def autopar_results(row: Row, kept: Iterator[Path]) -> list[dict[str, Any]]:
    """autopar's plan with the default method."""
    example = example_of(row)
    arguments = (example.abstract_state(), example.abstract_batch())
    started = time.perf_counter()
    planned = plan_step(
        example.train_step,
        arguments,
        {},
        cluster=cluster_of(row),
        method=autopar.AutoParallel(),
    )
    planned_s = time.perf_counter() - started
    started = time.perf_counter()
    figures = figures_of_plan(planned, row, next(kept))
    return [
        {
            "plan": AUTOPAR,
            "family": AUTOPAR,
            "planned_s": planned_s,
            "compiled_s": time.perf_counter() - started,
            **_plan_words(planned.plan),
            **figures,
        }
    ]


def layout_results(row: Row, name: str, kept: Iterator[Path]) -> list[dict[str, Any]]:
    """Results of a hand-written layout as it is or, if it does not fit, of each of its chains (more
    recomputation, more micro-batches) up to the first that fits."""
    example = example_of(row)
    found: dict[str, dict[str, Any]] = {}
    for chain in chains_for(example, row.devices, DEVICES_PER_HOST):
        if chain[0].layout is None or chain[0].layout.name != name:
            continue
        for expert in chain:
            if expert.name not in found:
                found[expert.name] = _expert_result(expert, example, row, next(kept))
            first = next(iter(found.values()))
            if first["fits"] or first.get("note") == _NOT_COMPILED:
                return [first]
            if found[expert.name]["fits"]:
                break
    return list(found.values())


def _expert_result(expert: Expert, example: Any, row: Row, kept: Path) -> dict[str, Any]:
    result = {"plan": expert.name, "family": expert.family}
    assert expert.layout is not None
    result["mesh"] = "×".join(map(str, expert.layout.mesh_shape))
    started = time.perf_counter()
    step, state, batch = expert.step(example, devices_of(row))
    held_bytes = sum(
        leaf.dtype.itemsize * _size(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves((state, batch))
    )
    if held_bytes > USABLE_BYTES:
        note = _NOT_COMPILED
        return {**result, "fits": False, "peak_gb": held_bytes / 1e9, "note": note}
    compiled = step.lower(state, batch).compile()
    judged = _judged(compiled, row, kept)
    figures = figures_of([(1, judged)], judged.step_s, _peak_bytes(compiled))
    return {**result, "compiled_s": time.perf_counter() - started, **figures}


def _size(shape: Sequence[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def pipeline_results(row: Row, who: str) -> list[dict[str, Any]]:
    """The hand-written pipeline predicted to be fastest among those predicted to fit. One that fits
    is not tried with recomputation."""
    example = example_of(row)
    best: tuple[Expert, Any] | None = None
    fitting: set[str] = set()
    for chain in chains_for(example, row.devices, DEVICES_PER_HOST):
        for expert in chain:
            name = expert.name.removesuffix(AGAIN)
            if not expert.is_pipeline or _pipeline_name(expert) != who or name in fitting:
                continue
            configured = expert.example(example)
            arguments = (configured.abstract_state(), configured.abstract_batch())
            cluster = cluster_of(row)
            try:
                planned = plan_step(
                    configured.train_step, arguments, {}, cluster=cluster, method=expert.method
                )
            except autopar.MemoryBudgetError:
                continue
            fitting.add(name)
            step_s = planned.plan.estimated_step_s
            if best is None or step_s < best[1].plan.estimated_step_s:
                best = (expert, planned)
    if best is None:
        return [{"plan": who, "family": PIPELINES, "fits": False, "note": "none fits"}]
    expert, planned = best
    started = time.perf_counter()
    figures = figures_of_plan(planned, row)
    compiled_s = time.perf_counter() - started
    about = {"plan": expert.name, "family": expert.family, "compiled_s": compiled_s}
    return [{**about, **_plan_words(planned.plan), **figures}]


def results_of(row: Row, who: str, result_file: Path) -> list[dict[str, Any]]:
    """The results of a job; the program of the k-th is in a file beside `result_file`."""
    stem = result_file.with_suffix("")
    kept = (stem.with_name(f"{stem.name}-{index}{SUFFIX}") for index in count())
    if who == AUTOPAR:
        return autopar_results(row, kept)
    if who.startswith(PIPELINES):
        return pipeline_results(row, who)
    return layout_results(row, who, kept)


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    row = Row(**job["row"])
    made = provenance()
    try:
        results = [{**one, "made": made} for one in results_of(row, job["who"], Path(result_file))]
        found: dict[str, Any] = {"results": results}
    except autopar.AutoparError as error:
        first, _, _ = str(error).partition("\n")
        found = {"error": f"{type(error).__name__}: {first}", "made": made}
    document = {"row": asdict(row), "who": job["who"], "jax": jax.__version__, **found}
    partial = Path(f"{result_file}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.rename(result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
