"""Two plans side by side: what differs and what it costs, from two `ParallelPlan`s to text.

Arrays with the same difference share a row with their count. Costs are given for both plans with
their ratio, which shows what a decision is worth.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import inf

from autopar.errors import ArgumentError
from autopar.inspect.arrays_text import common_path, tail_of
from autopar.inspect.breakdown import (
    cause_text,
    mesh_plans,
    num_devices,
    rates_of,
    shares_of,
)
from autopar.inspect.explain import cluster_text, costs_text, where_text
from autopar.inspect.lines import WIDTH, elided, mesh_text, number_range, paragraph
from autopar.inspect.module_tree import words_text
from autopar.ir.plan import ParallelPlan, Tensor
from autopar.ir.text import (
    format_bytes,
    format_seconds,
    layer_names,
    name_skeleton,
    table,
)

MOST_ROWS = 30  # of a table
_Row = tuple[str, ...]


def diff(plan_a: ParallelPlan, plan_b: ParallelPlan) -> str:
    """A text that says how two plans differ and what that costs: predicted times, memory and bytes
    sent; mesh, stages and micro-batches; specs and parallelism of arrays; collectives.

    plan_a, plan_b: made or loaded. Plans of different programs are compared too, and the text says
                    so. Anything else is an `ArgumentError`.
    """
    a, b = plan_a, plan_b
    for name, plan in (("plan_a", a), ("plan_b", b)):
        if not isinstance(plan, ParallelPlan):
            raise ArgumentError(
                f"diff({name}={plan!r:.60}): needs a ParallelPlan, from autopar.plan(…) or "
                "ParallelPlan.load(path)."
            )
    lines = [*paragraph(f"a: {where_text(a)}", ""), *paragraph(f"b: {where_text(b)}", "")]
    if _decisions_alone(a) == _decisions_alone(b):
        return "\n".join([*lines, "", "The plans are the same."])
    sections = [
        lines,
        [line for text in _other_program(a, b) for line in paragraph(text, "")],
        _costs(a, b),
        _choices(a, b),
        _specs(a, b),
        _words(a, b),
        _collectives(a, b),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _decisions_alone(plan: ParallelPlan) -> ParallelPlan:
    """The plan without the time that planning took."""
    search = None if plan.search is None else replace(plan.search, seconds={})
    stages = tuple(
        replace(stage, plan=None if stage.plan is None else _decisions_alone(stage.plan))
        for stage in plan.stages
    )
    return replace(plan, solver=replace(plan.solver, seconds={}), search=search, stages=stages)


# -- programs


def _other_program(a: ParallelPlan, b: ParallelPlan) -> list[str]:
    """A sentence if the plans are for different programs. Micro-batches and recomputation rewrite a
    program, so fingerprints only compare plans that agree on these."""
    differences = []
    if a.name != b.name:
        differences.append(f"a plans {a.name}, b plans {b.name}")
    ours, theirs = ({t.path: (t.dtype, t.shape) for t in plan.inputs} for plan in (a, b))
    only = [path for path in (*ours, *theirs) if path not in ours or path not in theirs]
    if only:
        differences.append(f"{len(only)} inputs exist in one only, such as {only[0]}")
    other = [path for path in ours if path in theirs and ours[path] != theirs[path]]
    if other:
        path = other[0]
        texts = (f"{dtype}{list(shape)}" for dtype, shape in (ours[path], theirs[path]))
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        differences.append(f"{path} is {' in a and '.join(texts)} in b{more}")
    rewritten = (a.num_micro_batches, a.remat, a.is_pipeline) != (
        b.num_micro_batches,
        b.remat,
        b.is_pipeline,
    )
    if not differences and not rewritten and a.fingerprint.program != b.fingerprint.program:
        differences.append("their inputs agree, but not their equations")
    if not differences:
        return []
    return [f"These are plans of different programs: {'; '.join(differences)}."]


# -- costs


def _costs(a: ParallelPlan, b: ParallelPlan) -> list[str]:
    rows = []
    if a.is_timed and b.is_timed:
        one, two = shares_of(a), shares_of(b)
        for name in ("step", "compute", "communication", "bubble"):
            rows.append((name, getattr(one, name), getattr(two, name), format_seconds))
    elif a.is_timed == b.is_timed:
        rows.append(("objective", a.solver.objective, b.solver.objective, "{:.6g}".format))
    rows += [
        ("peak memory per device", a.estimated_peak_bytes, b.estimated_peak_bytes, format_bytes),
        ("sent per device", a.communication_bytes, b.communication_bytes, format_bytes),
    ]
    if a.host is not None or b.host is not None:
        held = [0.0 if plan.host is None else plan.host.num_bytes for plan in (a, b)]
        rows.append(("host memory per device", *held, format_bytes))
    rates = rates_of(a), rates_of(b)
    if rates[0] is not None and rates[1] is not None:
        per_s = "{:.3g} TFLOP/s".format
        rows.append(("per device", rates[0].model / 1e12, rates[1].model / 1e12, per_s))
    rows.append(("devices", num_devices(a), num_devices(b), "{:.0f}".format))
    shown = [
        (name, text(x) if x else "-", text(y) if y else "-", f"{y / x:.4g}" if x and y else "-")
        for name, x, y, text in rows
        if x or y
    ]
    return table(("predicted", "a", "b", "b / a"), shown, right=(1, 2, 3), width=WIDTH)


def _choices(a: ParallelPlan, b: ParallelPlan) -> list[str]:
    rows = [
        (name, one, two)
        for (name, one), (_, two) in zip(_choices_of(a), _choices_of(b), strict=True)
        if one != two
    ]
    return [line for row in _limited(rows) for line in _pair(*row)] if rows else []


def _choices_of(plan: ParallelPlan) -> Iterator[tuple[str, str]]:
    yield "method", plan.method
    yield "cluster", cluster_text(plan)
    yield "costs", costs_text(plan) or "from the data sheet"
    axes = zip(plan.axis_names, plan.mesh_shape, strict=True)
    mesh = " × ".join(f"{name}={size}" for name, size in axes)
    yield "mesh", "a pipeline" if plan.is_pipeline else mesh
    yield "stages", _stages(plan)
    yield "micro-batches", str(plan.num_micro_batches)
    yield "schedule", plan.schedule or "none"
    stages = [str(n) for n, stage in enumerate(plan.stages) if stage.remat]
    yield (
        "recomputed",
        layer_names(plan.remat) or (f"stages {', '.join(stages)}" if stages else "nothing"),
    )
    budget = plan.memory_budget_bytes
    yield "memory budget", format_bytes(budget) if budget < inf else "none"
    yield "pins", ", ".join(f"{path} as {spec}" for path, spec in plan.pinned) or "none"


def _stages(plan: ParallelPlan) -> str:
    if not plan.is_pipeline:
        return "1"
    parts = (
        f"layers {number_range(*stage.layers)} on {'×'.join(map(str, stage.submesh))} devices as "
        f"{mesh_text(stage.mesh_shape)}"
        for stage in plan.stages
    )
    return f"{plan.num_stages}: {'; '.join(parts)}"


def _pair(name: str, one: str, two: str) -> list[str]:
    return [f"{name}:", *paragraph(f"a  {one}"), *paragraph(f"b  {two}")]


# -- arrays and modules


def _specs(a: ParallelPlan, b: ParallelPlan) -> list[str]:
    def text(plan: ParallelPlan, tensor: Tensor) -> str:
        stage = f", stage {tensor.stages[0]}" if plan.is_pipeline else ""
        return f"{plan.spec_of(tensor)}{stage}"

    theirs = {t.path: t for t in (*b.inputs, *b.named)}
    pairs = {
        t.path: (text(a, t), text(b, theirs[t.path]))
        for t in (*a.inputs, *a.named)
        if t.path in theirs
    }
    return _table("different specs", pairs)


def _words(a: ParallelPlan, b: ParallelPlan) -> list[str]:
    ours, theirs = _words_of(a), _words_of(b)
    pairs = {path: (words, theirs[path]) for path, words in ours.items() if path in theirs}
    return _table("different parallelism of parameters", pairs)


def _words_of(plan: ParallelPlan) -> dict[str, str]:
    words_of = {}
    for mesh_plan in mesh_plans(plan):
        sizes = dict(zip(mesh_plan.axis_names, mesh_plan.mesh_shape, strict=True))
        for use in mesh_plan.details.parallelism if mesh_plan.details is not None else ():
            words = {axis: {word: 1.0} for axis, word in use.words if sizes.get(axis, 1) > 1}
            words_of[use.path] = words_text(words) or "one device"
    return words_of


def _table(title: str, pairs: dict[str, tuple[str, str]]) -> list[str]:
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for path, (one, two) in pairs.items():
        if one != two:
            groups[name_skeleton(tail_of(path)), one, two].append(path)
    if not groups:
        return []
    rows = [
        (common_path(paths), one, two, str(len(paths))) for (_, one, two), paths in groups.items()
    ]
    count = sum(map(len, groups.values()))
    header = (f"{title} ({count} of {len(pairs)})", "a", "b", "count")
    rows = _limited(rows)
    others = sum(2 + max(map(len, column)) for column in list(zip(header, *rows, strict=True))[1:])
    room = max(WIDTH - 2 - others, 24)
    shown = [(elided(row[0], room), *row[1:]) for row in rows]
    if others + len(header[0]) > WIDTH:
        return [f"{header[0]}:", *table(("path", *header[1:]), shown, width=WIDTH)]
    return table(header, shown, width=WIDTH)


def _limited(rows: list[_Row]) -> list[_Row]:
    if len(rows) <= MOST_ROWS:
        return rows
    left = (f"… {len(rows) - MOST_ROWS} more",)
    return [*rows[:MOST_ROWS], left + ("",) * (len(rows[0]) - 1)]


# -- collectives


def _collectives(a: ParallelPlan, b: ParallelPlan) -> list[str]:
    ours, theirs = _sums(a), _sums(b)
    rows = []
    for key in sorted({*ours, *theirs}, key=lambda k: -abs(theirs[k][2] - ours[k][2])):
        one, two = ours[key], theirs[key]
        if all(abs(x - y) <= 1e-3 * max(x, y) for x, y in zip(one, two, strict=True)):
            continue
        kind, axes, cause = key
        cells = [_sum_text(sums, plan) for sums, plan in ((one, a), (two, b))]
        rows.append((f"{kind}({axes}): {cause}", *cells))
    if not rows:
        return []
    return table(("different collectives", "a", "b"), _limited(rows), width=WIDTH)


def _sum_text(sums: list[float], plan: ParallelPlan) -> str:
    if not sums[0]:
        return "-"
    cost = format_seconds(sums[2]) if plan.is_timed else f"{sums[2]:.6g}"
    return f"{sums[0]:.0f} in {cost}"


def _sums(plan: ParallelPlan) -> dict[tuple[str, str, str], list[float]]:
    """(kind, axes, cause) -> count, bytes and seconds per device, on average."""
    totals: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    devices = num_devices(plan)
    for mesh_plan in mesh_plans(plan):
        share = mesh_plan.num_devices / devices
        for one in mesh_plan.details.collectives if mesh_plan.details is not None else ():
            sums = totals[one.kind, ", ".join(one.axes), cause_text(one)]
            for position, value in enumerate((one.count, one.num_bytes, one.seconds)):
                sums[position] += share * value
    return totals
