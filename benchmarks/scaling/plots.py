"""Rows as plots: from rows to SVG files, a panel per family of models.

A panel has our predictions, and the measurements of others where they exist. The text of every file
says which is which, and who measured.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from autopar.inspect.plots import HEIGHT, WIDTH, PlotMark, Series, line_plot
from benchmarks.published import MAXTEXT, MAXTEXT_LLAMA2_7B_TOKENS_S, PAPER, PUBLISHED
from benchmarks.scaling.cases import GPUS
from benchmarks.scaling.tables import FAMILIES, Row, best_rows, first_line, plan_text, share_of_peak

V100_GPUS = (1, 2, 4, 8, 16, 32, 64)
_COLUMNS = 2
_HEAD, _PANEL_HEAD, _LEGEND_LINE, _GAP = 74, 26, 17, 18
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  .h1 { font-size: 17px; font-weight: 600 } .h2 { font-size: 14px; font-weight: 600 }
  .title { fill: #57606a } .grid { stroke: #d8dee4 }
  .line { fill: none; stroke: var(--own); stroke-width: 2 }
  circle { fill: var(--own) } .cross { stroke: var(--own); stroke-width: 2 }
  svg { --series-0: #0b62c4; --series-1: #b35900; --series-2: #1a7f37; --series-dashed: #8c959f }
"""


@dataclass(frozen=True)
class Panel:
    title: str
    y_title: str
    labels: tuple[str, ...]
    series: tuple[Series, ...]


def write_plots(rows: list[Row], folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Returns the written files; a cluster without rows has none."""
    written: list[pathlib.Path] = []
    for cluster, drawn in (("v100", v100_plot), ("h100", h100_plot)):
        if any(row["cluster"] == cluster for row in rows):
            path = pathlib.Path(folder, f"scaling-{cluster}.svg")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(drawn(rows))
            written.append(path)
    return written


def v100_plot(rows: list[Row]) -> str:
    panels = []
    for family in ("gpt", "moe", "wresnet"):
        theirs = {m.gpus: m for model, m in PUBLISHED.items() if model.startswith(family)}
        baseline = theirs[1].baseline
        predicted = _series(
            "autopar, predicted", rows, "v100", family, V100_GPUS, "published_tflops"
        )
        alpa = [PlotMark(k, theirs[n].alpa, f"{theirs[n].plan}") for k, n in enumerate(V100_GPUS)]
        other = [PlotMark(k, theirs[n].theirs, baseline) for k, n in enumerate(V100_GPUS)]
        series = (
            predicted,
            Series("Alpa, measured by its authors", tuple(alpa)),
            Series(f"{baseline}, measured by Alpa's authors", tuple(other)),
        )
        panels.append(Panel(FAMILIES[family], "TFLOPS per GPU", tuple(map(str, V100_GPUS)), series))
    return _document(
        "Weak scaling on V100s of 16 GB, 8 to a host, 25 Gb/s between hosts",
        (
            f"autopar: predicted by its cost model, never run. All others: measured ({PAPER}).",
            "TFLOPS per GPU as that paper counts them, whatever a plan recomputes, so height is "
            "throughput. A cross: it failed, or does not fit.",
        ),
        panels,
    )


def h100_plot(rows: list[Row]) -> str:
    labels = tuple(f"{gpus:,}" for gpus in GPUS)
    panels = []
    for family in FAMILIES:
        if not best_rows(rows, "h100", family):
            continue
        if family == "llama2":
            predicted = _series("autopar, predicted", rows, "h100", family, GPUS, "items_per_gpu_s")
            said = f"{MAXTEXT}, measured by its authors"
            measured = Series(said, (PlotMark(0, MAXTEXT_LLAMA2_7B_TOKENS_S, said),))
            title = "Llama2-7B, 4 sequences of 4096 per GPU"
            panels.append(Panel(title, "tokens/s per GPU", labels, (predicted, measured)))
            continue
        predicted = _series("autopar, predicted", rows, "h100", family, GPUS, "tflops_per_device")
        largest = best_rows(rows, "h100", family)[-1]["model"].split("-")[1].upper()
        title = f"{FAMILIES[family]}; beyond 64 GPUs {largest}, larger batch"
        panels.append(Panel(title, "TFLOPS per GPU", labels, (predicted,)))
    return _document(
        "Weak scaling on H100s (DGX: NVLink in a host, 8 × 400 Gb/s between hosts)",
        (
            "autopar: predicted by its cost model, never run. Only MaxText's figure is measured, "
            "by its authors.",
            "TFLOPS count the model's products, forward once and backward twice, without "
            "recomputation. A cross: no plan.",
        ),
        panels,
    )


def _series(
    name: str, rows: list[Row], cluster: str, family: str, gpus: Sequence[int], figure: str
) -> Series:
    marks = []
    for row in best_rows(rows, cluster, family):
        if "error" in row:
            said = f"{row['model']}: {first_line(row)}"
        else:
            said = f"{row['model']}, {row[figure]:,.4g}: {plan_text(row)}"
            if cluster == "h100":
                said += f"; {100 * share_of_peak(row):.0f} % of peak"
        if row["devices"] in gpus:
            marks.append(PlotMark(list(gpus).index(row["devices"]), row.get(figure), said))
    return Series(name, tuple(marks))


def _document(title: str, notes: Sequence[str], panels: Sequence[Panel]) -> str:
    num_keys = max(len(panel.series) for panel in panels)
    height = _PANEL_HEAD + num_keys * _LEGEND_LINE + HEIGHT + _GAP
    width = _COLUMNS * WIDTH
    total = _HEAD + height * -(-len(panels) // _COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" '
        f'width="{width}" height="{total}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{total}" fill="#ffffff"/>',
        f'<text class="h1" x="16" y="26">{escape(title)}</text>',
    ]
    for k, note in enumerate(notes):
        parts.append(f'<text class="title" x="16" y="{46 + 16 * k}">{escape(note)}</text>')
    for k, panel in enumerate(panels):
        x, y = WIDTH * (k % _COLUMNS), _HEAD + height * (k // _COLUMNS)
        parts += [f'<g transform="translate({x} {y})">', *_panel(panel, num_keys), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, num_keys: int) -> list[str]:
    parts = [f'<text class="h2" x="16" y="18">{escape(panel.title)}</text>']
    for k, one in enumerate(panel.series):
        y = _PANEL_HEAD + k * _LEGEND_LINE
        parts.append(
            f'<rect x="64" y="{y}" width="10" height="10" style="fill: var(--series-{k})"/>'
            f'<text x="80" y="{y + 10}">{escape(one.name)}</text>'
        )
    plot = line_plot(
        panel.series,
        panel.labels,
        x_title=f"GPUs (vertical: {panel.y_title})",
        y_title=panel.y_title,
        y_text=lambda y: f"{y:,.6g}",
    )
    place = f'<svg y="{_PANEL_HEAD + num_keys * _LEGEND_LINE}" width="{WIDTH}" height="{HEIGHT}" '
    parts.append(plot.replace("<svg ", place, 1))
    return parts
