"""Every operator of JAX through autopar: where its rule comes from, and whether it computes what
`jax.jit` does.

    python -m benchmarks.operators --json FILE --page docs/operators.md

The cases are those of tests/operators: a tiny program for each primitive, forward and, where JAX
has one, gradient, on eight simulated CPU devices as a mesh (8,) and as a mesh (2, 4). `--page`
writes the tables between the markers of the page, for the JAX that is installed. Takes three
minutes on one core.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.script import command_line, script_parser, write_json
from benchmarks.suite.tables import table_text

FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
_MARKED = re.compile(r"(<!-- operators:([\w-]+) -->\n).*?(<!-- /operators:\2 -->)", re.DOTALL)
_MEANING = {
    "Shardy": "the rule that XLA's partitioner follows, read from Shardy",
    "ours": "a rule of autopar's, where Shardy has none or XLA splits badly",
    "loop": "control flow: the bodies are sharded equation by equation",
    "inlined": "its body, or simpler operators, take its place before anything is sharded",
    "replicated": "every device computes all of it",
}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--page", metavar="FILE", help="write the tables into this page")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"] = "cpu", FLAGS
    rows = measured_rows()
    import jax

    from tests.operators.excluded import EXCLUDED
    from tests.operators.primitives import primitives

    excluded = {name: EXCLUDED[name] for name in primitives() if name in EXCLUDED}
    document = {
        "command": command_line("benchmarks.operators", FILE=options.json),
        "jax": jax.__version__,
        "rows": rows,
        "excluded": excluded,
    }
    write_json(options.json, document)
    if options.page:
        page = Path(options.page)
        page.write_text(with_tables(page.read_text(), document))
    wrong = [row for row in rows if any(row["wrong"])]
    for row in wrong:
        print(f"{row['primitive']}: {'; '.join(filter(None, row['wrong']))}")
    print(f"{len(rows) - len(wrong)} of {len(rows)} operators are right, JAX {jax.__version__}")
    sys.exit(1 if wrong else 0)


def measured_rows() -> list[dict[str, Any]]:
    """A row per primitive: source and text of its rule, what is wrong on each mesh."""
    from tests.operators.cases import load
    from tests.operators.check import MESHES, families, wanted_results, wrong_cases
    from tests.operators.sources import source_of

    rows = []
    for family, cases in families(load()).items():
        print(f"{family}: {len(cases)}", flush=True)
        wanted = wanted_results(cases)
        wrong = [wrong_cases(cases, mesh, wanted) for mesh in MESHES]
        for case in cases:
            source = source_of(case)
            row = {
                "primitive": case.primitive,
                "family": family,
                "source": source.source,
                "rule": source.rule,
                "note": source.note,
                "gradient": case.gradient,
                "wrong": [found.get(case.primitive, "") for found in wrong],
            }
            rows.append(row)
    return sorted(rows, key=lambda row: row["primitive"])


def with_tables(text: str, document: dict[str, Any]) -> str:
    """The page with its tables replaced."""
    tables = {
        "summary": summary_table(document),
        "table": operators_table(document["rows"]),
        "excluded": excluded_table(document["excluded"]),
    }
    return _MARKED.sub(lambda match: match[1] + tables[match[2]] + match[3], text)


def summary_table(document: dict[str, Any]) -> str:
    rows = document["rows"]
    counts = Counter(row["source"] for row in rows)
    right = sum(not any(row["wrong"]) for row in rows)
    lines = [[source, str(counts[source]), meaning] for source, meaning in _MEANING.items()]
    gradients = sum(row["gradient"] for row in rows)
    text = (
        f"JAX {document['jax']} has {len(rows) + len(document['excluded'])} primitives. "
        f"{len(rows)} have a case, {gradients} of them with a gradient: {right} are right on both "
        f"meshes.\nThe other {len(document['excluded'])} have none, "
        "[for reasons](#without-a-case).\n\n"
    )
    return text + table_text(["rule from", "operators", "meaning"], lines)


def operators_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            f"`{row['primitive']}`",
            row["source"],
            f"`{row['rule']}`" if row["rule"] else "",
            "yes" if row["gradient"] else "",
            *("right" if not wrong else f"**{wrong}**" for wrong in row["wrong"]),
            row["note"],
        ]
        for row in rows
    ]
    return table_text(
        ["primitive", "rule from", "rule", "gradient", "(8,)", "(2, 4)", "note"], lines
    )


def excluded_table(excluded: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, reason in excluded.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    lines = [[reason, ", ".join(names)] for reason, names in sorted(by_reason.items())]
    return table_text(["why", "primitives"], lines)


if __name__ == "__main__":
    main()
