"""Rows of the benchmark → docs/memory.md: a table of predicted / XLA, and its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

INTRODUCTION = (Path(__file__).parent / "introduction.md").read_text()
GIB = 2**30
DEVICE_BYTES = 84942979072  # of an H100 of 80 GB
TOLERANCE = 0.10
FLOOR = 0.85
_FORMER = (
    "Rows with † are from before `autopar.verify` left products to cuBLAS: without a GPU to time "
    "them on, XLA took kernels\nof its own, which need other memory."
)
_BUDGET_HEAD = ("model", "plan", "share of the free peak", "budget GiB", "predicted", "XLA", "")
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


def budgets_in_short(rows: Sequence[dict[str, Any]]) -> str:
    within = sum(row.get("within", False) for row in rows)
    over = sum(row.get("within") is False for row in rows)
    failed = sum("error" in row for row in rows)
    refused = [row for row in rows if "refused" in row]
    wrongly = sum(fits_by_hand(row) for row in refused)
    unproven = sum(not (is_hopeless(row) or row.get("by_hand")) for row in refused)
    text = (
        f"{len(rows)} plans to a budget: {within} within, {over} over, "
        f"{len(refused) - wrongly - unproven} refused where nothing fits, {wrongly} refused "
        "although a plan written by hand fits"
    )
    if unproven:
        text += f", {unproven} refused and not compared"
    return f"{text}, {failed} failed" if failed else text


def is_hopeless(row: dict[str, Any]) -> bool:
    """Whether the state alone exceeds the budget of a refused plan."""
    return row.get("state_bytes", 0.0) > row.get("budget_bytes", 0.0)


def fits_by_hand(row: dict[str, Any]) -> bool:
    by_hand = row.get("by_hand", {})
    return bool(by_hand) and min(by_hand.values()) <= row["budget_bytes"]


def _why_refused(row: dict[str, Any]) -> str:
    if is_hopeless(row):
        return f"refused: the state alone takes {row['state_bytes'] / GIB:.2f} GiB"
    if not row.get("by_hand"):
        return "refused"
    what, peak = min(row["by_hand"].items(), key=lambda item: item[1])
    but = "although this fits" if fits_by_hand(row) else "the smallest by hand"
    return f"refused; {but}: {what}, {peak / GIB:.2f} GiB"


def write_page(
    path: Path,
    rows: Sequence[dict[str, Any]],
    budgets: Sequence[dict[str, Any]] = (),
    missing: Sequence[str] = (),
) -> None:
    path.write_text(page(rows, budgets, missing))


def page(
    rows: Sequence[dict[str, Any]],
    budgets: Sequence[dict[str, Any]] = (),
    missing: Sequence[str] = (),
) -> str:
    """`missing`: cases without a row."""
    compiled = [row for row in rows if "xla_bytes" in row]
    measured = [row for row in compiled if fits(row)]
    lines = [INTRODUCTION.rstrip(), "", *_summary(measured)]
    if missing:
        lines.append(
            f"- Without a row, new or with other layouts than before: {', '.join(missing)}."
        )
    lines.append("")
    if any("made" not in row for row in measured):
        lines += [_FORMER, ""]
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
    if budgets:
        lines += _budgets(budgets)
    return "\n".join(lines)


def _budgets(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The count, and a row for each."""
    lines = ["## Plans to a budget", "", f"{budgets_in_short(rows)}. {when_made(rows)}", ""]
    lines += [_line(_BUDGET_HEAD), _line(["---"] * len(_BUDGET_HEAD))]
    for row in sorted(rows, key=lambda row: (row["model"], row["kind"], row["share"])):
        head = [row["model"], row["kind"], f"{row['share']:.1f}"]
        if "xla_bytes" in row:
            sizes = [row["budget_bytes"], row["predicted_bytes"], row["xla_bytes"]]
            how = "within" if row["within"] else "over"
            if row["replanned"]:
                how += f", planned {1 + row['replanned']} times"
            lines.append(_line([*head, *(f"{b / GIB:.2f}" for b in sizes), how]))
        else:
            budget = f"{row['budget_bytes'] / GIB:.2f}" if "budget_bytes" in row else "–"
            why = _why_refused(row) if "refused" in row else row["error"].splitlines()[0]
            lines.append(_line([*head, budget, "–", "–", why.replace("|", "\\|")]))
    return [*lines, ""]


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
    return [*lines, f"- the worst: {names}", *_when(rows)] if worst else []


def _when(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [f"- {when_made(rows)}", f"- {when_predicted(rows)}"]


def when_made(rows: Sequence[dict[str, Any]]) -> str:
    """How many rows were compiled on which day, by the XLA of which JAX; later predictions for
    them are not counted."""
    made = Counter((row.get("made", "")[:10], row.get("jax", "")) for row in rows)
    parts = [
        f"{count} on {day or 'an unknown day'}" + (f" by JAX {jax}" if jax else "")
        for (day, jax), count in sorted(made.items(), reverse=True)
    ]
    return f"Compiled: {', '.join(parts)}."


def when_predicted(rows: Sequence[dict[str, Any]]) -> str:
    """How many predictions are of which commit. A prediction is made when its plan is compiled,
    and again by `--predict`, which leaves XLA's figure where the program is the same."""
    commits = Counter(
        row.get("predicted_commit", row.get("commit")) or "an unknown commit" for row in rows
    )
    parts = [f"{count} by {_in_short(commit)}" for commit, count in commits.most_common()]
    return f"Predicted: {', '.join(parts)}."


def _in_short(commit: str) -> str:
    """A commit's first characters; "+" says that files had been changed since."""
    is_hash = " " not in commit
    return f"`{commit[:8]}{'+' if commit.endswith('+') else ''}`" if is_hash else commit


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["model"] if "made" in row else f"{row['model']} †",
        row["kind"],
        ", ".join("×".join(map(str, mesh)) for mesh in row["meshes"]),
        ", ".join(f"{b / GIB:.2f}" for b in row["predicted_bytes"]),
        ", ".join(f"{b / GIB:.2f}" for b in row["xla_bytes"]),
        ", ".join(f"{r:.2f}" for r in ratios(row)),
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
