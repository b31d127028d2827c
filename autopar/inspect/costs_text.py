"""Collectives and memory of a plan as text, the worst first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from autopar.inspect.breakdown import cause_text, is_array_type, mesh_plans, num_devices
from autopar.inspect.lines import WIDTH, elided, number_runs, paragraph
from autopar.ir.details import (
    MEMORY_CATEGORIES,
    CollectiveCost,
    MemoryUse,
)
from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_bytes, name_pattern, name_skeleton, table

MOST_CAUSES = 8  # groups of collectives that are listed with their places
MOST_PLACES = 3  # per group
MOST_ARRAYS = 6


@dataclass
class _Sum:
    count: float = 0.0
    num_bytes: float = 0.0
    seconds: float = 0.0

    def add(self, one: CollectiveCost, share: float) -> None:
        self.count += one.count * share
        self.num_bytes += one.num_bytes * share
        self.seconds += one.seconds * share


def collective_lines(plan: ParallelPlan, cost: Callable[[float], str]) -> list[str]:
    """By kind, axes and cause; per device, averaged over the devices of a pipeline."""
    devices = num_devices(plan)
    sums: dict[tuple[str, ...], _Sum] = defaultdict(_Sum)
    places: dict[tuple[str, ...], dict[tuple[str, ...], _Sum]] = defaultdict(dict)
    names: dict[tuple[str, ...], list[CollectiveCost]] = defaultdict(list)
    for mesh_plan in mesh_plans(plan):
        share = mesh_plan.num_devices / devices
        for one in mesh_plan.details.collectives if mesh_plan.details is not None else ():
            key = (one.kind, " and ".join(one.axes), cause_text(one))
            sums[key].add(one, share)
            place = (
                one.region,
                *map(name_skeleton, (one.value, one.producer, one.consumer)),
                one.before,
                one.after,
            )
            places[key].setdefault(place, _Sum()).add(one, share)
            names[*key, *place].append(one)
    if not sums:
        return []
    ordered = sorted(sums, key=lambda key: -sums[key].seconds)
    whole = sum(group.seconds for group in sums.values()) or 1.0
    rows = []
    for rank, key in enumerate(ordered):
        kind, along, cause = key
        group = sums[key]
        share = f"{group.seconds / whole:.0%}"
        costs = (format_bytes(group.num_bytes), cost(group.seconds), share)
        rows.append((f"{kind} along {along}: {cause}", _count(group.count), *costs))
        if rank >= MOST_CAUSES:
            continue
        inner = sorted(places[key].items(), key=lambda item: -item[1].seconds)
        for place, part in inner[:MOST_PLACES]:
            rows.append(
                (_place(names[*key, *place]), _count(part.count), "", cost(part.seconds), "")
            )
        left = inner[MOST_PLACES:]
        if left:
            seconds = sum(part.seconds for _, part in left)
            count = sum(part.count for _, part in left)
            rows.append((f"  … {len(left)} more", _count(count), "", cost(seconds), ""))
    header = ("collectives, worst first", "count", "sent", "time", "share")
    room = WIDTH - 2 - sum(2 + max(map(len, c)) for c in list(zip(header, *rows, strict=True))[1:])
    fitted = [(_shortened(row[0], room), *row[1:]) for row in rows]
    return table(header, fitted, right=(1, 2, 3, 4), width=WIDTH)


def _count(count: float) -> str:
    """An average over devices may be below one."""
    return f"{count:.0f}" if count >= 1 else "< 1"


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _place(collectives: list[CollectiveCost]) -> str:
    """`  gradient of state.w`, or `  bfloat16[4,8] from dot_general of GPT/head`."""
    value, producer = (
        name_pattern(list(dict.fromkeys(getattr(one, name) for one in collectives)))
        for name in ("value", "producer")
    )
    if not is_array_type(value):  # a parameter, or its gradient
        return f"  {elided(value, 58)}"
    return f"  {value} from {elided(producer, 56 - len(value))}"


# -- memory


def memory_line(plan: ParallelPlan) -> list[str]:
    """What the fullest device holds at its peak, in a sentence."""
    uses = [
        (mesh_plan.details.memory, number)
        for number, mesh_plan in enumerate(mesh_plans(plan))
        if mesh_plan.details is not None and mesh_plan.details.memory is not None
    ]
    if not uses:
        return []
    use, number = max(uses, key=lambda pair: sum(pair[0].at_peak))
    named = zip(MEMORY_CATEGORIES, use.at_peak, strict=True)
    parts = sorted(((name, size) for name, size in named if size), key=lambda part: -part[1])
    whole = sum(use.at_peak)
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size > 0.01 * whole)
    where = f" of stage {number}" if plan.is_pipeline else ""
    return paragraph(f"memory at the peak{where}: {text}", "")


def memory_lines(plan: ParallelPlan) -> list[str]:
    """By category at the peak, with a column per kind of stage, and the largest arrays of the
    fullest stage."""
    stages: dict[MemoryUse, list[int]] = defaultdict(list)
    plans = mesh_plans(plan)
    for number, mesh_plan in enumerate(plans):
        if mesh_plan.details is not None and mesh_plan.details.memory is not None:
            stages[mesh_plan.details.memory].append(number)
    if not stages:
        return []
    columns = list(stages.items())
    if len(columns) > 6:  # show the fullest
        columns = sorted(columns, key=lambda item: -sum(item[0].at_peak))[:6]
        columns.sort(key=lambda item: item[1])
    rows = []
    for number, category in enumerate(MEMORY_CATEGORIES):
        cells = [use.at_peak[number] for use, _ in columns]
        if any(cells):
            rows.append((category, *(format_bytes(size) if size else "-" for size in cells)))
    rows.append(("peak", *(format_bytes(sum(use.at_peak)) for use, _ in columns)))
    budgets = [plans[numbers[0]].memory_budget_bytes for _, numbers in columns]
    if any(budget < inf for budget in budgets):
        texts = (format_bytes(b) if b < inf else "-" for b in budgets)
        rows.append(("budget", *texts))
    if plan.host is not None:
        rows.append(("in host memory", *(format_bytes(plan.host.num_bytes) for _ in columns)))
    names = [
        ("per device" if len(plans) == 1 else f"stage {number_runs(numbers)}")
        for _, numbers in columns
    ]
    header = ("memory at the peak", *names)
    lines = table(header, rows, right=range(1, len(header)), width=WIDTH)
    fullest, numbers = max(stages.items(), key=lambda item: sum(item[0].at_peak))
    where = "" if len(plans) == 1 else f" of stage {numbers[0]}"
    lines.append(f"  largest arrays{where} at the peak:")
    groups: dict[tuple[str, float, str], list[str]] = defaultdict(list)
    for array in fullest.largest:
        groups[name_skeleton(array.what), array.num_bytes, array.category].append(array.what)
    for (_, size, category), members in list(groups.items())[:MOST_ARRAYS]:
        many = f"{len(members)} × " if len(members) > 1 else ""
        text = f"    {many}{format_bytes(size)} {name_pattern(members)}"
        lines.append(f"{_shortened(text, WIDTH - len(category) - 3)} ({category})")
    return lines
