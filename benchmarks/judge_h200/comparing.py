"""A folder of measured steps → the judge's and the planner's figures beside them.

A row of the result has seconds as measured, judged and predicted, and bytes as XLA counts and the
planner predicts them. The compiled programs are kept in an archive beside the results, so that
another judge can read them without a GPU.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

import jax

from autopar.measure.judge import judge
from benchmarks.judge_h200.cases import STUDIED, Case, all_cases, example_cases, planned_cases
from benchmarks.judge_h200.measuring import DEVICE, file_of, plan_on_h200
from benchmarks.step_profile import Kernels, kernels_of

_DEVELOPMENT, _HELD_OUT = "development", "held out: decide nothing"
_STUDIED = "held out until they were studied: decide now"
FIGURES = {"judged_s": "judge", "predicted_s": "planner"}
Row = dict[str, Any]
_METADATA = re.compile(r", metadata=\{[^}]*\}")  # names and lines of the source, half of the text


def compare(folder: Path, *, tiny: bool = False, plans: bool = True) -> dict[str, Any]:
    """The rows of `measure` with both figures. A program that the judge cannot read is an error
    (without a GPU, in a dry run, none is scheduled: those have no judgement)."""
    document = json.loads((folder / "rows.json").read_text())
    cases = {case.name: case for case in (*all_cases(), *example_cases(), *planned_cases())}
    rows = []
    for row in document["rows"]:
        if "error" not in row:
            if not tiny:
                row |= _judged(_program(folder, row["name"]))
            if plans:
                row |= _planned(cases[row["name"]], tiny)
        rows.append(row)
    return {**document, "rows": rows}


def predict(file: Path, *, tiny: bool = False) -> dict[str, Any]:
    """The document of an earlier `compare`, with steps planned by today's planner."""
    document = json.loads(file.read_text())
    cases = {case.name: case for case in (*all_cases(), *example_cases(), *planned_cases())}
    for row in document["rows"]:
        if "error" not in row:
            row |= _planned(cases[row["name"]], tiny)
    return document


def rejudge(file: Path) -> dict[str, Any]:
    """The document of an earlier `compare`, judged by today's judge."""
    document = json.loads(file.read_text())
    programs = dict(read_programs(archive_of(file)))
    for row in document["rows"]:
        if "error" not in row:
            row |= _judged(programs[row["name"]])
    return document


def archive_of(file: Path) -> Path:
    """The compiled programs of a file of results."""
    return file.with_suffix(".programs.tar.xz")


def write_programs(folder: Path, archive: Path) -> None:
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    with tarfile.open(archive, "w:xz") as packed:
        for row in rows:
            if "error" not in row:
                text = _METADATA.sub("", _program(folder, row["name"])).encode()
                member = tarfile.TarInfo(row["name"])
                member.size = len(text)
                packed.addfile(member, io.BytesIO(text))


def read_programs(archive: Path) -> Iterator[tuple[str, str]]:
    with tarfile.open(archive, "r:xz") as packed:
        for member in packed:
            content = packed.extractfile(member)
            assert content is not None
            yield member.name, content.read().decode()


def _program(folder: Path, name: str) -> str:
    return gzip.decompress(file_of(folder, name, ".hlo.gz").read_bytes()).decode()


def _profiled(folder: Path, name: str) -> Kernels:
    path = file_of(folder, name, ".xplane.gz")
    if not path.exists():
        return {}
    data = jax.profiler.ProfileData.from_serialized_xspace(gzip.decompress(path.read_bytes()))
    return kernels_of(data)


def _judged(program: str) -> Row:
    found = judge(program, DEVICE)
    return {"judged_s": found.step_s, "unknown_loops": len(found.unknown_loops)}


def _planned(case: Case, tiny: bool) -> Row:
    made = case.make(tiny)
    state = jax.eval_shape(made.make_state)
    batch = jax.eval_shape(lambda: made.make_batch(0))
    plan = plan_on_h200(made.step, state, *batch)
    return {"predicted_s": plan.estimated_step_s, "predicted_bytes": plan.estimated_peak_bytes}


def text(rows: Sequence[Row]) -> str:
    """A table per group with its summary; the held-out steps last."""
    groups: dict[str, list[Row]] = {title: [] for title in (_DEVELOPMENT, _STUDIED, _HELD_OUT)}
    for row in rows:
        is_studied = row["name"] in STUDIED
        groups[_HELD_OUT if row["held_out"] else _STUDIED if is_studied else _DEVELOPMENT].append(
            row
        )
    lines = []
    for title, half in groups.items():
        lines += [title, f"  {'':26s} {'ms':>8s} {'judge':>7s} {'planner':>8s} {'memory':>7s}"]
        lines += [f"  {_line(row)}" for row in half]
        lines += [f"  {line}" for line in summary_lines(half)]
    return "\n".join(lines)


def _line(row: Row) -> str:
    if "error" in row:
        return f"{row['name']:26s} {row['error']}"
    ratios = [_ratio(row, name, "step_s") for name in FIGURES]
    ratios.append(_ratio(row, "predicted_bytes", "step_s") and _memory_ratio(row))
    texts = ["" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
    loops = f"  {row['unknown_loops']} loops of unknown trips" if row.get("unknown_loops") else ""
    return (
        f"{row['name']:26s} {1e3 * row['step_s']:8.2f} {texts[0]:>7s} {texts[1]:>8s} "
        f"{texts[2]:>7s}{loops}"
    )


def _ratio(row: Row, name: str, by: str) -> float | None:
    return row[name] / row[by] if name in row else None


def _memory_ratio(row: Row) -> float:
    return row["predicted_bytes"] / row["memory"]["peak"]


def summary(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Over the rows that have this figure: how many, which shares of them are within 10 and 25 %
    of the measured step, and the geometric mean of the ratio."""
    ratios = [row[name] / row["step_s"] for row in rows if name in row]
    if not ratios:
        return {"rows": 0}
    return {
        "rows": len(ratios),
        "within_10": sum(abs(ratio - 1) <= 0.1 for ratio in ratios) / len(ratios),
        "within_25": sum(abs(ratio - 1) <= 0.25 for ratio in ratios) / len(ratios),
        "mean": exp(sum(map(log, ratios)) / len(ratios)),
    }


def summary_lines(rows: Sequence[Row]) -> list[str]:
    lines = []
    for name, who in FIGURES.items():
        found = summary(rows, name)
        if found["rows"]:
            lines.append(
                f"{who}: {found['within_10']:.0%} of {found['rows']} within 10 %, "
                f"{found['within_25']:.0%} within 25 %, mean ratio {found['mean']:.3f}"
            )
    return lines


def kernel_lines(folder: Path, name: str, limit: int = 40) -> list[str]:
    """The judged kernels of a step, the longest first, beside the profiled seconds of the same
    instruction; then the profiled kernels that have no such instruction."""
    rows = {row["name"]: row for row in json.loads((folder / "rows.json").read_text())["rows"]}
    profiled = _profiled(folder, name)
    found = judge(_program(folder, name), DEVICE)
    lines = [
        f"{name}: measured {1e3 * rows[name]['step_s']:.2f} ms, judged {1e3 * found.step_s:.2f}; "
        f"kernels profiled {1e3 * sum(seconds for _, seconds in profiled.values()):.2f} ms",
        f"{'judged ms':>10s} {'profiled':>10s} {'runs':>6s} {'GFLOP':>9s} {'MB':>9s}",
    ]
    for kernel in found.kernels[:limit]:
        in_buffer = profiled.pop(kernel.name.replace(".", "_"), (0, 0.0))
        runs, seconds = profiled.pop(kernel.name, in_buffer)
        lines.append(
            f"{1e3 * kernel.seconds:10.3f} {1e3 * seconds:10.3f} {runs:6d} "
            f"{1e-9 * kernel.flops:9.1f} {1e-6 * kernel.num_bytes:9.1f}  {kernel.name}  "
            f"{kernel.op_name[-60:]}"
        )
    others = sorted(profiled.items(), key=lambda item: -item[1][1])[:limit]
    lines += [f"{'':10s} {1e3 * s:10.3f} {runs:6d}  {kernel}" for kernel, (runs, s) in others]
    return lines
