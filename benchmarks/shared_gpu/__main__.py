"""Plans measured on eight ranks of one GPU, against predictions and experts.

    python -m benchmarks.shared_gpu --profile FILE --json FILE        plans, runs, prints tables
    python -m benchmarks.shared_gpu plan --profile FILE --out DIR     only plans; needs no GPU
    python -m benchmarks.shared_gpu run --out DIR --json FILE         only runs what was planned
    python -m benchmarks.shared_gpu tables --json FILE [--rewrite docs/benchmarks.md]
    python -m benchmarks.shared_gpu --platform cpu --tiny             a dry run on the CPU

Running the same command again resumes: models that have plans, or results, are left out. Plans must
be made with the JAX release that runs them, since its traces may differ from those of another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PHASES = ("all", "plan", "run", "tables", "plan-one", "rank")  # the last two: for processes
MODELS = (
    "llama-long", "gpt", "gpt-wide", "gpt-vocab", "llama", "gpt-narrow", "moe", "bert", "vit",
    "wresnet", "dlrm",
)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("phase", nargs="?", choices=PHASES, default="all")
    parser.add_argument("--profile", help="a profile's file, measured on such ranks")
    parser.add_argument("--json", metavar="FILE", help="results")
    parser.add_argument("--out", default="shared_gpu_plans", metavar="DIR", help="plans")
    parser.add_argument("--work", metavar="DIR", help="compiled programs; default: DIR/work")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--candidates", type=int, default=10, help="plans besides the chosen ones")
    parser.add_argument("--experts", type=int, default=8, help="at most so many per model")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--ranks-per-gpu", type=int, default=8, help="1 with a GPU for each")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--device", help="preset; default: h200-sxm, or cpu")
    parser.add_argument("--nccl", help="a libnccl.so.2 from 2.30 on")
    parser.add_argument("--tiny", action="store_true", help="tiny models, for a dry run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sample-s", type=float, default=0.1, help="least time of a sample")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of the run phase")
    parser.add_argument("--case-limit-s", type=float, default=30.0, help="of a model's rounds")
    parser.add_argument("--hang-limit-s", type=float, default=60.0, help="of some steps")
    parser.add_argument("--plan-limit-s", type=float, default=60.0, help="of a model's plans")
    parser.add_argument("--kernels", action="store_true", help="profile a step of each program")
    parser.add_argument("--rewrite", metavar="TEXT", help="a page whose tables are replaced")
    parser.add_argument("--verbose", action="store_true", help="show what the ranks print")
    options = parser.parse_args()
    options.device = options.device or ("cpu" if options.platform == "cpu" else "h200-sxm")
    options.work = options.work or str(Path(options.out) / "work")
    return options


def main() -> None:
    options = parse()
    if options.phase == "rank":
        from .rank import main as run_rank

        run_rank(options)
        return
    os.environ["JAX_PLATFORMS"] = "cpu"  # this process must not open the GPU
    if options.phase == "plan-one":
        from .plans import plan_one

        for name in options.model:
            plan_one(name, options)
    elif options.phase == "tables":
        show_tables(options)
    else:
        run_phases(options)


def run_phases(options: argparse.Namespace) -> None:
    from .driver import Driver
    from .plans import plan_all

    Path(options.out).mkdir(parents=True, exist_ok=True)
    if options.phase in ("all", "plan"):
        plan_all(options.model, Path(options.out), plan_arguments(options), options.plan_limit_s)
    if options.phase in ("all", "run"):
        document = Driver(options, about(options)).run()
        print_tables(document)


def plan_arguments(options: argparse.Namespace) -> list[str]:
    names = ("profile", "candidates", "experts", "ranks", "ranks_per_gpu", "device", "plan_limit_s")
    given = [(name, getattr(options, name)) for name in names]
    found = [f"--{name.replace('_', '-')}={value}" for name, value in given if value is not None]
    return [*found, *(["--tiny"] if options.tiny else [])]


def about(options: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.pipeline_rows import machine
    from benchmarks.script import command_line

    return {
        "command": command_line("benchmarks.shared_gpu", FILE=options.json),
        **machine(),
        "gpu": gpu_text() if options.platform == "gpu" else None,
        "device": options.device,
        "rounds": options.rounds,
        "load": os.getloadavg()[0],
    }


def gpu_text() -> str | None:
    """Name and driver of the GPU."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None


def show_tables(options: argparse.Namespace) -> None:
    from .tables import tables_of, with_tables

    document = json.loads(Path(options.json).read_text())
    if options.rewrite:
        page = Path(options.rewrite)
        page.write_text(with_tables(page.read_text(), tables_of(document)))
    print_tables(document)


def print_tables(document: dict[str, Any]) -> None:
    from .tables import tables_of

    for table in tables_of(document).values():
        sys.stdout.write(table + "\n")


if __name__ == "__main__":
    main()
