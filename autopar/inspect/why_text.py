"""Why an array is sharded as it is, and what pins cost: from a `Why` or a plan to text."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from autopar.ir.plan import ParallelPlan
from autopar.ir.text import (
    format_bytes,
    format_seconds,
    name_pattern,
    name_skeleton,
    table,
)
from autopar.ir.why import Alternative, Neighbour, Why

_MOST_NEIGHBOURS = 16
_GOOD_GAP = 0.005


def explain_why(why: Why) -> str:
    where = "" if why.stage is None else f", in stage {why.stage}"
    names = ", ".join(_patterns(why.paths))
    count = f" ({len(why.paths)} arrays)" if len(why.paths) > 1 else ""
    lines = [
        f"{names}{count}: {why.kind}, {why.array}",
        f"  sharded as {why.spec}: {why.words} (mesh {why.mesh}{where})",
    ]
    if why.reason:
        lines.append(f"  used as {why.reason}")
    if why.pinned:
        lines.append(f"  pinned: {why.pinned}; the costs below ignore this")
    if why.equivalent_paths:
        lines.append(
            f"  equal layers share one decision: {len(why.equivalent_paths)} more arrays move with "
            f"it and are counted below: {', '.join(_patterns(why.equivalent_paths))}"
        )
    if why.neighbours:
        lines += ["", *_neighbour_lines(why)]
    if why.alternatives:
        lines += ["", *_alternative_lines(why)]
    lines += [f"note: {note}" for note in why.notes]
    return "\n".join(lines)


def pin_lines(plan: ParallelPlan) -> list[str]:
    """The pins of `with_pins` and what they cost."""
    if not plan.pinned:
        return []
    lines = [f"pinned by with_pins: {pattern} as {spec}" for pattern, spec in plan.pinned]
    before_s = plan.unpinned_step_s
    if before_s is not None:
        lines.append(f"pins cost {_difference(plan.estimated_step_s, before_s, plan.is_timed)}")
    return lines


def _patterns(paths: Sequence[str]) -> list[str]:
    """Paths that differ only in numbers are one pattern."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(name_skeleton(path), []).append(path)
    return [name_pattern(group) for group in groups.values()]


def _seconds(value: float, is_timed: bool) -> str:
    return format_seconds(value) if is_timed else f"{value:.6g}"


def _difference(value: float, base: float, is_timed: bool) -> str:
    gap = value - base
    if abs(gap) <= 1e-9 * max(abs(base), 1e-30):
        return "nothing"
    share = f" ({gap / base:+.1%})" if base else ""
    return f"{'+' if gap > 0 else '−'}{_seconds(abs(gap), is_timed)}{share}"


# -- neighbours


def _neighbour_lines(why: Why) -> list[str]:
    shown = why.neighbours[:_MOST_NEIGHBOURS]
    rows = [_neighbour_row(n, why.is_timed) for n in shown]
    header = ("neighbour", "module", "layout", "resharded by", "cost", "strategy")
    lines = ["neighbours:", *table(header, rows)]
    if len(why.neighbours) > len(shown):
        lines.append(f"  … and {len(why.neighbours) - len(shown)} more")
    return lines


def _neighbour_row(n: Neighbour, is_timed: bool) -> tuple[str, ...]:
    runs = f", {n.runs:g}×" if n.runs > 1 else ""
    where = f"{n.module} ({n.region}{runs})" if n.module else f"({n.region}{runs})"
    moved = " then ".join(n.steps) or "−"
    cost = _seconds(n.seconds, is_timed) if n.seconds else "−"
    return (f"{n.role} {n.operator}", where, n.layout, moved, cost, n.strategy)


# -- alternatives


def _alternative_lines(why: Why) -> list[str]:
    chosen = next((a for a in why.alternatives if a.is_chosen), None)
    base_s = why.step_s if chosen is None or chosen.step_s == inf else chosen.step_s
    what = "stage" if why.stage is not None else "step"
    header = ("layout", "producer", "resharding", what, "difference", "peak", "changes")
    rows = [_alternative_row(a, base_s, why) for a in why.alternatives]
    lines = [
        f"alternative layouts, each with the best {what} that has it:",
        *table(header, rows),
    ]
    if any(a.is_bound for a in why.alternatives):
        lines.append("  ≥: lower bound; not solved")
    if chosen is not None and chosen.step_s < why.step_s * (1 - 1e-6):
        lines.append(
            f"  the plan takes {_seconds(why.step_s, why.is_timed)}: it was solved with other "
            "constraints, or the solver hit its time limit"
        )
    return lines


def _alternative_row(a: Alternative, base_s: float, why: Why) -> tuple[str, ...]:
    mark = "→ " if a.is_chosen else "  "
    if a.step_s == inf:
        return (mark + a.spec, "", "", "none", "", "", "infeasible")
    timed = why.is_timed
    if a.is_bound:
        least = _seconds(a.step_s, timed)
        return (mark + a.spec, "", "", f"≥ {least}", "", "", "")
    gap = "" if a.is_chosen else _difference(a.step_s, base_s, timed)
    changes = ", ".join(f"{n:+d} {kind}" for kind, n in a.changes)
    if not a.fits:
        changes = f"exceeds the budget of {format_bytes(why.budget_bytes)}; {changes}"
    return (
        mark + a.spec,
        _seconds(a.producer_s, timed),
        _seconds(a.reshard_s, timed),
        _seconds(a.step_s, timed) + (f" (gap {a.gap:.1%})" if a.gap > _GOOD_GAP else ""),
        "chosen" if a.is_chosen else "equal" if gap == "nothing" else gap,
        format_bytes(a.peak_bytes),
        changes,
    )
