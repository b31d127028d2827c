"""Rows of `benchmarks.large_models` as markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SHORT = {
    "all-reduce": "AR", "all-gather": "AG", "reduce-scatter": "RS", "all-to-all": "A2A",
    "collective-permute": "CP",
}  # fmt: skip


def show_tables(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table of plans and one of planning times, each if it has rows."""
    order = {name: at for at, name in enumerate(dict.fromkeys(row["model"] for row in rows))}
    rows = sorted(rows, key=lambda row: (order[row["model"]], row["devices"], _rank(row)))
    plans = [row for row in rows if "budgets" not in row]
    planning = [row for row in rows if "budgets" in row]
    if plans:
        heads = (
            "model", "GPUs", "batch", "plan", "mesh", "predicted GiB", "XLA GiB", "fits", "remat",
            "micro", "plan s", "compile s", "collectives: number (GB sent)", "sent GB",
            "compute ms", "comm. ms", "total ms",
        )  # fmt: skip
        print(_table(heads, [_plan_cells(row) for row in plans]))
    if planning:
        heads = (
            "model", "GPUs", "batch", "budget", "budget GB", "planned s", "ratio", "mesh",
            "predicted GiB", "predicted ms", "remat", "gap",
        )  # fmt: skip
        cells = [line for row in planning for line in _planning_cells(row)]
        print(_table(heads, cells))
    for row in rows:
        for found in (row, *row.get("budgets", {}).values()):
            if "error" in found:
                print(f"{row['model']}, {row['devices']} GPUs, {row['plan']}: {found['error']}\n")


def _rank(row: dict[str, Any]) -> tuple[bool, str]:
    return row["plan"] != "autopar", row["plan"]


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _mesh(row: dict[str, Any]) -> str:
    return "×".join(str(size) for size in row.get("mesh", [])) or "–"


def _plan_cells(row: dict[str, Any]) -> list[str]:
    sent = row.get("sent_gb_by_kind", {})
    collectives = ", ".join(
        f"{_SHORT[kind]} {count} ({sent[kind]:.1f})"
        for kind, count in sorted(row.get("collectives", {}).items())
    )
    return [
        row["model"],
        str(row["devices"]),
        str(row["batch_size"]),
        row["plan"],
        _mesh(row),
        _number(row.get("predicted_peak_gib")),
        _number(row.get("xla_peak_gib")),
        "yes" if row["fits"] else "no",
        str(row.get("remat_layers", "–")),
        str(row.get("num_micro_batches", "–")),
        _number(row.get("planned_s")),
        _number(row.get("compiled_s")),
        collectives or "–",
        _number(row.get("sent_gb")),
        _number(row.get("compute_ms")),
        _number(row.get("communication_ms")),
        _number(row.get("total_ms")),
    ]


def _planning_cells(row: dict[str, Any]) -> list[list[str]]:
    return [
        [
            row["model"],
            str(row["devices"]),
            str(row["batch_size"]),
            name,
            "none" if name == "without" else _number(run["budget_gb"]),
            _number(run["planned_s"]),
            _number(row["ratios"][name], 2),
            _mesh(run),
            _number(run.get("predicted_peak_gib")),
            _number(run.get("predicted_ms")),
            str(run.get("remat_layers", "–")),
            f"{run['gap']:.1%}" if "gap" in run else "does not fit",
        ]
        for name, run in row["budgets"].items()
    ]
