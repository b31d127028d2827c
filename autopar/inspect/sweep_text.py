"""A sweep on the terminal: from a `Sweep` to a table, bars and conclusions."""

from __future__ import annotations

from autopar.ir.sweep import Sweep, SweepPoint
from autopar.ir.text import format_bytes, format_seconds, table

_BAR_WIDTH = 50
_PROBLEM_WIDTH = 60


def sweep_text(sweep: Sweep) -> str:
    parts = [_table(sweep)]
    if sweep.fitting:
        parts += [_bars(sweep), "\n".join(conclusions(sweep))]
    else:
        parts.append("No plan fits.")
    return "\n\n".join(parts)


def value_text(name: str, value: int | float | str) -> str:
    return format_bytes(float(value)) if name == "budget" else str(value)


def name_text(name: str) -> str:
    return name.replace("_", "-")


def cost_text(cost: float) -> str:
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.3g}"


def header_of(sweep: Sweep) -> tuple[str, ...]:
    priced = (f"cost per million {sweep.unit}",) if sweep.price_per_hour else ()
    columns = (
        "plan",
        "micro-batches",
        "step",
        f"{sweep.unit}/s",
        "per device",
        "peak",
        "of memory",
    )
    return (*map(name_text, sweep.varied), *columns, *priced)


def row_of(sweep: Sweep, point: SweepPoint) -> tuple[str, ...]:
    values = tuple(value_text(name, value) for name, value in point.values)
    if not point.step_s:
        blanks = ("",) * (len(header_of(sweep)) - len(values) - 1)
        return (*values, _cut(point.problem), *blanks)
    priced = (cost_text(point.cost),) if sweep.price_per_hour else ()
    share = point.peak_bytes / point.budget_bytes if point.budget_bytes else 0.0
    return (
        *values,
        point.plan if point.fits else f"{point.plan} (does not fit)",
        str(point.num_micro_batches),
        format_seconds(point.step_s),
        f"{point.per_s:,.0f}",
        f"{point.per_s / point.num_devices:,.1f}",
        format_bytes(point.peak_bytes),
        f"{share:.0%}",
        *priced,
    )


def conclusions(sweep: Sweep) -> list[str]:
    """The conclusions, in sentences."""
    fitting, unit = sweep.fitting, sweep.unit
    fastest = max(fitting, key=lambda p: p.per_s)
    lines = [f"fastest: {where(fastest)}, {fastest.per_s:,.0f} {unit}/s."]
    efficient = max(fitting, key=lambda p: p.per_s / p.num_devices)
    lines.append(
        f"most efficient: {where(efficient)}, "
        f"{efficient.per_s / efficient.num_devices:,.1f} {unit}/s per device."
    )
    if sweep.price_per_hour:
        cheapest = min(fitting, key=lambda p: p.cost)
        lines.append(
            f"cheapest: {where(cheapest)}, {cost_text(cheapest.cost)} per million {unit} at "
            f"{sweep.price_per_hour:g} per device-hour."
        )
    failed = [point for point in sweep.points if not point.fits]
    if failed:
        lines.append("no fitting plan: " + "; ".join(map(where, failed)) + ".")
    return lines


def where(point: SweepPoint) -> str:
    return ", ".join(f"{name_text(name)} {value_text(name, value)}" for name, value in point.values)


def _table(sweep: Sweep) -> str:
    return "\n".join(table(header_of(sweep), [row_of(sweep, p) for p in sweep.points]))


def _bars(sweep: Sweep) -> str:
    most = max(point.per_s for point in sweep.fitting)
    names = [
        " / ".join(value_text(name, value) for name, value in point.values)
        for point in sweep.points
    ]
    width = max(map(len, names))
    title = " / ".join(map(name_text, sweep.varied))
    lines = [f"{sweep.unit}/s by {title}:"]
    for name, point in zip(names, sweep.points, strict=True):
        bar = "#" * max(1, round(_BAR_WIDTH * point.per_s / most)) if point.fits else ""
        label = (
            f"{point.per_s:,.0f}" if point.fits else "does not fit" if point.step_s else "no plan"
        )
        lines.append(f"  {name.rjust(width)} |{bar} {label}")
    return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= _PROBLEM_WIDTH else text[: _PROBLEM_WIDTH - 1] + "…"
