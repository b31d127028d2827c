"""How long large models take to plan for 8, 64 and 512 H100s; writes docs/planning_time.md.

    python -m benchmarks.planning_zoo                        # cases without a row, then the page
    python -m benchmarks.planning_zoo --case T5-11B Mamba    # these again
    python -m benchmarks.planning_zoo --without-deadline     # the same without a limit, to compare
    python -m benchmarks.planning_zoo --jobs 8 --cores 2     # eight at a time, on two cores each
    python -m benchmarks.planning_zoo --page                 # only writes the page

Each case is planned by the default method in its own process, which is ended after `--limit-s`
seconds. Rows are written as they come, so an interrupted run goes on where it stopped. Nothing is
compiled or run; no GPU is needed. `cpu_s` depends less on other load than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.planning_zoo.page import write_page
from benchmarks.planning_zoo.planning import plan_in_a_process
from benchmarks.script import check_names, script_parser, write_json

RESULTS = Path("benchmarks/results/planning_zoo.json")
PAGE = Path("docs/planning_time.md")
DEADLINE_S = 60.0  # the default of `ShardingOptions`


def read_results(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"limited": {}, "free": {}}


def _in_short(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"].splitlines()[0][:100]
    took = f"{row['planned_s']:.1f} s ({row['cpu_s']:.1f} s of CPU, load {row['load']:.1f})"
    return f"{took}, step {row['step_s']:.4g} s, gap {row['gap']:.2%}; {row['stopped'] or 'all'}"


def core_sets(jobs: int, each: int | None) -> list[tuple[int, ...]]:
    """The cores of every job, none of which has another's; all of them where it does not matter."""
    if each is None:
        return [()] * jobs
    cores = sorted(os.sched_getaffinity(0))
    if jobs * each > len(cores):
        raise SystemExit(f"--jobs {jobs} --cores {each}: this machine has {len(cores)} cores")
    return [tuple(cores[k * each : (k + 1) * each]) for k in range(jobs)]


def rows_of(
    names: Sequence[str], seconds: float, limit_s: float, cores: Sequence[tuple[int, ...]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cases and their rows as they come, one at a time for every set of cores."""
    free: SimpleQueue[tuple[int, ...]] = SimpleQueue()
    for each in cores:
        free.put(each)

    def planned(name: str) -> tuple[str, dict[str, Any]]:
        own = free.get()
        try:
            return name, plan_in_a_process(name, seconds, limit_s, own)
        finally:
            free.put(own)

    with ThreadPoolExecutor(len(cores)) as pool:
        for done in as_completed([pool.submit(planned, name) for name in names]):
            yield done.result()


def _options(known: Sequence[str]) -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.set_defaults(json=str(RESULTS))
    parser.add_argument("--case", nargs="+", metavar="NAME", help="only these, and anew")
    parser.add_argument("--without-deadline", action="store_true", help="plan without a limit")
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds for each case")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--cores", type=int, help="cores that each case has to itself")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    check_names(parser, "--case", options.case or (), known)
    return options


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from benchmarks.planning_zoo.cases import CASES

    options = _options(list(CASES))
    results = read_results(Path(options.json))
    kind, seconds = ("free", 0.0) if options.without_deadline else ("limited", DEADLINE_S)
    names = options.case or [name for name in CASES if name not in results[kind]]
    cores = core_sets(options.jobs, options.cores)
    if not options.page:
        for name, row in rows_of(names, seconds, options.limit_s, cores):
            results[kind][name] = row
            print(f"{name}: {_in_short(row)}", flush=True)
            write_json(options.json, results)
    if Path(options.json) == RESULTS:
        write_page(PAGE, results, list(CASES))


if __name__ == "__main__":
    main()
