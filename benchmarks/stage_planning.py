"""How long fully automatic pipeline planning takes, for GPTs of growing size and depth.

    python -m benchmarks.stage_planning [--only NAME] [--json FILE]

Nothing is compiled and no device is needed: arguments are shapes. Each row is planned from scratch
in its own process. `cpu` is the processor time of a row, which depends less on other load than wall
time. For the plans that the search solves exactly, the exact step is compared with the step by its
tables. With --json, rows already in the file are kept unless they are measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

import autopar
from benchmarks.pipeline_rows import line, machine, planned_row
from benchmarks.script import read_rows, script_parser, write_json
from examples.models import Example, build

H100 = "h100-sxm"
BATCH = 1024
ALPA_39B_S = 2400  # roughly, on a cluster of 64 V100s: Alpa, OSDI'22


@dataclass(frozen=True)
class Case:
    hosts: int
    sizes: dict[str, int] = field(default_factory=dict)

    def example(self) -> Example:
        return build("gpt-1.3b", BATCH, dtype=jnp.bfloat16, **self.sizes)

    def cluster(self) -> autopar.ClusterSpec:
        return autopar.ClusterSpec(self.hosts, 8, H100)


def gpt(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, int]:
    return {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads}


CASES = {
    "GPT-6.7B on 2×8": Case(2, gpt(32, 4096, 32)),
    "GPT-39B on 8×8": Case(8, gpt(48, 8192, 64)),
    "24 layers on 8×8": Case(8, gpt(24, 8192, 64)),
    "96 layers on 8×8": Case(8, gpt(96, 8192, 64)),
}
GROWTH = ("24 layers on 8×8", "96 layers on 8×8")


def measure(name: str) -> dict[str, Any]:
    case = CASES[name]
    row = planned_row(case.example(), case.cluster(), autopar.AutoParallel())
    return {**row, "model": name, "machine": machine()}


def growth(rows: dict[str, dict[str, Any]]) -> dict[str, float] | None:
    """How much longer planning takes with four times as many layers."""
    if not all(name in rows for name in GROWTH):
        return None
    few, many = (rows[name] for name in GROWTH)
    return {key: many[key] / few[key] for key in ("planned_s", "cpu_s")}


def table_errors(row: dict[str, Any]) -> list[float]:
    """Exact step over the tables' step, for each solved plan."""
    return [exact / by_tables for by_tables, exact in row.get("checked", ())]


def _in_own_process(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.stage_planning", "--row", name]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(made.stdout.splitlines()[-1])


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--only", choices=list(CASES), action="append")
    parser.add_argument("--row", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options.row)))
        return
    rows = read_rows(options.json) or {}
    for name in options.only or CASES:
        rows[name] = _in_own_process(name)
        print(line(name, rows[name]), flush=True)
        errors = ", ".join(f"{error:.3f}" for error in table_errors(rows[name]))
        print(f"{'':22s} exact step over the tables': {errors or 'none solved'}", flush=True)
        about = {"alpa_39b_on_64_v100_s": ALPA_39B_S, "growth_24_to_96_layers": growth(rows)}
        write_json(options.json, {**about, "rows": rows})
    found = growth(rows)
    if found:
        print(f"96 layers over 24: {found['planned_s']:.2f} ({found['cpu_s']:.2f} cpu)")


if __name__ == "__main__":
    main()
