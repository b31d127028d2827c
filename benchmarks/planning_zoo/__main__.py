"""How long large models take to plan for 8, 64 and 512 H100s; writes docs/planning_time.md.

    python -m benchmarks.planning_zoo                        # cases without a row, then the page
    python -m benchmarks.planning_zoo --case T5-11B Mamba    # these again
    python -m benchmarks.planning_zoo --without-deadline     # the same without a limit, to compare
    python -m benchmarks.planning_zoo --page                 # only writes the page

Each case is planned by the default method in its own process, which is ended after `--limit-s`
seconds. Rows are written as they come, so an interrupted run goes on where it stopped. Nothing is
compiled or run; no GPU is needed. `cpu_s` depends less on other load than wall time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
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


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from benchmarks.planning_zoo.cases import CASES

    parser = script_parser(__doc__)
    parser.set_defaults(json=str(RESULTS))
    parser.add_argument("--case", nargs="+", metavar="NAME", help="only these, and anew")
    parser.add_argument("--without-deadline", action="store_true", help="plan without a limit")
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds for each case")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    check_names(parser, "--case", options.case or (), CASES)
    results = read_results(Path(options.json))
    kind, seconds = ("free", 0.0) if options.without_deadline else ("limited", DEADLINE_S)
    for name in () if options.page else options.case or CASES:
        if name in results[kind] and not options.case:
            continue
        results[kind][name] = plan_in_a_process(name, seconds, options.limit_s)
        print(f"{name}: {_in_short(results[kind][name])}", flush=True)
        write_json(options.json, results)
    if Path(options.json) == RESULTS:
        write_page(PAGE, results, list(CASES))


if __name__ == "__main__":
    main()
