"""The page of a sweep: from a `Sweep` to one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from autopar.inspect.plots import PlotMark, Series, line_plot
from autopar.inspect.report_page.page import page_style
from autopar.inspect.sweep_text import (
    conclusions,
    cost_text,
    header_of,
    name_text,
    row_of,
    value_text,
    where,
)
from autopar.ir.sweep import Sweep, SweepPoint
from autopar.ir.text import format_bytes, format_seconds

# On top of the report page's style, whose themes and series colours it uses.
_STYLE = """
:root { --series-0: var(--c0); --series-1: var(--c3); --series-2: var(--c2); --series-3: var(--c6);
  --series-4: var(--c4); --series-5: var(--c5); --series-dashed: var(--c7); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr));
  gap: 12px; } figure { margin: 0; padding: 10px 14px; background: var(--panel);
  border: 1px solid var(--line); border-radius: 10px; min-width: 0; }
figure h2 { font-size: 1rem; } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; } svg text.title { fill: var(--ink); }
svg .grid { stroke: var(--line); } svg .line { fill: none; stroke: var(--own); stroke-width: 2; }
svg circle { fill: var(--own); } svg .cross { stroke: var(--own); stroke-width: 2.5; fill: none; }
th, td { text-align: right; white-space: nowrap; } tr.misfit td { color: var(--soft); }
"""


_TIMES = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
_SIZES = {"GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10}


def sweep_page(sweep: Sweep) -> str:
    names = [name for name in sweep.varied if len({p.value(name) for p in sweep.points}) > 1]
    title = "Sweep over " + " and ".join(map(name_text, names or sweep.varied))
    lines = (
        "".join(f"<li>{escape(line)}</li>" for line in conclusions(sweep)) if sweep.fitting else ""
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{page_style()}{_STYLE}</style></head><body>
<header class="top"><div class="bar"><span class="brand">autopar</span></div></header>
<main>
<h1>{escape(title)}</h1>
<p class="soft">One train step, planned for {escape(sweep.device)}. All values are predictions of a
cost model; nothing was run. <code>{escape(sweep.command)}</code></p>
<div class="box"><ul>{lines or "<li>No plan fits.</li>"}</ul></div>
{_legend(sweep)}
<div class="plots">{"".join(_plots(sweep))}</div>
<section><div class="scroll">
<table><thead><tr>{_cells("th", header_of(sweep))}</tr></thead><tbody>
{"".join(_row(sweep, point) for point in sweep.points)}</tbody></table></div></section>
</main></body></html>
"""


def _plots(sweep: Sweep) -> list[str]:
    unit = sweep.unit
    plots = [
        _plot(sweep, f"{unit} per second", lambda p: p.per_s, _short),
        _plot(sweep, "step time", lambda p: p.step_s, format_seconds, _TIMES),
        _plot(sweep, "peak memory per device", lambda p: p.peak_bytes, format_bytes, _SIZES),
    ]
    if sweep.price_per_hour:
        title = f"cost per million {unit}"
        plots.append(_plot(sweep, title, lambda p: p.cost, cost_text))
    else:
        title = f"{unit} per second and device"
        plots.append(_plot(sweep, title, lambda p: p.per_s / p.num_devices, _short))
    return plots


def _plot(
    sweep: Sweep,
    title: str,
    value: Callable[[SweepPoint], float],
    text: Callable[[float], str],
    units: dict[str, float] | None = None,
) -> str:
    """`units`: for the axis, the largest first."""
    axis = _axis(sweep)
    places = list(dict.fromkeys(point.value(axis) for point in sweep.points))
    most = max((value(p) for p in sweep.fitting), default=1.0)
    unit, size = next((u for u in (units or {}).items() if most >= u[1]), ("", 1.0))
    series = []
    for name, points in _groups(sweep):
        marks = tuple(
            PlotMark(
                places.index(p.value(axis)),
                value(p) / size if p.fits else None,
                f"{where(p)}: {text(value(p)) if p.fits else p.problem}",
            )
            for p in points
        )
        series.append(Series(name, marks))
    caption = title + (f", {unit}" if unit else "")
    guides = _guides(sweep, title, places, size)
    if guides:
        caption += f" (dashed: {guides[0].name})"
    labels = [value_text(axis, place) for place in places]
    drawn = line_plot(
        [*series, *guides], labels, x_title=name_text(axis), y_title=title, y_text=_short
    )
    return f"<figure><h2>{escape(caption)}</h2>{drawn}</figure>"


def _guides(sweep: Sweep, title: str, places: list, size: float) -> list[Series]:
    """Dashed lines: linear scaling of throughput, and the memory limit."""
    axis, guides = _axis(sweep), []
    for _, points in _groups(sweep):
        known = [p for p in points if p.fits]
        if len(known) < 2:
            continue
        if title.endswith("per second") and axis == "devices":
            each = known[0].per_s / known[0].num_devices
            values = [each * p.num_devices for p in known]
            name = "linear scaling"
        elif title.startswith("peak memory") and max(p.peak_bytes for p in known) > 0.3 * max(
            p.budget_bytes for p in known
        ):
            values, name = [p.budget_bytes / size for p in known], "memory limit"
        else:
            continue
        marks = [
            PlotMark(places.index(p.value(axis)), y, "") for p, y in zip(known, values, strict=True)
        ]
        guides.append(Series(name, tuple(marks), dashed=True))
    return guides


def _axis(sweep: Sweep) -> str:
    """The first name with several values."""
    for name in sweep.varied:
        if len({point.value(name) for point in sweep.points}) > 1:
            return name
    return sweep.varied[0]


def _groups(sweep: Sweep) -> list[tuple[str, list[SweepPoint]]]:
    """Points by the other varied values."""
    axis = _axis(sweep)
    groups: dict[str, list[SweepPoint]] = {}
    for point in sweep.points:
        others = [(name, value) for name, value in point.values if name != axis]
        key = ", ".join(f"{name_text(name)} {value_text(name, value)}" for name, value in others)
        groups.setdefault(key, []).append(point)
    return list(groups.items())


def _legend(sweep: Sweep) -> str:
    groups = _groups(sweep)
    if len(groups) < 2:
        return ""
    keys = [
        f'<li><i style="background: var(--series-{k % 6})"></i>{escape(name)}</li>'
        for k, (name, _) in enumerate(groups)
    ]
    return f'<ul class="legend">{"".join(keys)}</ul>'


def _cells(tag: str, cells: tuple[str, ...]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


def _row(sweep: Sweep, point: SweepPoint) -> str:
    kind = "" if point.fits else ' class="misfit"'
    return f"<tr{kind}>{_cells('td', row_of(sweep, point))}</tr>\n"


def _short(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:g}{unit}" if value % size == 0 else f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
