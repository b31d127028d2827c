"""Plans the zoo of `tests/zoo` at real sizes for 8 and 64 H100s, and writes docs/zoo.md.

    python -m benchmarks.zoo                              # whatever is missing, then the page
    python -m benchmarks.zoo --program optax-muon dit     # these again
    python -m benchmarks.zoo --check                      # runs the tests of the zoo instead
    python -m benchmarks.zoo --page                       # only writes the page

Each program is planned in its own process, which is ended after `--limit-s` seconds: a program
that takes too long, or too much memory, costs its own row only. Rows are written as they come, so
an interrupted run goes on where it stopped; with `--json`, they go to another file and the page
stays as it is. Nothing is compiled or run; no GPU is needed. With `--check`, the tests of
`tests/zoo` run program by program, and their outcomes are kept as well.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.script import check_names, script_parser, write_json
from benchmarks.zoo.checking import check_program
from benchmarks.zoo.page import write_page
from benchmarks.zoo.planning import METHODS, plan_in_a_process

RESULTS = Path("benchmarks/results/zoo.json")
PAGE = Path("docs/zoo.md")


def read_results(path: Path) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())
    target = "H100 80GB SXM, 8 to a host (planned, neither compiled nor run)"
    return {"target": target, "plans": {}, "checks": {}}


def plan_all(options: argparse.Namespace, results: dict[str, Any], names: list[str]) -> None:
    for num_devices in options.devices:
        rows = results["plans"].setdefault(str(num_devices), {})
        for name in names:
            if name in rows and not options.program and not options.again:
                continue
            rows[name] = _row(name, num_devices, options)
            print(f"{name} on {num_devices}: {_in_short(rows[name])}", flush=True)
            write_json(options.json, results)


def _row(name: str, num_devices: int, options: argparse.Namespace) -> dict[str, Any]:
    """What does not fit by sharding alone may fit in micro-batches or stages: "auto" tries them."""
    row = plan_in_a_process(name, num_devices, options.method, options.limit_s)
    if row.get("error", "").startswith("MemoryBudgetError") and options.method == "shard":
        row = plan_in_a_process(name, num_devices, "auto", options.limit_s)
    return row


def check_all(options: argparse.Namespace, results: dict[str, Any], names: list[str]) -> None:
    for name in names:
        if name in results["checks"] and not options.program and not options.again:
            continue
        row = check_program(name, options.limit_s)
        if row:
            results["checks"][name] = row
            write_json(options.json, results)
        print(f"{name}: {row or 'its packages are not installed'}", flush=True)


def _in_short(row: dict[str, Any]) -> str:
    if "error" in row:
        return row["error"].splitlines()[0][:100]
    return f"{row['planned_s']:.1f} s, {row['peak_gib']:.1f} GiB, {1e3 * row['step_s']:.1f} ms"


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    from tests.zoo.program import all_programs

    parser = script_parser(__doc__)
    parser.set_defaults(json=str(RESULTS))
    parser.add_argument("--program", nargs="+", metavar="NAME", help="only these, and anew")
    parser.add_argument("--devices", nargs="+", type=int, choices=(8, 64), default=[8, 64])
    parser.add_argument("--method", choices=METHODS, default="shard")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds for each program")
    parser.add_argument("--again", action="store_true", help="all programs anew")
    parser.add_argument("--check", action="store_true", help="run the tests of the zoo")
    parser.add_argument("--page", action="store_true", help="only write docs/zoo.md")
    options = parser.parse_args()
    programs = all_programs()
    check_names(parser, "--program", options.program or (), programs)
    results = read_results(Path(options.json))
    names = options.program or list(programs)
    if options.check:
        check_all(options, results, names)
    elif not options.page:
        plan_all(options, results, names)
    if Path(options.json) == RESULTS:
        write_page(PAGE, results)


if __name__ == "__main__":
    main()
