"""Rows of the benchmark → docs/planning_time.md. Every case has a line, also one without a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

INTRODUCTION = (Path(__file__).parent / "introduction.md").read_text()
_HEAD = (
    "model", "GPUs", "planned in", "CPU", "JAX", "load", "gap", "step", "passes", "left out",
    "without a limit",
)  # fmt: skip


def write_page(path: Path, results: dict[str, Any], names: Sequence[str]) -> None:
    path.write_text(page(results, names))


def page(results: dict[str, Any], names: Sequence[str]) -> str:
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD))]
    notes = []
    for name in names:
        row, free = results["limited"].get(name), results["free"].get(name)
        if row is None:
            lines.append(_line([name, "not planned", *[""] * (len(_HEAD) - 2)]))
        elif "error" in row:
            took = f"{row['planned_s']:.0f} s" if "planned_s" in row else ""
            cells = [name, str(row.get("devices", "")), took, "", "", f"{row['load']:.1f}"]
            lines.append(_line([*cells, "**no plan**", *[""] * (len(_HEAD) - 7)]))
            notes.append(f"- {name}: {_plain(row['error'])}")
        else:
            lines.append(_line(_cells(name, row, free)))
            if row["stopped"]:
                notes.append(f"- {name}: {_plain(row['stopped'])}")
    left = ["", "What was left out, and errors:", "", *(notes or ["- none"])]
    return "\n".join([INTRODUCTION, *lines, *left, ""])


def _cells(name: str, row: dict[str, Any], free: dict[str, Any] | None) -> list[str]:
    total = sum(row["passes_s"].values())
    longest = sorted(row["passes_s"].items(), key=lambda item: -item[1])[:3]
    passes = ", ".join(f"{what} {s / total:.0%}" for what, s in longest)
    compared = ""
    if free is not None and "step_s" in free:
        slower = row["step_s"] / free["step_s"] - 1
        compared = f"{free['step_s']:.4g} s ({slower:+.1%}), {free['cpu_s']:.0f} s of CPU"
    elif free is not None:
        compared = _plain(free["error"])
    jax_s = row.get("jax_trace_s", 0.0) + row.get("jax_lower_s", 0.0)
    return [
        name,
        str(row["devices"]),
        f"{row['planned_s']:.0f} s",
        f"{row['cpu_s']:.0f} s",
        f"{jax_s:.1f} s" if jax_s else "",
        f"{row['load']:.1f}",
        f"{row['gap']:.2%}",
        f"{row['step_s']:.4g} s",
        passes,
        "some" if row["stopped"] else "",
        compared,
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _plain(text: str) -> str:
    """One line without Markdown's signs."""
    line = " ".join(text.split())[:300]
    return "".join(f"\\{c}" if c in "*_<>[]`" else c for c in line)
