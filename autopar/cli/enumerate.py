"""`autopar profile --model F --enumerate`: runs and compares several ways to shard a step.

`autopar profile --database` and `--forget` show and drop what was timed before.

    TimedPlan … → lines as they come, a table, where predictions mislead        (`comparison`)
"""

from __future__ import annotations

import json
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from autopar.cli.devices import first_devices, parse_mesh
from autopar.cli.factories import load_step, parse_options
from autopar.cli.targets import check_target
from autopar.errors import ArgumentError
from autopar.inspect.lines import counted
from autopar.ir.files import write_whole
from autopar.ir.plan import ParallelPlan
from autopar.ir.profile import find_profile
from autopar.ir.text import format_bytes, format_seconds, table
from autopar.lower.planned_step import PlannedStep
from autopar.measure.database import default_database
from autopar.measure.enumerate_plans import TimedPlan, covering_plans, timed_plans
from autopar.measure.ranking import rank_correlation, ranks
from autopar.measure.time_step import StepTiming
from autopar.session import check_profile_here, cluster_of_devices

OK = 0
NOT_FITTING = 1
DEFAULT_LIMIT = 24
ROUNDS = 2


def run_enumerate(arguments: Namespace) -> int:
    user = load_step(arguments.model, parse_options(arguments.set))
    if user.kwargs:
        raise ArgumentError(
            f"autopar profile --model {arguments.model} --enumerate: the step takes keyword "
            f"arguments ({', '.join(user.kwargs)}). Return them as positional arguments."
        )
    if arguments.json is not None:
        check_target(arguments.json, "--json")
    shape = parse_mesh(arguments.mesh)
    devices = first_devices(arguments.devices)
    cluster = cluster_of_devices(devices)
    if arguments.profile is not None:
        measured = find_profile(arguments.profile)
        check_profile_here(measured, devices[0])
        cluster = replace(cluster, profile=measured)
    plans = covering_plans(
        user.step,
        user.args,
        devices,
        arguments.limit or DEFAULT_LIMIT,
        mesh_shapes=None if shape is None else [shape],
        cluster=cluster,
    )
    costs = "measured costs" if arguments.profile is not None else "the analytic cost model"
    meshes = dict.fromkeys(_shape(planned.plan.mesh_shape) for planned in plans)
    print(
        f"{plans[0].plan.name}: {len(plans)} plans on {len(devices)} × {devices[0].device_kind}, "
        f"meshes {', '.join(meshes)}. Each is compiled and timed with synthetic inputs; "
        f"predictions use {costs}."
    )
    numbers = {id(planned): number for number, planned in enumerate(plans, 1)}

    def tell(planned: PlannedStep, timing: StepTiming) -> None:
        text = _line(planned.plan, timing)
        print(f"  plan {numbers[id(planned)]} of {len(plans)}: {text}", flush=True)

    results: list[TimedPlan] = []
    for result in timed_plans(plans, devices, rounds=ROUNDS, tell=tell):
        results.append(result)
        if arguments.json is not None:
            _write(arguments.json, arguments.model, devices, results)
    print()
    print("\n".join(comparison(results)))
    if arguments.json is not None:
        print(f"\nresults: {arguments.json}")
    return OK if any(result.step_s is not None for result in results) else NOT_FITTING


def _write(path: str, model: str, devices: Sequence[Any], results: Sequence[TimedPlan]) -> None:
    """The results so far."""
    text = json.dumps(
        {
            "model": model,
            "devices": f"{len(devices)} × {devices[0].device_kind}",
            "jax": jax.__version__,
            "rank_correlation": correlations(results),
            "plans": [result.as_row() for result in results],
        },
        indent=1,
    )
    write_whole(path, text + "\n")


def _line(plan: ParallelPlan, timing: StepTiming) -> str:
    text = f"mesh {_shape(plan.mesh_shape)}, predicted {format_seconds(plan.estimated_step_s)}, "
    if timing.step is None:
        return text + f"failed: {timing.failure}"
    step = timing.step
    text += f"measured {format_seconds(step.seconds)} ± {step.spread:.0%}"
    return text + f", compiled in {format_seconds(timing.compile_s)}"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


def _predicted(result: TimedPlan) -> float:
    return result.plan.estimated_step_s


# -- the comparison


def comparison(results: Sequence[TimedPlan]) -> list[str]:
    """The plans in words, their times side by side, and where predictions mislead."""
    ran = [result for result in results if result.step_s is not None]
    lines = strategy_lines(results)
    if not ran:
        return [*lines, "", "No plan ran: all ran out of memory."]
    return [*lines, "", *time_lines(results, ran), "", *verdict_lines(results, ran)]


def strategy_lines(results: Sequence[TimedPlan]) -> list[str]:
    """How the first plan of each mesh splits its operators, and how others differ from it."""
    lines = []
    first: dict[tuple[int, ...], tuple[int, TimedPlan]] = {}
    for number, result in enumerate(results, 1):
        shape = result.plan.mesh_shape
        if shape not in first:
            first[shape] = number, result
            axes = zip(result.plan.axis_names, shape, strict=True)
            sizes = ", ".join(f"{name}={size}" for name, size in axes)
            lines.append(f"plan {number} (mesh {_shape(shape)}, {sizes}):")
            width = max((len(name) for name, _ in result.strategies), default=0)
            lines += [f"  {name:<{width}}  {words}" for name, words in result.strategies]
            continue
        like, other = first[shape]
        strategies, base = dict(result.strategies), dict(other.strategies)
        changed = [
            f"{name}: {words}" for name, words in strategies.items() if base.get(name) != words
        ]
        what = "; ".join(changed) or "with other operators split differently"
        lines.append(f"plan {number}: like plan {like}, but {what}")
    return lines


def time_lines(results: Sequence[TimedPlan], ran: Sequence[TimedPlan]) -> list[str]:
    header = (
        "plan", "mesh", "sent", "comm.", "compute", "step", "rank",
        "comm.", "compute", "step", "spread", "rank", "memory", "predicted",
    )  # fmt: skip
    predicted_rank = dict(zip(map(id, ran), ranks([_predicted(r) for r in ran]), strict=True))
    measured_rank = dict(zip(map(id, ran), ranks([r.step_s or 0 for r in ran]), strict=True))
    rows = []
    for number, result in enumerate(results, 1):
        step, plan = result.timing.step, result.plan
        measured = ("-", "-", "out of memory", "-", "-")
        if step is not None:
            measured = (
                format_seconds(result.communication_s or 0.0),
                format_seconds(result.computation_s or 0.0),
                format_seconds(step.seconds),
                f"{step.spread:.0%}",
                f"{measured_rank[id(result)]:g}",
            )
        rows.append(
            (
                str(number),
                _shape(plan.mesh_shape),
                format_bytes(plan.communication_bytes),
                format_seconds(result.predicted_communication_s),
                format_seconds(result.predicted_computation_s),
                format_seconds(_predicted(result)),
                f"{predicted_rank[id(result)]:g}" if id(result) in predicted_rank else "-",
                *measured,
                format_bytes(result.timing.memory_bytes) if result.timing.memory_bytes else "-",
                format_bytes(plan.estimated_peak_bytes),
            )
        )
    lines = table(header, rows)
    start = lines[0].index("comm.")
    middle = lines[0].index("comm.", start + 1)
    above = " " * start + "predicted".ljust(middle - start) + "measured"
    return [above, *lines]


def correlations(results: Sequence[TimedPlan]) -> dict[str, float | None]:
    """Rank correlations of predicted with measured values; None if nothing varies."""
    ran = [result for result in results if result.step_s is not None]
    steps = [result.step_s or 0.0 for result in ran]
    pairs = {
        "step": ([_predicted(result) for result in ran], steps),
        "communication": (
            [result.predicted_communication_s for result in ran],
            [result.communication_s or 0.0 for result in ran],
        ),
        "computation": (
            [result.predicted_computation_s for result in ran],
            [result.computation_s or 0.0 for result in ran],
        ),
        "sent bytes with the step": ([result.plan.communication_bytes for result in ran], steps),
        "memory": (
            [result.plan.estimated_peak_bytes for result in ran],
            [result.timing.memory_bytes for result in ran],
        ),
    }
    values = {name: rank_correlation(*pair) for name, pair in pairs.items()}
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def verdict_lines(results: Sequence[TimedPlan], ran: Sequence[TimedPlan]) -> list[str]:
    """How well predictions rank plans, what following them costs, and where they mislead most."""
    texts = [
        f"{name} {'-' if value is None else f'{value:.2f}'}"
        for name, value in correlations(results).items()
    ]
    lines = [f"rank correlation, predicted with measured: {', '.join(texts)}"]
    numbers = {id(result): number for number, result in enumerate(results, 1)}
    fastest = min(ran, key=lambda result: result.step_s or 0.0)
    promised = min(ran, key=_predicted)
    factor = (promised.step_s or 0.0) / (fastest.step_s or 1.0)
    text = f"best predicted: plan {numbers[id(promised)]}, {format_seconds(promised.step_s or 0.0)}"
    if promised is fastest:
        lines.append(text + ", also the fastest")
    else:
        lines.append(
            f"{text}; fastest: plan {numbers[id(fastest)]}, "
            f"{format_seconds(fastest.step_s or 0.0)}; following the prediction costs {factor:.2f}×"
        )
    ratios = {id(r): (r.step_s or 0.0) / _predicted(r) for r in ran if _predicted(r)}
    if len(ratios) < 2:
        return lines
    middle = statistics.median(ratios.values())
    lines.append(
        f"a step takes {middle:.3g}× its prediction (median); the largest deviations from that:"
    )
    off = sorted(ratios, key=lambda key: -abs(math.log(ratios[key] / middle)))
    by_id = {id(result): result for result in ran}
    for key in off[:3]:
        ratio = ratios[key] / middle
        kind = "slower" if ratio >= 1 else "faster"
        result = by_id[key]
        lines.append(
            f"  plan {numbers[key]}: {max(ratio, 1 / ratio):.2f}× {kind} (predicted "
            f"{format_seconds(_predicted(result))}, measured "
            f"{format_seconds(result.step_s or 0.0)})"
        )
    lines.append(
        "measured communication: the sum of the program's collectives, each timed alone; "
        "computation: the rest of the step, at least 0."
    )
    return lines


# -- the database


def run_database(arguments: Namespace) -> int:
    database = default_database()
    if database.path is None:
        print("The database is off (AUTOPAR_CACHE=off).")
        return OK
    if arguments.forget:
        print(f"{database.path}: removed {counted(database.forget(), 'timing')}.")
        return OK
    rows = database.rows()
    print(f"{database.path}: {counted(len(rows), 'timing')}, latest first.")
    cells = [
        (
            time.strftime("%Y-%m-%d %H:%M", time.localtime(row.made_s)),
            "out of memory"
            if row.timing.step is None
            else f"{format_seconds(row.timing.step.seconds)} ± {row.timing.step.spread:.0%}",
            format_bytes(row.timing.memory_bytes) if row.timing.memory_bytes else "-",
            row.key.program[:8],
            row.key.devices,
            row.name,
        )
        for row in rows
    ]
    if cells:
        header = ("time", "step", "memory", "program", "devices", "plan")
        print("\n".join(table(header, cells)))
    return OK
