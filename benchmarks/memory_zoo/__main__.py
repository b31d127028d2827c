"""Predicted peak memory against XLA's for H100s, over models and kinds of plans; writes the page.

    python -m benchmarks.memory_zoo                                 # cases without a row
    python -m benchmarks.memory_zoo --model gpt vit --kind mesh     # these again
    python -m benchmarks.memory_zoo --anew --jobs 6 --limit-s 600   # all again, six at a time
    python -m benchmarks.memory_zoo --predict                       # predictions anew, no compiling
    python -m benchmarks.memory_zoo --budgets --jobs 6              # plans to a budget, by XLA
    python -m benchmarks.memory_zoo --budgets --anew --model vit    # all of a model's again
    python -m benchmarks.memory_zoo --page                          # only writes docs/memory.md

Every case is planned and compiled by `autopar.verify` in a process of its own, which is ended after
`--case-limit-s` seconds; after `--limit-s` seconds all are. Rows are written as they come, so the
same command goes on where it stopped: `--anew` begins with the oldest rows. A case that the limit
ends keeps its former row. `--predict` keeps XLA's figure where the plan has the same layouts as
before, and drops the row where it has others. This needs `jax[cuda13]` but no GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.memory_zoo.page import budgets_in_short, in_short, write_page
from benchmarks.memory_zoo.rows import budget_in_a_process, case_in_a_process
from benchmarks.script import check_names, script_parser, write_json

RESULTS = Path("benchmarks/results/memory_zoo.json")
BUDGETS = Path("benchmarks/results/memory_budgets.json")
PAGE = Path("docs/memory.md")
SHORTEST_S = 5.0  # a case is not begun with less time than this

One = TypeVar("One")
Row = dict[str, Any]


def main() -> None:
    from benchmarks.memory_zoo.cases import KINDS, all_cases, models

    parser = script_parser(__doc__)
    parser.set_defaults(json=str(RESULTS))
    parser.add_argument(
        "--model", nargs="+", metavar="NAME", help="only these, and anew but for --budgets"
    )
    parser.add_argument("--kind", nargs="+", metavar="NAME", help="only these, like --model")
    parser.add_argument("--predict", action="store_true", help="keep XLA's figures")
    parser.add_argument("--limit-s", type=float, default=1e9, help="seconds for all cases")
    parser.add_argument("--case-limit-s", type=float, default=1800, help="seconds for each case")
    parser.add_argument("--anew", action="store_true", help="rows that are there, too")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--budgets", action="store_true", help="plans to a budget instead")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    check_names(parser, "--model", options.model or (), models())
    check_names(parser, "--kind", options.kind or (), KINDS)
    limits = Limits(options.limit_s, options.case_limit_s, options.jobs)

    def wanted(case: Any) -> bool:
        is_of_model = options.model is None or case.model in options.model
        return is_of_model and (options.kind is None or case.kind in options.kind)

    if options.budgets:
        is_default = options.json == str(RESULTS)
        path = BUDGETS if is_default else Path(options.json)
        run_budgets(path, limits, wanted, options.anew)
        if is_default:
            write_results(read_rows(RESULTS))
        return
    rows = read_rows(Path(options.json))
    chosen = options.model is not None or options.kind is not None or options.anew
    todo = []
    for case in () if options.page else all_cases():
        known = rows.get((case.model, case.kind))
        if wanted(case) and not (known is None if options.predict else known and not chosen):
            todo.append(case)
    todo.sort(key=lambda case: rows.get((case.model, case.kind), {}).get("made", ""))

    def row_of(case: Any, limit_s: float) -> Row:
        return case_in_a_process(case.model, case.kind, not options.predict, limit_s)

    for case, row in rows_in_time(todo, row_of, limits):
        take_row(rows, case, row, options.predict)
        write_json(options.json, {"target": "h100-80gb", "rows": in_order(rows)})
    if Path(options.json) == RESULTS:
        write_results(rows)


def write_results(rows: dict[tuple[str, str], Row]) -> None:
    """The page, with plans to a budget, and with the names of cases that have no row."""
    from benchmarks.memory_zoo.cases import all_cases

    missing = [
        f"{case.model} ({case.kind})" for case in all_cases() if (case.model, case.kind) not in rows
    ]
    write_page(PAGE, in_order(rows), read_budgets(BUDGETS), missing)


class Limits:
    """Seconds for all cases, from now, and for each; and how many run at a time."""

    def __init__(self, all_s: float, case_s: float, num_jobs: int) -> None:
        self.end, self.case_s, self.num_jobs = time.monotonic() + all_s, case_s, num_jobs

    def left_s(self) -> float:
        return self.end - time.monotonic()


def rows_in_time(
    todo: Sequence[One], row_of: Callable[[One, float], Row], limits: Limits
) -> Iterator[tuple[One, Row]]:
    """Rows as they come. Cases that the limit of the whole ends, or lets not begin, have none."""

    def run(one: One) -> Row | None:
        left = limits.left_s()
        if left < SHORTEST_S:
            return None
        row = row_of(one, min(left, limits.case_s))
        return None if "error" in row and limits.left_s() <= 0 else row

    with ThreadPoolExecutor(max_workers=limits.num_jobs) as threads:
        pending = {threads.submit(run, one): one for one in todo}
        ended = 0
        for done in as_completed(pending):
            row = done.result()
            if row is None:
                ended += 1
            else:
                yield pending[done], row
        if ended:
            print(f"{ended} cases not done within the limit: run the command again", flush=True)


def run_budgets(path: Path, limits: Limits, wanted: Callable[[Any], bool], anew: bool) -> None:
    """Plans to a budget that have no row yet, or all anew, written as they come; the last line
    counts them. `wanted`: of a case."""
    from benchmarks.memory_zoo.cases import budget_cases

    known = {(row["model"], row["kind"], row["share"]): row for row in read_budgets(path)}
    cases = {(case.model, case.kind, share): case for case, share in budget_cases()}
    done_before = {one for one, row in known.items() if "error" not in row and not anew}
    todo = [one for one, case in cases.items() if wanted(case) and one not in done_before]
    todo.sort(key=lambda one: known.get(one, {}).get("made", ""))
    for one, row in rows_in_time(
        todo, lambda one, limit_s: budget_in_a_process(*one, limit_s), limits
    ):
        known[one] = row
        print(json.dumps(row), flush=True)
        rows = [known[one] for one in cases if one in known]
        write_json(str(path), {"target": "h100-80gb", "rows": rows})
    print(budgets_in_short(list(known.values())))


def read_budgets(path: Path) -> list[Row]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def take_row(rows: dict[tuple[str, str], Row], case: Any, row: Row, predicts: bool) -> None:
    """Put a new row in its place. If it only predicts, XLA's figure stays where the layouts did."""
    key = (case.model, case.kind)
    known = rows.get(key)
    if known is None or not predicts or "error" in row:
        rows[key] = row
    elif row["layouts"] == known.get("layouts"):
        rows[key] = {
            **known,
            "predicted_bytes": row["predicted_bytes"],
            "predicted": row["made"],
            "predicted_commit": row["commit"],
        }
    else:
        print(f"{case.name}: the plan has changed; compile it again", flush=True)
        del rows[key]
    if key in rows:
        print(f"{case.name}: {in_short(rows[key])}", flush=True)


def in_order(rows: dict[tuple[str, str], Row]) -> list[Row]:
    """As the cases are listed, however they came; rows of former cases last. A model that was
    studied since its row was made is no longer held out."""
    from benchmarks.memory_zoo.cases import all_cases

    cases = {(case.model, case.kind): case for case in all_cases()}
    order = {key: number for number, key in enumerate(cases)}
    return [
        {**rows[key], "held_out": cases[key].held_out}
        if key in cases and "held_out" in rows[key]
        else rows[key]
        for key in sorted(rows, key=lambda key: order.get(key, len(order)))
    ]


def read_rows(path: Path) -> dict[tuple[str, str], Row]:
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["model"], row["kind"]): row for row in rows}


if __name__ == "__main__":
    main()
