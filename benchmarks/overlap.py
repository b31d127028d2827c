"""Plans with and without overlap in their prices, compiled for eight H100s and judged.

    python -m benchmarks.overlap [--model gpt-2.6b wresnet-2b]

plans each model twice, with `ShardingOptions(overlap=False)` and `True`, compiles both for GPUs
that need not be there (`pip install 'autopar[verify]'`), and prints what the judge reads from XLA's
schedules, as a table. Its last columns are, of the second plan, the communication that the planner
expects to be hidden and what is hidden by the judge. Two layers of each transformer, one block per
stage of a Wide-ResNet.
"""

from __future__ import annotations

import autopar
from autopar.compiler import plan_step
from benchmarks.script import check_names, command_line, script_parser, write_json
from benchmarks.suite.cases import Row, example_of
from benchmarks.suite.compiling import cluster_of, figures_of_plan

ROWS = (
    Row("gpt-2.6b", 8, 8, layers=2),
    Row("llama3-8b", 8, 2, {"seq_len": 2048}, layers=2),
    Row("moe-10b", 8, 8, layers=2),
    Row("bert-large", 8, 32, layers=2),
    Row("wresnet-2b", 8, 24, layers=1),
)
_TITLES = (
    *("model", "step", "with overlap", "exposed", "with overlap"),
    *("hidden, planned", "hidden, judged"),
)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", nargs="+", default=(), metavar="NAME", help="only these")
    options = parser.parse_args()
    check_names(parser, "--model", options.model, [row.model for row in ROWS])
    rows: dict[str, list[dict[str, float]]] = {}
    print("| " + " | ".join(_TITLES) + " |")
    print("|" + "---|" * len(_TITLES))
    for row in ROWS:
        if options.model and row.model not in options.model:
            continue
        both = rows[row.model] = [_judged(row, overlap) for overlap in (False, True)]
        print("| " + " | ".join([row.model, *cells_of(*both)]) + " |", flush=True)
        if options.json:
            write_json(
                options.json,
                {"command": command_line("benchmarks.overlap", FILE=options.json), "rows": rows},
            )


def cells_of(without: dict[str, float], with_overlap: dict[str, float]) -> list[str]:
    both = (without, with_overlap)
    figures = [one[key] for key in ("step_ms", "exposed_ms") for one in both]
    hidden = with_overlap["communication_ms"] - with_overlap["exposed_ms"]
    return [f"{ms:.2f} ms" for ms in (*figures, with_overlap["planned_hidden_ms"], hidden)]


def _judged(row: Row, overlap: bool) -> dict[str, float]:
    example = example_of(row)
    planned = plan_step(
        example.train_step,
        (example.abstract_state(), example.abstract_batch()),
        {},
        cluster=cluster_of(row),
        method=autopar.AutoParallel(options=autopar.ShardingOptions(overlap=overlap)),
    )
    planned_hidden_ms = 1e3 * (planned.plan.hidden_s or 0.0)
    return {**figures_of_plan(planned, row), "planned_hidden_ms": planned_hidden_ms}


if __name__ == "__main__":
    main()
