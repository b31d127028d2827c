"""Predicted peak memory against XLA's for H100s, over models and kinds of plans; writes the page.

    python -m benchmarks.memory_zoo                                 # cases without a row
    python -m benchmarks.memory_zoo --model gpt vit --kind mesh     # these again
    python -m benchmarks.memory_zoo --predict                       # predictions anew, no compiling
    python -m benchmarks.memory_zoo --page                          # only writes docs/memory.md

Every case is planned and compiled by `autopar.verify` in a process of its own, which is ended after
`--limit-s` seconds. Rows are written as they come, so an interrupted run goes on where it stopped.
`--predict` keeps XLA's figure where the plan has the same layouts as before, and drops the row
where it has others. This needs `jax[cuda13]` but no GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.memory_zoo.page import in_short, write_page
from benchmarks.memory_zoo.rows import case_in_a_process
from benchmarks.script import check_names, script_parser, write_json

RESULTS = Path("benchmarks/results/memory_zoo.json")
PAGE = Path("docs/memory.md")


def main() -> None:
    from benchmarks.memory_zoo.cases import KINDS, all_cases, models

    parser = script_parser(__doc__)
    parser.set_defaults(json=str(RESULTS))
    parser.add_argument("--model", nargs="+", metavar="NAME", help="only these, and anew")
    parser.add_argument("--kind", nargs="+", metavar="NAME", help="only these, and anew")
    parser.add_argument("--predict", action="store_true", help="keep XLA's figures")
    parser.add_argument("--limit-s", type=float, default=1800, help="seconds for each case")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    check_names(parser, "--model", options.model or (), models())
    check_names(parser, "--kind", options.kind or (), KINDS)
    rows = read_rows(Path(options.json))
    chosen = options.model is not None or options.kind is not None
    for case in () if options.page else all_cases():
        key = (case.model, case.kind)
        wanted = case.model in (options.model or [case.model])
        wanted = wanted and case.kind in (options.kind or [case.kind])
        known = rows.get(key)
        if not wanted or (known is None if options.predict else known and not chosen):
            continue
        row = case_in_a_process(*key, not options.predict, options.limit_s)
        if known is None or not options.predict or "error" in row:
            rows[key] = row
        elif row["layouts"] == known.get("layouts"):
            rows[key] = {**known, "predicted_bytes": row["predicted_bytes"]}
        else:
            print(f"{case.name}: the plan has changed; compile it again", flush=True)
            del rows[key]
        if key in rows:
            print(f"{case.name}: {in_short(rows[key])}", flush=True)
        write_json(options.json, {"target": "h100-80gb", "rows": list(rows.values())})
    if Path(options.json) == RESULTS:
        write_page(PAGE, list(rows.values()))


def read_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["model"], row["kind"]): row for row in rows}


if __name__ == "__main__":
    main()
