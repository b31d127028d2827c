"""The charts of a page: timelines, memory, collectives and time, from plans to JSON values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from autopar.inspect.breakdown import mesh_plans, mesh_shares
from autopar.inspect.report_page.encode import Texts, run_text, short, shorts
from autopar.ir.details import MEMORY_CATEGORIES, CollectiveCost, MemoryUse
from autopar.ir.plan import ParallelPlan
from autopar.ir.text import format_seconds, name_pattern, name_skeleton
from autopar.ir.timeline import Event, Timeline

MOST_EVENTS = 60_000  # of one timeline, about 2 MB
TICKS = 10**7  # a timeline's length in whole numbers
MEMORY_POINTS = 300  # of a line over the whole step, about
MEMORY_STEPS = 5000  # the height of a memory chart in whole numbers


# -- timelines


def timeline_data(timeline: Timeline, texts: Texts) -> dict[str, Any]:
    """Events by mesh and start, as columns. A start is relative to the previous one on its mesh;
    starts and lengths are in units of `tick_s`. `kinds`: all but the times of an event."""
    last_s = max((event.end_s for event in timeline.events), default=0.0)
    length_s = max(timeline.step_s, last_s)
    tick_s = length_s / TICKS if length_s else 1.0
    kinds: dict[tuple[Any, ...], int] = {}
    counts = [0] * timeline.num_meshes
    columns: tuple[list[int], ...] = ([], [], [], [])
    before: dict[int, int] = defaultdict(int)
    events, left_out = _few_enough(timeline)
    for event in sorted(events, key=lambda e: (e.mesh, e.start_s, e.end_s)):
        counts[event.mesh] += 1
        start = round(event.start_s / tick_s)
        kind = kinds.setdefault(_kind(event, texts), len(kinds))
        micro_batch = -1 if event.micro_batch is None else event.micro_batch
        row = (kind, micro_batch, start - before[event.mesh], round(event.end_s / tick_s) - start)
        for column, value in zip(columns, row, strict=True):
            column.append(value)
        before[event.mesh] = start
    return {
        "step_s": short(timeline.step_s, 6),
        "length_s": short(length_s, 6),
        "tick_s": tick_s,
        "counts": counts,
        "kinds": [list(kind) for kind in kinds],
        "events": list(columns),
        "busy_s": shorts(timeline.busy_s()),
        "bubble": short(timeline.bubble),
        "memory": [_line(points, tick_s) for points in timeline.memory],
        "left_out": left_out,
    }


def _few_enough(timeline: Timeline) -> tuple[Sequence[Event], str]:
    """The events that fit on a page, and a sentence about the rest. Transfers are dropped first,
    then late events: a long step repeats itself."""
    events: Sequence[Event] = timeline.events
    if len(events) <= MOST_EVENTS:
        return events, ""
    total = len(events)
    left_out = f"Transfers are not drawn: the step has {total:,} events."
    events = [event for event in events if event.kind not in ("send", "recv")]
    if len(events) > MOST_EVENTS:
        events = sorted(events, key=lambda event: event.start_s)
        end_s = events[MOST_EVENTS].start_s
        events = events[:MOST_EVENTS]
        left_out = f"Only runs up to {format_seconds(end_s)} are drawn, of {total:,} events."
    return events, left_out


def _line(points: tuple[tuple[float, float], ...], tick_s: float) -> list[list[float | None]]:
    """[ticks, bytes from then on]. A long line keeps the first and highest point of each span."""
    kept = points
    if len(points) > MEMORY_POINTS:
        size = -(-2 * len(points) // MEMORY_POINTS)
        spans = [points[at : at + size] for at in range(0, len(points), size)]
        highest = [max(span, key=lambda point: point[1]) for span in spans]
        pairs = zip(spans, highest, strict=True)
        kept = tuple(p for span, top in pairs for p in dict.fromkeys((span[0], top)))
    return [[round(at / tick_s) for at, _ in kept], shorts(held for _, held in kept)]


def _kind(event: Event, texts: Texts) -> tuple[Any, ...]:
    names = (event.kind, event.phase, event.name)
    return (*map(texts.number, names), event.stage, short(event.num_bytes))


# -- memory


def memory_data(plan: ParallelPlan, texts: Texts) -> dict[str, Any] | None:
    """Stages with equal memory use share a chart; `of` has the chart's number per stage."""
    charts: dict[MemoryUse, int] = {}
    of = []
    for mesh_plan in mesh_plans(plan):
        memory = mesh_plan.details.memory if mesh_plan.details is not None else None
        of.append(None if memory is None else charts.setdefault(memory, len(charts)))
    if not charts:
        return None
    return {
        "categories": list(MEMORY_CATEGORIES),
        "of": of,
        "charts": [_memory_chart(use, texts) for use in charts],
    }


def _memory_chart(use: MemoryUse, texts: Texts) -> dict[str, Any]:
    highest = max((*map(sum, use.held), sum(use.at_peak)), default=0.0) or 1.0
    unit = highest / MEMORY_STEPS
    columns = [[round(value / unit) for value in column] for column in zip(*use.held, strict=True)]
    return {
        "unit": short(unit, 6),
        "seconds": shorts(use.seconds),
        "held": [column[:1] if len(set(column)) == 1 else column for column in columns],
        "at_peak": shorts(use.at_peak),
        "peak_s": short(use.peak_s),
        "largest": [
            [
                texts.number(a.what),
                texts.number(a.module),
                texts.number(a.category),
                short(a.num_bytes),
            ]
            for a in use.largest
        ],
    }


# -- collectives


def collective_data(plan: ParallelPlan, texts: Texts) -> dict[str, Any]:
    """`rows`: per device of the stages named, equal layers folded. `totals`: by kind, axes and
    cause, per device, averaged over all devices."""
    devices = sum(mesh_plan.num_devices for mesh_plan in mesh_plans(plan)) or 1
    totals: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    merged: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for stage, mesh_plan in enumerate(mesh_plans(plan)):
        collectives = mesh_plan.details.collectives if mesh_plan.details is not None else ()
        share = mesh_plan.num_devices / devices
        for one in collectives:
            sums = totals[one.kind, ", ".join(one.axes), one.cause]
            for position, value in enumerate((one.count, one.num_bytes, one.seconds)):
                sums[position] += value * share
        for row in _folded(collectives):
            merged[row].append(stage)
    return {
        "totals": [[*key, *shorts(sums)] for key, sums in totals.items()],
        "rows": [
            [
                *(texts.number(v) if isinstance(v, str) else v for v in row),
                texts.number(run_text(stages)),
            ]
            for row, stages in merged.items()
        ],
    }


def _folded(collectives: tuple[CollectiveCost, ...]) -> list[tuple[Any, ...]]:
    """Rows of texts, then count, bytes, seconds and number of places."""
    groups: dict[tuple[str, ...], list[CollectiveCost]] = defaultdict(list)
    for one in collectives:
        places = (one.module, one.value, one.producer, one.consumer)
        exact = (one.kind, ", ".join(one.axes), one.cause, one.region, one.before, one.after)
        groups[*exact, *map(name_skeleton, places)].append(one)
    rows = []
    for key, members in groups.items():
        patterns = [
            name_pattern([getattr(one, name) for one in members])
            for name in ("module", "value", "producer", "consumer")
        ]
        sums = (
            sum(one.count for one in members),
            short(sum(one.num_bytes for one in members)),
            short(sum(one.seconds for one in members)),
            len(members),
        )
        rows.append((*key[:6], *patterns, *sums))
    return rows


# -- where the time goes

PARTS = (
    "forward", "backward", "update", "communication", "host memory", "launch overhead", "bubble",
)  # fmt: skip


def breakdown(plan: ParallelPlan) -> dict[str, Any]:
    """Seconds of a step by mesh, in the order of `PARTS`."""
    stages: dict[int, list[int]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        stages[stage.mesh].append(number)
    rows = []
    for mesh, share in zip(sorted(stages), mesh_shares(plan), strict=True):
        spent = dict.fromkeys(PARTS, 0.0)
        for number in stages[mesh]:
            for cost in (plan.stages[number].plan or plan).modules:
                part = cost.region if cost.region in PARTS[:3] else "forward"
                spent[part] += cost.compute_s
                spent["communication"] += cost.communication_s
        spent["launch overhead"], spent["bubble"] = share.launch, share.bubble
        spent["host memory"] = share.host
        rows.append({"stages": run_text(stages[mesh]), "seconds": shorts(spent[p] for p in PARTS)})
    return {"parts": list(PARTS), "meshes": rows, "step_s": short(plan.estimated_step_s)}
