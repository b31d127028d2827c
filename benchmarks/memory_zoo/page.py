"""Rows of the benchmark → docs/memory.md: a table of predicted / XLA, and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

INTRODUCTION = (Path(__file__).parent / "introduction.md").read_text()
GIB = 2**30
DEVICE_BYTES = 84942979072  # of an H100 of 80 GB
TOLERANCE = 0.10
FLOOR = 0.85
_HEAD = ("model", "plan", "mesh", "predicted GiB", "XLA GiB", "predicted / XLA")


def ratios(row: dict[str, Any]) -> list[float]:
    """Predicted over XLA's peak, for every mesh of a plan."""
    pairs = zip(row["predicted_bytes"], row["xla_bytes"], strict=True)
    return [predicted / xla for predicted, xla in pairs]


def ratio(row: dict[str, Any]) -> float:
    """Of the mesh that is predicted worst."""
    return max(ratios(row), key=lambda r: abs(r - 1))


def fits(row: dict[str, Any]) -> bool:
    """Whether XLA had the memory: where it is short, it recomputes values by itself."""
    return max(row["xla_bytes"]) < DEVICE_BYTES


def in_short(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"].splitlines()[0][:100]
    figures = zip(row["predicted_bytes"], row["xla_bytes"], ratios(row), strict=True)
    return "; ".join(f"{p / GIB:.2f} of {x / GIB:.2f} GiB, {r:.2f}" for p, x, r in figures)


def write_page(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text(page(rows))


def page(rows: Sequence[dict[str, Any]]) -> str:
    compiled = [row for row in rows if "xla_bytes" in row]
    measured = [row for row in compiled if fits(row)]
    lines = [INTRODUCTION.rstrip(), "", *_summary(measured), ""]
    for held_out, title in ((False, "Models that were studied"), (True, "Held out")):
        part = [row for row in measured if row["held_out"] is held_out]
        if part:
            lines += [f"## {title}", "", _line(_HEAD), _line(["---"] * len(_HEAD))]
            lines += [_line(_cells(row)) for row in part]
            lines.append("")
    too_large = [row for row in compiled if not fits(row)]
    if too_large:
        lines += ["Larger than the device, where XLA recomputes values by itself; not counted:", ""]
        lines += [f"- {row['model']}, {row['kind']}: {in_short(row)}" for row in too_large]
        lines.append("")
    failed = [row for row in rows if "error" in row]
    if failed:
        lines += ["Without a figure:", ""]
        for row in failed:
            text = row["error"].splitlines()[0].replace("|", "\\|")
            lines.append(f"- {row['model']}, {row['kind']}: {text}")
        lines.append("")
    return "\n".join(lines)


def _summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How many rows are within the tolerance, of all and of those held out, and the worst."""
    lines = []
    groups = (("all plans", rows), ("held out", [row for row in rows if row["held_out"]]))
    for name, part in groups:
        if part:
            near = [row for row in part if abs(ratio(row) - 1) <= TOLERANCE]
            low = [row for row in part if min(ratios(row)) < FLOOR]
            lines.append(
                f"- {name}: {len(near)} of {len(part)} within {TOLERANCE:.0%}, {len(low)} below "
                f"{FLOOR:.2f}"
            )
    worst = sorted(rows, key=lambda row: -abs(ratio(row) - 1))[:5]
    names = ", ".join(f"{row['model']} ({row['kind']}) {ratio(row):.2f}" for row in worst)
    return [*lines, f"- the worst: {names}"] if worst else []


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["model"],
        row["kind"],
        ", ".join("×".join(map(str, mesh)) for mesh in row["meshes"]),
        ", ".join(f"{b / GIB:.2f}" for b in row["predicted_bytes"]),
        ", ".join(f"{b / GIB:.2f}" for b in row["xla_bytes"]),
        ", ".join(f"{r:.2f}" for r in ratios(row)),
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
