"""Results of the zoo → docs/zoo.md: which programs run right, what planning them took, and why.

Every registered program has a line, also one that has not been planned yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.zoo.checking import RIGHT
from tests.zoo.left_out import LEFT_OUT
from tests.zoo.program import ZooProgram, all_programs

METHODS = {"8": "(8,)", "2x4": "(2, 4)", "stages": "2 stages"}

# A page's lines are about 110 columns wide, wider than the code.
INTRODUCTION = (Path(__file__).parent / "introduction.md").read_text()


def write_page(path: Path, results: dict[str, Any]) -> None:
    path.write_text(page(results))


def page(results: dict[str, Any]) -> str:
    programs = all_programs()
    sections = [
        INTRODUCTION,
        _share(programs, results["checks"]),
        _checks(programs, results["checks"]),
        *(
            _plans(programs, int(num), rows)
            for num, rows in sorted(results["plans"].items(), key=lambda item: int(item[0]))
        ),
        _left_out(),
    ]
    return "\n".join(sections)


def share(checks: dict[str, dict[str, str]]) -> tuple[int, int]:
    """How many programs are right with all their methods, and how many were run."""
    right = [set(row.values()) == {RIGHT} for row in checks.values()]
    return sum(right), len(right)


def _share(programs: dict[str, ZooProgram], checks: dict[str, dict[str, str]]) -> str:
    checks = {name: row for name, row in checks.items() if name in programs}
    right, run = share(checks)
    cases = Counter(outcome == RIGHT for row in checks.values() for outcome in row.values())
    sources = {p.source for p in programs.values()} - {"written"}
    written = sum(p.source == "written" for p in programs.values())
    return (
        f"The zoo has {len(programs)} programs, of which {written} are written for it; "
        f"the others show {len(sources)} packages.\n"
        f"**{right} of the {run} programs that were run are right with every method** "
        f"({cases[True]} of {cases.total()} runs).\n"
    )


def _checks(programs: dict[str, ZooProgram], checks: dict[str, dict[str, str]]) -> str:
    lines = ["## Small: against one device", ""]
    lines += markdown_row("program", "of", *METHODS.values())
    lines += markdown_row(*["---"] * (2 + len(METHODS)))
    notes = []
    for name, program in programs.items():
        cells = []
        for method in METHODS:
            outcome = checks.get(name, {}).get(method)
            if outcome is None:
                has = method != "stages" or program.layers
                cells.append("not run" if has and name not in checks else "")
            else:
                cells.append("right" if outcome == RIGHT else "**wrong**")
                if outcome != RIGHT:
                    notes.append(f"- `{name}`, {METHODS[method]}: {_plain(outcome)}")
        lines += markdown_row(f"`{name}`", program.source, *cells)
    return "\n".join([*lines, "", *notes, ""])


def _plans(programs: dict[str, ZooProgram], num_devices: int, rows: dict[str, Any]) -> str:
    lines = [f"## Real: planned for {num_devices} H100s", ""]
    lines += markdown_row(
        "program", "method", "planned in", "gap", "GiB per device", "step", "plan", "warnings"
    )
    lines += markdown_row(*["---"] * 8)
    notes = []
    for name in programs:
        row = rows.get(name)
        if row is None:
            lines += markdown_row(f"`{name}`", *["not planned"], *[""] * 6)
        elif "error" in row:
            seconds = f"{row['planned_s']:.0f} s" if "planned_s" in row else ""
            lines += markdown_row(f"`{name}`", row["method"], seconds, "**no plan**", *[""] * 4)
            notes.append(f"- `{name}`: {_plain(row['error'])}")
        else:
            lines += _planned(name, row)
            notes += [f"- `{name}`: {_plain(text)}" for text in row["warnings"]]
    return "\n".join([*lines, "", "Errors and warnings:", "", *(notes or ["- none"]), ""])


def _planned(name: str, row: dict[str, Any]) -> list[str]:
    gap = "" if row["gap"] is None else f"{100 * row['gap']:.2g} %"
    return markdown_row(
        f"`{name}`",
        row["method"],
        f"{row['planned_s']:.1f} s",
        gap,
        f"{row['peak_gib']:.1f}",
        f"{1e3 * row['step_s']:.1f} ms",
        plan_in_short(row),
        str(len(row["warnings"]) or ""),
    )


def plan_in_short(row: dict[str, Any]) -> str:
    """Meshes, micro-batches and recomputation of what `promises` returned."""

    def mesh(shape: Iterable[int]) -> str:
        return "×".join(map(str, shape))

    parts = [", ".join(map(mesh, row["stages"])) if row["stages"] else mesh(row["mesh"])]
    if len(row["stages"]) > 4:
        parts = [f"{len(row['stages'])} stages"]
    if row["num_micro_batches"] > 1:
        parts.append(f"{row['num_micro_batches']} micro-batches")
    if row["remat_layers"]:
        layers = "1 layer" if row["remat_layers"] == 1 else f"{row['remat_layers']} layers"
        parts.append(f"recomputes {layers}")
    return "; ".join(parts)


def _left_out() -> str:
    lines = ["## Packages that are left out", ""]
    lines += markdown_row("package", "tried", "why") + markdown_row("---", "---", "---")
    for one in sorted(LEFT_OUT, key=lambda one: one.package.lower()):
        lines += markdown_row(one.package, one.tried, one.reason)
    return "\n".join([*lines, ""])


def markdown_row(*cells: str) -> list[str]:
    """A row of a table, as a list of its one line."""
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"]


def _plain(text: str) -> str:
    """One line without Markdown's signs."""
    line = " ".join(text.split())[:300]
    return "".join(f"\\{c}" if c in "*_<>[]`" else c for c in line)
