"""`autopar sweep`: plans one step for several sizes, from `PlanRequest`s to a `Sweep`.

One or two of devices, batch, micro-batches and budget vary; a table, plots and a page compare the
predictions.

Points are planned in processes of their own, which know nothing of each other. A point that does
not fit is a result, not an error.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from autopar.cli.factories import check_options, load_object
from autopar.cli.plan import batch_size, fits
from autopar.cli.requests import PlanRequest, make_plan, request_of, use_no_devices
from autopar.cli.targets import check_target
from autopar.cli.units import parse_quantity
from autopar.errors import ArgumentError, AutoparError, FactoryError, MemoryBudgetError
from autopar.inspect.sweep_page import sweep_page
from autopar.inspect.sweep_text import sweep_text, where
from autopar.ir.codec import encode
from autopar.ir.plan import ParallelPlan
from autopar.ir.sweep import Sweep, SweepPoint
from autopar.ir.text import format_bytes

MOST_POINTS = 64
FORMAT, FORMAT_VERSION = "autopar-sweep", 1

Values = tuple[tuple[str, Any], ...]


def run_sweep(arguments: Namespace) -> int:
    use_no_devices()
    check_target(arguments.html, "--html")
    check_target(arguments.json, "--json")
    varied = varied_values(arguments)
    base = request_of(arguments)
    requests = [(values, request_at(base, values)) for values in every_point(varied)]
    for _, request in requests:  # before anything is planned
        request.target()
    factory = load_object(base.factory)
    if callable(factory):
        check_options(base.factory, factory, dict(requests[0][1].options))
    points: list[SweepPoint] = []
    price = arguments.price_per_hour or 0.0
    for point in _planned(requests, price, arguments.jobs):
        points.append(point)
        result = point.problem or f"step {point.step_s:.4g} s"
        print(f"[{len(points)}/{len(requests)}] {where(point)}: {result}", file=sys.stderr)
    unit = "tokens" if any(point.tokens_per_s for point in points) else "samples"
    sweep = Sweep(
        command=_command(arguments),
        device=base.target().cluster.spec.name,
        varied=tuple(varied),
        unit=unit,
        price_per_hour=price,
        points=tuple(points),
    )
    print(sweep_text(sweep))
    if arguments.json:
        body = {"format": FORMAT, "version": FORMAT_VERSION, **encode(sweep)}
        body["points"] = [{**p, "values": dict(p["values"])} for p in body["points"]]
        Path(arguments.json).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        print(f"results: {arguments.json}")
    if arguments.html:
        Path(arguments.html).write_text(sweep_page(sweep), encoding="utf-8")
        print(f"page: {arguments.html}")
    return 0 if sweep.fitting else 1


# -- what varies


def varied_values(arguments: Namespace) -> dict[str, list[Any]]:
    """Name -> values, for the options that are given."""
    given: dict[str, list[Any]] = {}
    for name, parse in _PARSERS.items():
        text = getattr(arguments, name)
        if text is not None:
            flag = "--" + name.replace("_", "-")
            given[name] = [parse(part.strip(), flag) for part in text.split(",")]
            if len(set(given[name])) < len(given[name]):
                raise ArgumentError(f"{flag} {text}: a value occurs twice.")
    if not given:
        raise ArgumentError(
            "sweep: nothing varies. Give a list such as --devices 8,16,32, --batch 256,512, "
            "--micro-batches 4,8 or --budget 20GB,40GB."
        )
    several = [name for name, values in given.items() if len(values) > 1]
    if len(several) > 2:
        raise ArgumentError(f"sweep: {', '.join(several)} vary; at most two may. Fix the others.")
    count = prod(map(len, given.values()))
    if count > MOST_POINTS:
        raise ArgumentError(f"sweep: {count} points; at most {MOST_POINTS} are planned at a time.")
    return given


def _count(text: str, flag: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"{flag}: {text!r} is not a whole number ≥ 1.")
    return int(text)


def _count_or_auto(text: str, flag: str) -> int | str:
    return text if text == "auto" else _count(text, flag)


def _bytes(text: str, flag: str) -> float:
    return parse_quantity(text, "memory", flag)


_PARSERS = {
    "devices": _count,
    "batch": _count,
    "micro_batches": _count_or_auto,
    "budget": _bytes,
}


def every_point(varied: dict[str, list[Any]]) -> list[Values]:
    return [tuple(zip(varied, values, strict=True)) for values in product(*varied.values())]


def request_at(base: PlanRequest, values: Values) -> PlanRequest:
    request = base
    for name, value in values:
        if name == "batch":
            request = request.with_option("batch", value)
        elif name == "budget":
            request = replace(request, budget=f"{value:.0f} B")
        else:
            request = replace(request, **{name: value})
    return request


# -- planning


def _planned(
    requests: Sequence[tuple[Values, PlanRequest]], price: float, jobs: int
) -> Iterator[SweepPoint]:
    jobs = min(jobs, len(requests))
    if jobs == 1:
        for values, request in requests:
            yield plan_point(values, request, price)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(plan_point, *request, price) for request in requests]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def plan_point(values: Values, request: PlanRequest, price: float) -> SweepPoint:
    cluster = request.target().cluster
    point = SweepPoint(values, cluster.num_devices)
    try:
        made = make_plan(request)
    except FactoryError:
        raise
    except MemoryBudgetError as error:
        least = error.peak_bytes
        needs = f": needs {format_bytes(least)}" if 0 < least < float("inf") else ""
        return replace(point, problem="does not fit" + needs)
    except AutoparError as error:
        return replace(point, problem="cannot be planned: " + str(error).split("\n")[0])
    plan = made.plan
    rows, tokens = batch_size(plan)
    step_s = plan.estimated_step_s
    million = (tokens or rows) / 1e6
    cost = price * cluster.num_devices * step_s / 3600 / million if million else 0.0
    budget = min(plan.memory_budget_bytes, cluster.spec.memory_bytes)
    return replace(
        point,
        problem=""
        if fits(made)
        else f"does not fit: needs {format_bytes(plan.estimated_peak_bytes)}",
        plan=_plan_text(plan),
        num_stages=plan.num_stages,
        num_micro_batches=plan.num_micro_batches,
        step_s=step_s,
        samples_per_s=rows / step_s,
        tokens_per_s=tokens / step_s,
        peak_bytes=plan.estimated_peak_bytes,
        budget_bytes=budget,
        cost=cost,
        seconds=made.seconds,
    )


def _plan_text(plan: ParallelPlan) -> str:
    shapes = [stage.mesh_shape for stage in plan.stages]
    meshes = ["×".join(map(str, shape)) for shape in dict.fromkeys(shapes)]
    shown = " and ".join(meshes[:3]) + (" …" if len(meshes) > 3 else "")
    return f"{plan.num_stages} stages on {shown}" if plan.num_stages > 1 else f"mesh {shown}"


def _command(arguments: Namespace) -> str:
    parts = [f"autopar sweep {arguments.factory} --cluster {arguments.cluster}"]
    parts += [f"--set {text}" for text in arguments.set]
    for name in (*_PARSERS, "method", "memory", "price_per_hour"):
        if getattr(arguments, name) is not None:
            parts.append(f"--{name.replace('_', '-')} {getattr(arguments, name)}")
    return " ".join(parts)
