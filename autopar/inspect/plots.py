"""Plots as inline SVG: from series of points to text.

Colours are the page's CSS variables, so plots follow its light or dark scheme. Hovering over a
point shows its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 460, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 46
NUM_COLOURS = 6  # --series-0 … of the page


@dataclass(frozen=True)
class PlotMark:
    """A point of a series; None for `y` draws a cross."""

    x: int  # position among the plot's labels
    y: float | None
    title: str


@dataclass(frozen=True)
class Series:
    name: str
    marks: tuple[PlotMark, ...]
    dashed: bool = False


def line_plot(
    series: Sequence[Series],
    labels: Sequence[str],
    *,
    x_title: str,
    y_title: str,
    y_text: Callable[[float], str],
) -> str:
    """Labels are evenly spaced; y starts at zero."""
    known = [mark.y for one in series for mark in one.marks if mark.y is not None]
    ticks = nice_ticks(max(known, default=1.0))
    scale = (HEIGHT - _TOP - _BOTTOM) / ticks[-1]

    def across(x: int) -> float:
        room = WIDTH - _LEFT - _RIGHT
        return _LEFT + room * (x + 0.5) / len(labels)

    def up(y: float) -> float:
        return HEIGHT - _BOTTOM - y * scale

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_title)} by '
        f'{escape(x_title)}">'
    ]
    for tick in ticks:
        y = up(tick)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(y_text(tick))}</text>'
        )
    for x, label in enumerate(labels):
        parts.append(
            f'<text x="{across(x):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )
    parts.append(
        f'<text class="title" x="{(WIDTH + _LEFT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x_title)}</text>"
    )
    for number, one in enumerate(series):
        parts += _drawn(one, number % NUM_COLOURS, across, up)
    parts.append("</svg>")
    return "\n".join(parts)


def _drawn(
    one: Series, colour: int, across: Callable[[int], float], up: Callable[[float], float]
) -> list[str]:
    style = "--own: var(--series-dashed)" if one.dashed else f"--own: var(--series-{colour})"
    parts = [f'<g style="{style}">']
    runs: list[list[PlotMark]] = [[]]
    for mark in one.marks:
        if mark.y is None:
            runs.append([])
        else:
            runs[-1].append(mark)
    for run in runs:
        if len(run) > 1:
            points = " ".join(f"{across(m.x):.1f},{up(m.y or 0.0):.1f}" for m in run)
            dashes = ' stroke-dasharray="4 4"' if one.dashed else ""
            parts.append(f'<polyline class="line" points="{points}"{dashes}/>')
    for mark in one.marks:
        x = across(mark.x)
        title = f"<title>{escape(mark.title)}</title>"
        if mark.y is None:
            y = up(0.0) - 7
            path = f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
            parts.append(f'<path class="cross" d="{path}">{title}</path>')
        elif not one.dashed:
            parts.append(f'<circle cx="{x:.1f}" cy="{up(mark.y):.1f}" r="4">{title}</circle>')
    parts.append("</g>")
    return parts


def nice_ticks(most: float, count: int = 5) -> list[float]:
    """Round numbers from 0 to at least `most`."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / count
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * (1 - 1e-9))
    return [step * k for k in range(ceil(most / step - 1e-9) + 1)]
