"""Predicted throughput per GPU on 1 to 64 V100s and 8 to 1,024 H100s, next to published figures.

    python -m benchmarks.scaling --folder DIR --jobs 16 --time-limit 580
    python -m benchmarks.scaling --folder DIR --only v100-gpt
    python -m benchmarks.scaling --list
    python -m benchmarks.scaling --show [FILE]
    python -m benchmarks.scaling --plot [FILE] --docs docs

The first command plans all cases that have no row in the folder yet, in a process each; after an
interruption, run it again. --keep copies its rows into benchmarks/results/scaling.json, replacing
older ones of the same cases. --show and --plot read that file by default. No device is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from autopar.errors import AutoparError
from benchmarks.scaling import running
from benchmarks.scaling.cases import chosen
from benchmarks.scaling.plots import write_plots
from benchmarks.scaling.tables import in_page, tables

RESULTS = running.ROOT / "benchmarks" / "results" / "scaling.json"
DOCS = running.ROOT / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--folder", default="scaling-rows", help="where rows are written")
    parser.add_argument("--jobs", type=int, default=1, help="cases planned side by side")
    parser.add_argument("--time-limit", type=float, help="seconds for all cases")
    parser.add_argument("--row-limit", type=float, default=running.ROW_LIMIT_S, help="for a case")
    parser.add_argument("--only", action="append", help="cluster, family, model, GPUs or a name")
    parser.add_argument("--keep", action="store_true", help=f"copy the rows into {RESULTS.name}")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--show", nargs="?", const=RESULTS, metavar="FILE", help="print tables")
    parser.add_argument(
        "--plot", nargs="?", const=RESULTS, metavar="FILE", help="write plots and tables"
    )
    parser.add_argument("--docs", default=DOCS, help="folder of scaling.md and images to write")
    parser.add_argument("--row", nargs=2, metavar=("NAME", "DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        return running.plan_case(*options.row)
    try:
        cases = chosen(options.only)
    except AutoparError as error:
        parser.error(str(error))
    if options.list:
        print("\n".join(case.name for case in cases))
    elif options.show:
        print(tables(_rows(options.show)))
    elif options.plot:
        rows, docs = _rows(options.plot), pathlib.Path(options.docs)
        page = docs / "scaling.md"
        page.write_text(in_page(page.read_text(), rows))
        for path in (page, *write_plots(rows, docs / "images")):
            print(path)
    else:
        rows = running.run(
            options.folder, options.jobs, options.time_limit, options.only, options.row_limit
        )
        print("\n" + tables(rows))
        if options.keep:
            running.keep_results(options.folder, RESULTS)


def _rows(path: str | pathlib.Path) -> list[dict]:
    return json.loads(pathlib.Path(path).read_text())["rows"]


if __name__ == "__main__":
    main()
