"""Measured plans as rows, summaries and tables: predictions, regret, autopar against experts.

A program's step time is the median over rounds of the slowest rank's. *Regret* is the time of the
plan that a cost model chooses over that of autopar's fastest measured plan; `over_fastest` divides
by the fastest of all programs, experts included.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from math import isfinite, nan
from typing import Any

from autopar.measure.ranking import rank_correlation
from autopar.runtime.timing import spread_of
from benchmarks.accuracy_tables import summary
from benchmarks.suite.tables import table_text

from .plans import DEFAULT, MERGED_BY_XLA

Row = dict[str, Any]
# How autopar can choose besides the default -> the head of the column.
JUDGE = "judge"  # in `chosen_by`: the plan whose compiled program is judged the fastest
_OTHERS = {
    "profile": "by the profile",
    "preset, overlap": "overlap",
    "profile, overlap": "overlap, by the profile",
    MERGED_BY_XLA: "XLA's merging",
    JUDGE: "the judge's choice",
}
_MARKED = re.compile(r"(<!-- shared-gpu:([\w-]+) -->\n).*?(<!-- /shared-gpu:\2 -->)", re.DOTALL)


def case_row(label: str, planned: Row, measured: Sequence[Row], failed: dict[str, str]) -> Row:
    """The row of a model, from its plans and the results of all ranks."""
    errors = {**measured[0]["errors"], **failed}
    plans = [
        {**{key: value for key, value in row.items() if key != "plan"}, **found}
        for row in planned["plans"]
        if (found := program_row(row["name"], measured))
    ]
    experts = [
        {**row, **found}
        for row in planned["experts"]
        if (found := program_row(row["name"], measured))
    ]
    if judged := [one for one in plans if one.get("judged")]:
        best = min(judged, key=lambda one: one["judged"]["step_s"])
        best["chosen_by"] = [*best["chosen_by"], JUDGE]
    row = {
        "label": label,
        "profile": planned["profile"],
        "tiny": planned["tiny"],
        "planned_s": planned["planned_s"],
        "search": planned["search"],
        "phases_s": measured[0]["phases_s"],
        "plans": sorted(plans, key=lambda one: one["step_s"]),
        "experts": sorted(experts, key=lambda one: one["step_s"]),
        "errors": errors,
    }
    return {**row, "summary": case_summary(row)}


def program_row(name: str, measured: Sequence[Row]) -> Row | None:
    """What the ranks measured of a program; None if they did not run it."""
    found = [one["programs"][name] for one in measured if name in one["programs"]]
    if len(found) < len(measured) or not all(one.get("samples") for one in found):
        return None
    slowest = max(found, key=lambda one: statistics.median(one["samples"]))
    seen = [one["seen_bytes"] for one in found if one["seen_bytes"] is not None]
    return {
        "step_s": statistics.median(slowest["samples"]),
        "spread": spread_of(slowest["samples"]),
        "num_samples": len(slowest["samples"]),
        "num_steps": slowest["num_steps"],
        "losses": found[0]["losses"],
        "xla_bytes": max(one["xla_bytes"] for one in found),
        "seen_bytes": max(seen, default=None),
        "compile_s": found[0]["compile_s"],
        "judged": found[0]["judged"],
    }


def case_summary(row: Row) -> Row:
    """Figures over all programs of one model."""
    plans, experts = row["plans"], row["experts"]
    found: Row = {} if not plans else summary(plans)
    everything = [*plans, *experts]
    if everything:
        fastest = min(one["step_s"] for one in everything)
        found["loss_deviation"] = loss_deviation([one["losses"] for one in everything])
        seen = [one["xla_bytes"] / one["seen_bytes"] for one in everything if one["seen_bytes"]]
        found["xla_over_seen"] = statistics.median(seen) if seen else None
        found["judge"] = judge_summary(everything)
        best = min(experts, key=lambda one: one["step_s"], default=None)
        found["best_expert"] = None if best is None else best["name"]
        for name, errors in found.get("by", {}).items():
            ours = chosen_by(row, name)
            errors["step_s"] = ours and ours["step_s"]
            errors["over_fastest"] = ours and ours["step_s"] / fastest
            errors["over_best_expert"] = ours and best and ours["step_s"] / best["step_s"]
    return found


def judge_summary(rows: Sequence[Row]) -> Row | None:
    """The judge's step over the measured one, and its order of all programs."""
    judged = [one for one in rows if one.get("judged")]
    if not judged:
        return None
    ratios = [one["judged"]["step_s"] / one["step_s"] for one in judged]
    return {
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "rank_correlation": rank_correlation(
            [one["judged"]["step_s"] for one in judged], [one["step_s"] for one in judged]
        ),
    }


def chosen_by(row: Row, name: str) -> Row | None:
    return next((one for one in row["plans"] if name in one["chosen_by"]), None)


def loss_deviation(losses: Sequence[Sequence[float]]) -> float:
    """The largest relative difference from the median, of the losses of the same step; NaN if one
    is not finite."""
    if not all(isfinite(loss) for of_program in losses for loss in of_program):
        return nan
    most = 0.0
    for of_step in zip(*losses, strict=True):
        middle = statistics.median(of_step)
        most = max(most, *(abs(loss / middle - 1) for loss in of_step))
    return most


# -- text


def line_of(name: str, row: Row) -> str:
    """A case on the terminal."""
    lines = [f"{name}: {row['label']}"]
    for one in sorted([*row["plans"], *row["experts"]], key=lambda one: one["step_s"]):
        predicted = ", ".join(
            f"{key} {1e3 * costs['step_s']:.1f}" for key, costs in one.get("predicted", {}).items()
        )
        mesh = "×".join(map(str, one.get("mesh", [])))
        chosen = f"  chosen by {', '.join(one['chosen_by'])}" if one.get("chosen_by") else ""
        lines.append(
            f"  {1e3 * one['step_s']:8.2f} ms ± {one['spread']:4.0%}  {one['name']:40s} {mesh:4s} "
            f"{predicted}{chosen}"
        )
    for program, error in row["errors"].items():
        lines.append(f"  {program}: {error.splitlines()[0][:150] if error else 'failed'}")
    figures = row["summary"]
    for key, errors in figures.get("by", {}).items():
        lines.append(
            f"  {key}: rank correlation {errors['rank_correlation']:.2f}, regret "
            f"{_percent(errors['regret'])}, over the best expert "
            f"{_ratio(errors['over_best_expert'])}, predicted / measured {errors['ratio']:.2f}"
        )
    if judge := figures.get("judge"):
        lines.append(
            f"  judge: rank correlation {judge['rank_correlation']:.2f}, judged / measured "
            f"{judge['lowest']:.2f} to {judge['highest']:.2f}"
        )
    if "loss_deviation" in figures:
        lines.append(f"  losses differ by {figures['loss_deviation']:.1e}")
    seconds = ", ".join(f"{phase} {s:.0f} s" for phase, s in row["phases_s"].items())
    return "\n".join([*lines, f"  {seconds}"])


def tables_of(document: Row) -> dict[str, str]:
    """name → markdown."""
    rows = [row for row in document["cases"].values() if row["plans"]]
    return {"steps": steps_table(rows), "predictions": predictions_table(rows)}


def steps_table(rows: Sequence[Row]) -> str:
    """The plan that autopar chooses by the data sheet, as it does by default; its regret; the
    experts; and the ratios of its other choices."""
    heads = ("model", "programs", "autopar", "fastest plan", "regret", "best expert", "ratio")
    return table_text((*heads, *_OTHERS.values()), [_steps_line(row) for row in rows])


def _steps_line(row: Row) -> list[str]:
    ours, plans = chosen_by(row, DEFAULT), row["plans"]
    best = row["experts"][0] if row["experts"] else None
    return [
        row["label"],
        f"{len(plans)} + {len(row['experts'])}",
        "did not run" if ours is None else _step(ours) + _mesh(ours),
        _step(plans[0]) + _mesh(plans[0]),
        _percent(row["summary"]["by"][DEFAULT]["regret"]),
        "–" if best is None else f"{_step(best)}, {best['name']}",
        *(_over(chosen_by(row, name), best) for name in (DEFAULT, *_OTHERS)),
    ]


def predictions_table(rows: Sequence[Row]) -> str:
    heads = (
        "model", "predicted / measured", "rank correlation", "by preset", "regret by preset",
        "judged / measured", "rank correlation of the judge", "memory, predicted / XLA",
        "XLA / seen", "losses differ by",
    )  # fmt: skip
    return table_text(heads, [_predictions_line(row) for row in rows])


def _predictions_line(row: Row) -> list[str]:
    figures = row["summary"]
    errors, preset = figures["by"][_judge(row)], figures["by"][DEFAULT]
    low, middle, high = figures["memory_ratio"]
    seen = figures["xla_over_seen"]
    return [
        row["label"],
        f"{errors['ratio']:.2f} ± {errors['off']:.0%}",
        f"{errors['rank_correlation']:.2f}",
        f"{preset['rank_correlation']:.2f}",
        _percent(preset["regret"]),
        *_judge_cells(figures.get("judge")),
        f"{middle:.2f} ({low:.2f} to {high:.2f})",
        "–" if seen is None else f"{seen:.2f}",
        f"{figures['loss_deviation']:.0e}",
    ]


def _judge_cells(judge: Row | None) -> tuple[str, str]:
    if judge is None:
        return "–", "–"
    span = f"{judge['ratio']:.2f} ({judge['lowest']:.2f} to {judge['highest']:.2f})"
    return span, f"{judge['rank_correlation']:.2f}"


def with_tables(text: str, tables: dict[str, str]) -> str:
    """The text with the tables between its markers `<!-- shared-gpu:NAME -->` replaced."""
    return _MARKED.sub(lambda match: match[1] + tables[match[2]] + match[3], text)


def _judge(row: Row) -> str:
    """The cost model whose predictions are shown: the profile, if there was one."""
    return "profile" if "profile" in row["summary"]["by"] else DEFAULT


def _over(ours: Row | None, best: Row | None) -> str:
    return _ratio(None if ours is None or best is None else ours["step_s"] / best["step_s"])


def _step(one: Row) -> str:
    return f"{1e3 * one['step_s']:.1f} ms"


def _mesh(one: Row) -> str:
    return " on " + "×".join(map(str, one["mesh"]))


def _percent(regret: float | None) -> str:
    return "–" if regret is None else f"{regret - 1:.1%}"


def _ratio(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"
