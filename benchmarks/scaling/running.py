"""Cases to rows: a process per case, a few at a time, each with a time limit.

Each row has its own file in `FOLDER/rows`, so an interrupted run resumes: cases that have a row are
not planned again, unless the row says that time ran out. `FOLDER/scaling.json` has all rows,
rewritten after every row.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.scaling.cases import CASES, Case, matching

ROOT = pathlib.Path(__file__).parents[2]
ROW_LIMIT_S = 900.0
OUT_OF_TIME = "OutOfTime"


def run(
    folder: str | pathlib.Path,
    jobs: int = 1,
    time_limit_s: float | None = None,
    only: Sequence[str] | None = None,
    row_limit_s: float = ROW_LIMIT_S,
) -> list[dict[str, Any]]:
    """Plans the cases that have no row yet; returns all rows of the folder. After `time_limit_s`
    running cases are ended without a row; the next call plans them.

    only: as in `cases.chosen`, but unknown names are ignored, since a suite has other parts.
    """
    rows_folder = pathlib.Path(folder, "rows")
    rows_folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    ends = started + time_limit_s if time_limit_s is not None else float("inf")
    waiting = [case for case in matching(only) if not has_row(rows_folder, case)]
    running: dict[str, _Job] = {}
    try:
        while (waiting or running) and time.monotonic() < ends:
            while waiting and len(running) < jobs:
                case = waiting.pop(0)
                running[case.name] = _Job(case, rows_folder)
            for name, job in list(running.items()):
                if job.is_done(row_limit_s):
                    del running[name]
                    print(job.told(), flush=True)
                    collect(folder)
            time.sleep(0.2)
    finally:
        for job in running.values():
            job.end()
    left = [case.name for case in waiting] + list(running)
    if left:
        print(f"no time was left for {len(left)}: {', '.join(left)}", flush=True)
    return collect(folder)


def has_row(rows_folder: pathlib.Path, case: Case) -> bool:
    path = rows_folder / f"{case.name}.json"
    if not path.exists():
        return False
    return not json.loads(path.read_text()).get("error", "").startswith(OUT_OF_TIME)


def collect(folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """All rows of a folder, in the order of the cases; also written to one file."""
    paths = [pathlib.Path(folder, "rows", f"{name}.json") for name in CASES]
    rows = [json.loads(path.read_text()) for path in paths if path.exists()]
    write_results(pathlib.Path(folder, "scaling.json"), rows)
    return rows


def keep_results(folder: str | pathlib.Path, target: pathlib.Path) -> list[dict[str, Any]]:
    """Copies the rows of a folder into a results file, replacing those of the same cases. Rows that
    ran out of time replace nothing."""
    rows = json.loads(target.read_text())["rows"] if target.exists() else []
    known = {row["case"]: row for row in rows}
    for row in collect(folder):
        if row["case"] not in known or not row.get("error", "").startswith(OUT_OF_TIME):
            known[row["case"]] = row
    rows = [known[name] for name in CASES if name in known]
    write_results(target, rows)
    return rows


def write_results(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    about = "predicted by autopar's cost model; nothing was compiled or run"
    _write(path, {"about": about, "rows": rows})


def _write(path: pathlib.Path, content: Any) -> None:
    """Writes all of it or nothing, since a run may be ended at any time."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def plan_case(name: str, folder: str | pathlib.Path) -> None:
    """Plans one case, in its own process."""
    from benchmarks.scaling.rows import make_row

    _write(pathlib.Path(folder) / f"{name}.json", make_row(CASES[name]))


class _Job:
    """A case that is being planned."""

    def __init__(self, case: Case, rows_folder: pathlib.Path) -> None:
        self.case, self.path = case, rows_folder / f"{case.name}.json"
        self.started = time.monotonic()
        self.said = rows_folder / f"{case.name}.log"
        with open(self.said, "w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.scaling", "--row", case.name, str(rows_folder)],
                cwd=ROOT,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
                stdout=said,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def is_done(self, limit_s: float) -> bool:
        if self.process.poll() is not None:
            if self.process.returncode:
                last = (self.said.read_text().strip() or "no output").split("\n")[-1]
                self._fail(f"Failed: exit code {self.process.returncode}: {last}")
            else:
                self.said.unlink()
            return True
        if time.monotonic() - self.started < limit_s:
            return False
        self.end()
        self._fail(f"{OUT_OF_TIME}: more than {limit_s:.0f} s")
        return True

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=10)

    def _fail(self, error: str) -> None:
        case = self.case
        took = time.monotonic() - self.started
        row = {"case": case.name, "cluster": case.cluster, "family": case.family}
        row |= {"model": case.model, "devices": case.gpus, "planned_s": took, "error": error}
        _write(self.path, row)

    def told(self) -> str:
        from benchmarks.scaling.tables import line

        return line(json.loads(self.path.read_text()))
