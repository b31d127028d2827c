"""What was measured of faults: results of `benchmarks.kills`, of several runs → docs/training.md.

    python -m benchmarks.kills_page FILES…       (benchmarks/results/kills*.json)
    python -m benchmarks.kills_page --show FILES…      (prints the table, changes nothing)

Rewrites the last cell of the table of faults, and the two paragraphs between
`<!-- kills FILES -->` and `<!-- /kills -->`: the commands, and how memory grew. A row of the table
has the faults of its kinds in all files; where one of them was not exact, or came too late, or was
otherwise not as stated, the cell says how many. Without files, it takes those that the page names.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "training.md"
RESULTS = ROOT / "benchmarks" / "results"
_RAY, _PROCESSES = "ray", "processes"
_Kind = tuple[str, str, str, str]
# First cell of a row → (mode, kind, what the cell calls one of them and several).
ROWS: dict[str, list[_Kind]] = {
    "a worker process dies": [
        (_RAY, "kill", "kill", "kills"),
        (_RAY, "checkpoint", "while a checkpoint was written", "while a checkpoint was written"),
        (_RAY, "start", "while workers started", "while workers started"),
    ],
    "a worker or node falls silent": [
        (_RAY, "stop", "stopped worker", "stopped workers"),
        (_RAY, "node", "lost node", "lost nodes"),
    ],
    "connections between driver and worker are cut": [
        (_RAY, "network", "cut connection", "cut connections")
    ],
    "nothing reaches a worker any more, as behind a firewall; no connection is closed": [
        (_RAY, "cut", "cut network", "cut networks")
    ],
    "SIGTERM; under SLURM also SIGUSR1": [(_RAY, "sigterm", "signal on Ray", "signals on Ray")],
    "Ctrl-C": [(_RAY, "ctrl_c", "on Ray", "on Ray")],
    "the newest checkpoint is damaged": [
        (_RAY, "torn", "torn checkpoint before a kill", "torn checkpoints before kills")
    ],
    "the disk is full": [(_RAY, "disk", "full disk", "full disks")],
    "the clock jumps forward": [(_RAY, "clock", "jump", "jumps")],
    "the clock jumps back": [(_RAY, "clock_back", "jump", "jumps")],
    "without Ray, one of several processes dies, stops or is cut off": [
        (_PROCESSES, "kill", "killed", "killed"),
        (_PROCESSES, "stop", "stopped", "stopped"),
        (_PROCESSES, "cut", "cut off", "cut off"),
    ],
    "without Ray, one of several processes gets SIGTERM or Ctrl-C": [
        (_PROCESSES, "sigterm", "by SIGTERM", "by SIGTERM"),
        (_PROCESSES, "ctrl_c", "by Ctrl-C", "by Ctrl-C"),
    ],
}
_MARKED = re.compile(r"<!-- kills( [^\n]*?)? -->\n.*?<!-- /kills -->", re.DOTALL)
_FEWEST_FOR_GROWTH = 10
_FEWEST_FOR_SOAK = 100  # steps between faults
_KEYS = {"command", "machine", "jax", "seed", "kills", "asked_kills", "stated_s", "rows"}
_ROW = {"what", "error_s", "exact", "wrong"}


def read_results(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Name of a file → its results, in the order of names."""
    found = {}
    for path in sorted(paths, key=lambda path: path.name):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            for where, keys in ((document, _KEYS), *((row, _ROW) for row in document["rows"])):
                if missing := keys - where.keys():
                    raise KeyError(f"without {', '.join(sorted(missing))}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentError(
                f"{path}: expected a results file of `python -m benchmarks.kills --json`: {error}"
            ) from error
        if path.name in found:
            raise ArgumentError(f"{path}: another file has the same name; rename one of them.")
        found[path.name] = document
    return found


def with_figures(text: str, results: dict[str, dict[str, Any]]) -> str:
    """The page with the figures of these results."""
    cells = _cells(results)
    lines = []
    for line in text.split("\n"):
        parts = line.split(" | ")
        name = parts[0].removeprefix("| ")
        if len(parts) == 4 and line.startswith("| ") and name in cells:
            line = " | ".join([*parts[:3], cells.pop(name) + " |"]).replace("|  |", "| |")
        lines.append(line)
    if cells:
        raise ArgumentError(f"the page has no row for {', '.join(map(repr, cells))}")
    files = " ".join(results)
    body = f"{_commands(results.values())}\n\n{_memory(results)}"
    marked = f"<!-- kills {files} -->\n{body}\n<!-- /kills -->"
    text, count = _MARKED.subn(lambda _: marked, "\n".join(lines))
    if count != 1:
        raise ArgumentError(f"the page has {count} places `<!-- kills -->`; it needs one")
    return text


def files_of(text: str) -> list[str]:
    """The names of the files whose figures the page has."""
    match = _MARKED.search(text)
    return (match[1] or "").split() if match else []


def mode_of(document: dict[str, Any]) -> str:
    return _PROCESSES if "--mode processes" in document["command"] else _RAY


def _cells(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """First cell of a row → its last."""
    faults: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for document in results.values():
        for row in document["rows"]:
            fault = {**row, "stated_s": document["stated_s"][row["what"]]}
            faults.setdefault((mode_of(document), row["what"]), []).append(fault)
    known = {(mode, kind) for kinds in ROWS.values() for mode, kind, *_ in kinds}
    if unknown := faults.keys() - known:
        raise ArgumentError(f"kills_page.ROWS has no row for {sorted(unknown)}")
    return {name: _cell(kinds, faults) for name, kinds in ROWS.items()}


def _cell(kinds: Sequence[_Kind], faults: dict[tuple[str, str], list[Any]]) -> str:
    parts, misses = [], []
    for mode, kind, one, several in kinds:
        own = faults.get((mode, kind), [])
        if not own:
            continue
        parts.append(f"{len(own)} {one if len(own) == 1 else several}: {_times(own)}")
        for what, is_miss in _MISSES.items():
            if count := sum(map(is_miss, own)):
                misses.append(f"**{count} of {len(own)} {several} {what}**")
    if not parts:
        return ""
    return "; ".join([*parts, *(misses or ["all in time and exact"])])


_MISSES = {
    "not exact": lambda row: not row["exact"],
    "too late": lambda row: row["error_s"] is None or row["error_s"] > row["stated_s"],
    "not as stated": lambda row: bool(
        row["wrong"]
        and row["exact"]
        and row["error_s"] is not None
        and row["error_s"] <= row["stated_s"]
    ),
}


def _times(rows: Sequence[dict[str, Any]]) -> str:
    """Median and worst time until the driver was told."""
    times = [row["error_s"] for row in rows if row["error_s"] is not None]
    if not times:
        return "nothing was told"
    if max(times) == 0:
        return "training went on"
    median, worst = f"{statistics.median(times):.1f}", f"{max(times):.1f}"
    return f"after {worst} s" if len(times) == 1 else f"median {median}, worst {worst} s"


def _commands(documents: Iterable[dict[str, Any]]) -> str:
    """Commands that differ by their seeds and files are one line."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    count = 0
    for document in documents:
        count += len(document["rows"])
        command = re.sub(r"--disk \S+", "--disk FOLDER", document["command"])
        command = re.sub(r"--seed \S+", "--seed SEED", command)
        command = re.sub(r" --json \S+", " --json FILE", command)
        where = f"{document['machine']}, JAX {document['jax']}"
        runs.setdefault((command, where), []).append(document)
    lines = [f"{count} faults at random moments, by", ""]
    for (command, where), own in runs.items():
        seeds = ", ".join(str(document["seed"]) for document in own)
        done, asked = (sum(document[key] for document in own) for key in ("kills", "asked_kills"))
        note = f"{done} of {asked} faults done, " if done < asked else ""
        lines.append(f"- `{command}`, SEED {seeds} ({note}{where})")
    return "\n".join(lines)


def _memory(results: dict[str, dict[str, Any]]) -> str:
    """How the memory of driver and workers grew, in each run that is long enough to tell."""
    found = {name: _of_one_process(document["rows"]) for name, document in results.items()}
    found = {name: rows for name, rows in found.items() if len(rows) >= _FEWEST_FOR_GROWTH}
    if not found:
        return f"No run of {_FEWEST_FOR_GROWTH} faults says how memory grew."
    lines = [
        "Resident memory after a recovery, at the first three faults and at the last three "
        "(medians), and the slope over",
        "the second half of the faults:",
        "",
        "| run | faults | driver, MB | MB a fault | largest worker, MB | MB a fault |",
        "|---|---|---|---|---|---|",
    ]
    for name, rows in found.items():
        driver, worker = (
            [row[key] / 1e6 for row in rows] for key in ("driver_bytes", "worker_bytes")
        )
        lines.append(f"| {name} | {len(rows)} | {_growth(driver)} | {_growth(worker)} |")
    return "\n".join([*lines, *_between_faults(found)])


def _of_one_process(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The most rows with memory that one driver wrote; a run may have been resumed by others."""
    by_start: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("driver_bytes"):
            by_start.setdefault(row.get("start", 0), []).append(row)
    return max(by_start.values(), key=len, default=[])


def _between_faults(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Of soaks: how the largest worker grew from one recovery to the next fault."""
    lines = []
    for name, rows in found.items():
        lives = [
            (after["steps_done"] - row["steps_done"], after["worker_bytes_before"], row)
            for row, after in pairwise(rows)
            if row.get("worker_bytes") and after.get("worker_bytes_before")
        ]
        steps = [count for count, *_ in lives]
        if not lives or statistics.median(steps) < _FEWEST_FOR_SOAK:
            continue
        grown = statistics.median(last - row["worker_bytes"] for _, last, row in lives) / 1e6
        lines += [
            "",
            f"{name}: {rows[-1]['steps_done']:,} steps up to the last fault. From a recovery to "
            f"the next fault, {statistics.median(steps):.0f} steps later, the",
            f"largest worker grew by {grown:.1f} MB (medians).",
        ]
    return lines


def _growth(megabytes: list[float]) -> str:
    first, last = (statistics.median(part) for part in (megabytes[:3], megabytes[-3:]))
    half = megabytes[len(megabytes) // 2 :]
    slope = statistics.linear_regression(range(len(half)), half).slope
    return f"{first:.0f} → {last:.0f} | {slope:+.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--show", action="store_true", help="print; do not write the page")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    results = read_results(options.files or [RESULTS / name for name in files_of(text)])
    if not results:
        parser.error("no files: name results of `python -m benchmarks.kills --json`")
    new = with_figures(text, results)
    if options.show:
        for name, cell in _cells(results).items():
            print(f"{name}: {cell or 'not measured'}")
        print(f"\n{_memory(results)}")
    else:
        PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
