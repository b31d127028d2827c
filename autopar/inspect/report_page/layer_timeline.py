"""A step on one mesh by layer and collective: from the operators of a plan to a `Timeline`.

The cost model adds up compute and communication, so a layer's collectives follow its operators.
Operators of one layer and pass that stand together are one event, their collectives another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby

from autopar.ir.details import OpRow
from autopar.ir.plan import ParallelPlan
from autopar.ir.text import name_skeleton
from autopar.ir.timeline import Event, Timeline

MOST_EVENTS = 4000
PER_MICRO_BATCH = ("forward", "backward")
COLLECTIVE = "collective"  # events of this kind are drawn below the others

_Part = tuple[str, str, float, float, float]  # layer, region, compute, communication, bytes


def layer_timeline(plan: ParallelPlan, coarse: Timeline) -> Timeline:
    """`coarse`: the same step by pass, which is returned for a pipeline, for a plan without
    operators, or where there would be too many events."""
    if plan.is_pipeline or plan.details is None or not plan.is_timed:
        return coarse
    parts = list(_parts(plan))
    total = sum(compute + communication for _, _, compute, communication, _ in parts)
    number = plan.num_micro_batches
    if not total or 2 * len(parts) * number > MOST_EVENTS:
        return coarse
    scale = plan.estimated_step_s / total
    kinds = _collectives(plan)
    events: list[Event] = []
    now = 0.0

    def add(kind: str, name: str, micro_batch: int | None, took_s: float, region: str, size: float):
        nonlocal now
        if took_s > 0:
            events.append(
                Event(0, kind, name, 0, micro_batch, now, now + took_s, region, num_bytes=size)
            )
            now += took_s

    looped = [part for part in parts if part[1] in PER_MICRO_BATCH]
    once = [part for part in parts if part[1] not in PER_MICRO_BATCH]
    rounds = [(part, n if number > 1 else None) for n in range(number) for part in looped]
    for (layer, region, compute, communication, size), micro_batch in (
        *rounds,
        *((part, None) for part in once),
    ):
        share = scale / number if region in PER_MICRO_BATCH else scale
        add("run", layer, micro_batch, compute * share, region, 0.0)
        what = kinds.get((layer, region), "collectives")
        add(COLLECTIVE, f"{what} in {layer}", micro_batch, communication * share, "", size)
    return Timeline(tuple(events), plan.estimated_step_s, 1, coarse.memory)


def _parts(plan: ParallelPlan) -> Iterator[_Part]:
    """Runs of operators of one layer and region, in program order."""
    assert plan.details is not None
    depth = _layer_depth(plan)
    rows = [row for row in plan.details.ops.rows() if row.compute_s or row.communication_s]
    rows.sort(key=lambda row: _ORDER.get(row.region, 1))  # passes in order, else as they stand
    for (layer, region), group in groupby(rows, key=lambda row: (_layer(row, depth), row.region)):
        members = list(group)
        yield (
            layer,
            region,
            sum(row.compute_s for row in members),
            sum(row.communication_s for row in members),
            sum(row.communication_bytes for row in members),
        )


_ORDER = {"forward": 0, "backward": 1, "update": 2}


def _layer(row: OpRow, depth: int) -> str:
    return "/".join(row.module.split("/")[:depth]) or row.region or "other"


def _layer_depth(plan: ParallelPlan) -> int:
    """The first level at which modules repeat (`GPT/layer_0`, `GPT/layer_1`), else the second."""
    assert plan.details is not None
    names = {row.module for row in plan.details.ops.rows() if row.module}
    for depth in (1, 2, 3):
        found = {"/".join(name.split("/")[:depth]) for name in names}
        if len({name_skeleton(name) for name in found}) < len(found):
            return depth
    return 2


def _collectives(plan: ParallelPlan) -> dict[tuple[str, str], str]:
    """(layer, region) -> the kind that takes most of its communication, with its axes."""
    assert plan.details is not None
    depth = _layer_depth(plan)
    seconds: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in plan.details.collectives:
        layer = "/".join(one.module.split("/")[:depth]) or one.region or "other"
        seconds[layer, one.region][f"{one.kind} along {' and '.join(one.axes)}"] += one.seconds
    return {place: max(kinds, key=kinds.__getitem__) for place, kinds in seconds.items()}
