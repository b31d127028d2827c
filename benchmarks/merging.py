"""How far XLA merges collectives: its own sizes and the plan's, for eight H100s, judged.

    python -m benchmarks.merging [--model gpt-2.6b …] [--json FILE]

plans each model once and compiles the plan twice for GPUs that need not be there (`pip install
'autopar[verify]'`): with XLA's own sizes up to which collectives are merged, and with those that
the plan chooses (`autopar/cost/merging.py`). A table shows what the judge reads from both
schedules. Models are those of `benchmarks.overlap`, and a small GPT.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.compiler import plan_step
from benchmarks.overlap import ROWS as LARGE
from benchmarks.script import check_names, command_line, script_parser, write_json
from benchmarks.suite.cases import Row, example_of
from benchmarks.suite.compiling import cluster_of, figures_of_plan

# Where parameters are small, XLA merges more of them.
ROWS = (Row("gpt-350m", 8, 8, layers=8), *LARGE)
_TITLES = ("model", "mesh", "step", "chosen", "ratio", "exposed", "chosen", "peak", "chosen")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", nargs="+", default=(), metavar="NAME", help="only these")
    options = parser.parse_args()
    check_names(parser, "--model", options.model, [row.model for row in ROWS])
    rows: dict[str, Any] = {}
    print("| " + " | ".join(_TITLES) + " |")
    print("|" + "---|" * len(_TITLES))
    for row in ROWS:
        if options.model and row.model not in options.model:
            continue
        rows[row.model] = _judged(row)
        print("| " + " | ".join([row.model, *cells_of(rows[row.model])]) + " |", flush=True)
        if options.json:
            command = command_line("benchmarks.merging", FILE=options.json)
            write_json(options.json, {"command": command, "rows": rows})


def cells_of(found: dict[str, Any]) -> list[str]:
    own, chosen = found["own"], found["chosen"]
    return [
        "×".join(map(str, found["mesh"])),
        *(f"{one['step_ms']:.2f} ms" for one in (own, chosen)),
        f"{chosen['step_ms'] / own['step_ms']:.3f}",
        *(f"{one['exposed_ms']:.2f} ms" for one in (own, chosen)),
        *(f"{one['peak_gb']:.2f} GB" for one in (own, chosen)),
    ]


def _judged(row: Row) -> dict[str, Any]:
    example = example_of(row)
    arguments = (example.abstract_state(), example.abstract_batch())
    chosen = plan_step(example.train_step, arguments, {}, cluster=cluster_of(row))
    own = replace(chosen, plan=replace(chosen.plan, xla_options=None))
    return {
        "mesh": list(chosen.plan.mesh_shape),
        "options": dict(chosen.plan.xla_options or ()),
        "own": figures_of_plan(own, row),
        "chosen": figures_of_plan(chosen, row),
    }


if __name__ == "__main__":
    main()
