"""Predicted peak memory against XLA's for H100s, over models and kinds of plans; writes the page.

    python -m benchmarks.memory_zoo                                 # cases without a row
    python -m benchmarks.memory_zoo --model gpt vit --kind mesh     # these again
    python -m benchmarks.memory_zoo --anew --jobs 6                 # all again, six at a time
    python -m benchmarks.memory_zoo --predict                       # predictions anew, no compiling
    python -m benchmarks.memory_zoo --budgets --jobs 6 --json FILE  # plans to a budget, by XLA
    python -m benchmarks.memory_zoo --page                          # only writes docs/memory.md

Every case is planned and compiled by `autopar.verify` in a process of its own, which is ended after
`--limit-s` seconds. Rows are written as they come, so an interrupted run goes on where it stopped.
`--predict` keeps XLA's figure where the plan has the same layouts as before, and drops the row
where it has others. This needs `jax[cuda13]` but no GPU.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.memory_zoo.page import in_short, write_page
from benchmarks.memory_zoo.rows import budget_in_a_process, case_in_a_process
from benchmarks.script import check_names, script_parser, write_json

RESULTS = Path("benchmarks/results/memory_zoo.json")
BUDGETS = "benchmarks/results/memory_budgets.json"
PAGE = Path("docs/memory.md")


def main() -> None:
    from benchmarks.memory_zoo.cases import KINDS, all_cases, models

    parser = script_parser(__doc__)
    parser.set_defaults(json=str(RESULTS))
    parser.add_argument("--model", nargs="+", metavar="NAME", help="only these, and anew")
    parser.add_argument("--kind", nargs="+", metavar="NAME", help="only these, and anew")
    parser.add_argument("--predict", action="store_true", help="keep XLA's figures")
    parser.add_argument("--limit-s", type=float, default=1800, help="seconds for each case")
    parser.add_argument("--anew", action="store_true", help="rows that are there, too")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--budgets", action="store_true", help="plans to a budget instead")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    check_names(parser, "--model", options.model or (), models())
    check_names(parser, "--kind", options.kind or (), KINDS)
    if options.budgets:
        run_budgets(options.json, options.jobs, options.limit_s, options.model)
        return
    rows = read_rows(Path(options.json))
    chosen = options.model is not None or options.kind is not None or options.anew
    todo = []
    for case in () if options.page else all_cases():
        wanted = case.model in (options.model or [case.model])
        wanted = wanted and case.kind in (options.kind or [case.kind])
        known = rows.get((case.model, case.kind))
        if wanted and not (known is None if options.predict else known and not chosen):
            todo.append(case)
    with ThreadPoolExecutor(max_workers=options.jobs) as threads:
        pending = {
            threads.submit(
                case_in_a_process, case.model, case.kind, not options.predict, options.limit_s
            ): case
            for case in todo
        }
        for done in as_completed(pending):
            take_row(rows, pending[done], done.result(), options.predict)
            write_json(options.json, {"target": "h100-80gb", "rows": in_order(rows)})
    if Path(options.json) == RESULTS:
        write_page(PAGE, in_order(rows))


def run_budgets(file: str, num_jobs: int, limit_s: float, models: list[str] | None) -> None:
    """Plans to a budget that have no row yet, written as they come; the last line counts them."""
    from benchmarks.memory_zoo.cases import budget_cases

    path = Path(BUDGETS if file == str(RESULTS) else file)
    known = json.loads(path.read_text())["rows"] if path.exists() else []
    done_before = {(row["model"], row["kind"], row["share"]) for row in known}
    todo = [
        (case.model, case.kind, share)
        for case, share in budget_cases()
        if (case.model, case.kind, share) not in done_before
        and case.model in (models or [case.model])
    ]
    with ThreadPoolExecutor(max_workers=num_jobs) as threads:
        pending = [threads.submit(budget_in_a_process, *one, limit_s) for one in todo]
        for done in as_completed(pending):
            known.append(done.result())
            print(json.dumps(known[-1]), flush=True)
            write_json(str(path), {"target": "h100-80gb", "rows": known})
    within = sum(row.get("within", False) for row in known)
    over = sum(row.get("within") is False for row in known)
    refused = sum("refused" in row for row in known)
    print(f"{len(known)} plans to a budget: {within} within, {over} over, {refused} refused")


def take_row(
    rows: dict[tuple[str, str], dict[str, Any]], case: Any, row: dict[str, Any], predicts: bool
) -> None:
    """Put a new row in its place. If it only predicts, XLA's figure stays where the layouts did."""
    key = (case.model, case.kind)
    known = rows.get(key)
    if known is None or not predicts or "error" in row:
        rows[key] = row
    elif row["layouts"] == known.get("layouts"):
        rows[key] = {**known, "predicted_bytes": row["predicted_bytes"]}
    else:
        print(f"{case.name}: the plan has changed; compile it again", flush=True)
        del rows[key]
    if key in rows:
        print(f"{case.name}: {in_short(rows[key])}", flush=True)


def in_order(rows: dict[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """As the cases are listed, however they came; rows of former cases last."""
    from benchmarks.memory_zoo.cases import all_cases

    order = {(case.model, case.kind): number for number, case in enumerate(all_cases())}
    return [rows[key] for key in sorted(rows, key=lambda key: order.get(key, len(order)))]


def read_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["model"], row["kind"]): row for row in rows}


if __name__ == "__main__":
    main()
