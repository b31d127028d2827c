"""The results file as text: from the document of `autopar bench` to markdown tables.

`tables_of` returns every table by name; `with_tables` writes them into a text such as the README,
between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`, so no number is copied by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from autopar.errors import ArgumentError
from benchmarks.provenance import planner_of

EQUAL_WITHIN = 0.01  # for compiled rows; measured ones have a spread
_AUTOPAR = "autopar"
_MARKED = re.compile(r"(<!-- bench:([\w-]+) -->\n).*?(<!-- /bench:\2 -->)", re.DOTALL)


def tables_of(document: dict[str, Any]) -> dict[str, str]:
    """name → markdown, for the parts in the document."""
    makers = {
        "h100": (h100_table, h100_details),
        "cpu": (cpu_table,),
        "h200": (h200_table,),
        "scaling": (scaling_table,),
        "serving": (decode_table, http_table),
    }
    found = {}
    for part, functions in makers.items():
        if part in document:
            for function in functions:
                found[function.__name__.replace("_table", "").replace("_", "-")] = function(
                    document[part]
                )
    return found


def with_tables(text: str, tables: dict[str, str]) -> str:
    """The text with the tables between its markers replaced. An unknown marker is an error."""

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if name not in tables:
            raise ArgumentError(
                f"<!-- bench:{name} -->: the results have no such table. They have "
                f"{', '.join(tables) or 'none'}."
            )
        return match[1] + tables[name] + match[3]

    return _MARKED.sub(table, text)


def table_text(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


# -- compiled for H100s


def best_by_family(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The fastest result that fits, for each family; if none fits, the one with least memory."""
    best: dict[str, dict[str, Any]] = {}
    for one in results:
        known = best.get(one["family"])
        if known is None or _rank(one) < _rank(known):
            best[one["family"]] = one
    return best


def _rank(one: dict[str, Any]) -> tuple[bool, float]:
    return not one["fits"], one["step_ms"] if one["fits"] else one.get("peak_gb", 0.0)


def best_expert(row: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest that fits, of those judged as autopar's plan was."""
    ours = autopar_of(row)
    able = [one for one in row["results"] if one["family"] != _AUTOPAR and one["fits"]]
    able = [one for one in able if ours is None or one.get("judge") == ours.get("judge")]
    return min(able, key=lambda one: one["step_ms"], default=None)


def autopar_of(row: dict[str, Any]) -> dict[str, Any] | None:
    return next((one for one in row["results"] if one["family"] == _AUTOPAR), None)


def ratio_of(row: dict[str, Any]) -> float | None:
    """autopar's step over the best expert's."""
    ours, best = autopar_of(row), best_expert(row)
    if ours is None or best is None or not ours["fits"]:
        return None
    return ours["step_ms"] / best["step_ms"]


def h100_table(part: dict[str, Any]) -> str:
    """A line per row: autopar, the best of each family of experts, and the ratio."""
    heads = (
        "model", "GPUs", "batch", "autopar", "best expert", "other experts", "ratio", "planner", "",
    )  # fmt: skip
    return table_text(heads, [_h100_line(row) for row in part["rows"]])


def _h100_line(row: dict[str, Any]) -> list[str]:
    ours, best, ratio = autopar_of(row), best_expert(row), ratio_of(row)
    others = [
        f"{family} {_step(one)}"
        for family, one in sorted(
            best_by_family(row["results"]).items(), key=lambda item: _rank(item[1])
        )
        if family != _AUTOPAR and (best is None or family != best["family"])
    ]
    return [
        _model(row),
        str(row["devices"]),
        str(row["batch"]),
        "not run" if ours is None else f"{_step(ours)} {_shape(ours)}".strip(),
        "none fits" if best is None else f"{_step(best)}, {best['plan']}",
        ", ".join(others) or "–",
        "–" if ratio is None else f"{ratio:.2f}",
        planner_of(row),
        _note(row),
    ]


def _model(row: dict[str, Any]) -> str:
    return row["model"] + (f", {row['layers']} layers" if row.get("layers") else "")


def _step(one: dict[str, Any]) -> str:
    """The judge's figure, and the planner's beside that of the schedule."""
    if not one["fits"]:
        return "does not fit"
    predicted = f" (predicted {one['predicted_ms']:.1f})" if _has_both(one) else ""
    return f"{one['step_ms']:.1f} ms{predicted}"


def _has_both(one: dict[str, Any]) -> bool:
    return "judge" in one and "predicted_ms" in one


def _shape(one: dict[str, Any]) -> str:
    """`on a 4×2 mesh, 2 micro-batches, recomputing 1 layer`."""
    words = []
    mesh = one.get("mesh", "")
    if ", " in mesh:
        words.append(f"on meshes {mesh}")
    elif mesh:
        words.append(f"on a {mesh} mesh" if "×" in mesh else f"on a mesh of {mesh}")
    if (parts := one.get("num_micro_batches", 1)) > 1:
        words.append(f"{parts} micro-batches")
    if recomputed := one.get("remat_layers", 0):
        words.append(f"recomputing {recomputed} layer{'s' if recomputed > 1 else ''}")
    return ", ".join(words)


def _note(row: dict[str, Any]) -> str:
    """Where autopar is worse: its excess over the best expert."""
    ours, best, ratio = autopar_of(row), best_expert(row), ratio_of(row)
    if ours is not None and ours.get("note"):
        return ours["note"]
    if ours is None or best is None or ratio is None or ratio <= 1 + EQUAL_WITHIN:
        return ""
    compute = ours["compute_ms"] - best["compute_ms"]
    name, words = ("exposed_ms", "exposed communication")
    if "exposed_ms" not in ours or "exposed_ms" not in best:
        name, words = ("communication_ms", "communication")
    return f"worse: compute {compute:+.1f} ms, {words} {ours[name] - best[name]:+.1f} ms"


def h100_details(part: dict[str, Any]) -> str:
    """A line per plan: the planner's figure, the judge's, and its parts."""
    heads = (
        "model", "GPUs", "plan", "mesh", "step ms", "predicted ms", "compute ms",
        "communication ms", "of it exposed", "sent by a device, GB", "peak GB", "predicted GB",
        "planned s",
    )  # fmt: skip
    lines = []
    for row in part["rows"]:
        best = sorted(best_by_family(row["results"]).values(), key=_rank)
        lines += [_detail(row, one) for one in best]
    return table_text(heads, lines)


def _detail(row: dict[str, Any], one: dict[str, Any]) -> list[str]:
    sent = ", ".join(f"{place}: {gb:.2f}" for place, gb in sorted(one.get("sent_gb", {}).items()))
    return [
        _model(row),
        str(row["devices"]),
        one["plan"],
        one.get("mesh", "–"),
        _number(one.get("step_ms")) + ("" if one["fits"] else " (does not fit)"),
        _number(one.get("predicted_ms")),
        _number(one.get("compute_ms")),
        _number(one.get("communication_ms")),
        _number(one.get("exposed_ms")),
        sent or "–",
        _number(one.get("peak_gb")),
        _number(one.get("predicted_gb")),
        _number(one.get("planned_s")),
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


# -- measured


def cpu_table(part: dict[str, Any]) -> str:
    """Measured on virtual CPU devices: medians of rounds, all plans interleaved."""
    heads = ("model", "devices", "autopar", "best expert", "other experts", "ratio", "planner", "")
    lines = []
    for row in part["rows"]:
        ours, best = autopar_of(row), best_expert(row)
        others = [
            f"{one['family']} {_step(one)}"
            for one in sorted(best_by_family(row["results"]).values(), key=_rank)
            if one["family"] != _AUTOPAR and (best is None or one["family"] != best["family"])
        ]
        ratio, spread = row.get("ratio"), row.get("ratio_spread")
        lines.append(
            [
                _model(row),
                str(row["devices"]),
                "–" if ours is None else f"{_step(ours)} {_shape(ours)}".strip(),
                "–" if best is None else f"{_step(best)}, {best['plan']}",
                ", ".join(others) or "–",
                "–" if ratio is None else f"{ratio:.2f}" + (f" ± {spread:.2f}" if spread else ""),
                planner_of(row),
                _missing(row),
            ]
        )
    return table_text(heads, lines)


def _missing(row: dict[str, Any]) -> str:
    """How many experts were run if not all."""
    some, of_all = row.get("num_experts_run"), row.get("num_experts")
    return f"{some} of {of_all} experts run" if some != of_all else ""


def h200_table(part: dict[str, Any]) -> str:
    """autopar against `jax.jit` of the same step on one GPU."""
    heads = ("step", "jax.jit", "autopar", "ratio", "TFLOP/s", "peak GiB, both")
    lines = []
    for row in part["rows"]:
        if "error" in row:
            lines.append([row["label"], row["error"], "–", "–", "–", "–"])
            continue
        peaks = [f"{row[f'{name}_xla_bytes'] / 2**30:.1f}" for name in ("jit", "autopar")]
        lines.append(
            [
                row["label"],
                f"{1e3 * row['jit_step_s']:.1f} ms",
                f"{1e3 * row['autopar_step_s']:.1f} ms",
                f"{row['ratio']:.3f} ± {row['ratio_spread']:.3f}",
                f"{row['tflops']:.0f} ({row['share_of_peak']:.0%})",
                " / ".join(peaks),
            ]
        )
    return table_text(heads, lines)


# -- other scripts' rows


def scaling_table(part: dict[str, Any]) -> str:
    """Predicted throughput next to published measurements."""
    from benchmarks.scaling.tables import tables

    return tables(part["rows"])


def decode_table(part: dict[str, Any]) -> str:
    """Tokens per second of the serving engine over those of a hand-written decode loop."""
    heads = ("model and batch", "tokens/s, engine", "tokens/s, hand-written loop", "ratio")
    lines = [
        [
            row["label"],
            f"{row['tokens_per_s'][row['engine']]:.0f}",
            f"{row['tokens_per_s'][row['loop']]:.0f}",
            f"{row['ratio']:.3f} ± {row['ratio'] * row['ratio_spread']:.3f}",
        ]
        for row in part["rows"]
        if row["kind"] == "decode"
    ]
    return table_text(heads, lines)


def http_table(part: dict[str, Any]) -> str:
    """Latencies of HTTP clients."""
    names = {"first_token_ms": "first token", "per_token_ms": "per token", "whole_ms": "whole"}
    heads = ("clients", "tokens/s", *(f"{name}, ms (p50 / p90 / p99)" for name in names.values()))
    lines = [
        [
            row["label"],
            f"{row['tokens_per_s']:.0f}",
            *(" / ".join(f"{ms:.1f}" for ms in row[name].values()) for name in names),
        ]
        for row in part["rows"]
        if row["kind"] == "http"
    ]
    return table_text(heads, lines)
