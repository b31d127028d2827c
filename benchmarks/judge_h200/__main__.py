"""Train steps of many models on one H200: measured, judged by their HLO, and predicted.

    python -m benchmarks.judge_h200 measure --out FOLDER [--limit-s 300] [--only NAME …] [--tiny]
                                            [--held-out | --examples | --operations | …]
    python -m benchmarks.judge_h200 compare FOLDER [--json FILE] [--kernels NAME]
    python -m benchmarks.judge_h200 judge | predict FILE

`measure` compiles every step by plain `jax.jit` for the one GPU and times it; `--tiny` is a dry run
on any device. `--held-out` measures the held-out half alone, which needs no package but JAX;
`--planned` steps with loops as autopar runs them. In place of the models, `--examples` measures the
examples at real size, also as autopar runs them, `--operations` single operations (`operations`),
and `--rarer-operations` some of these. After `--limit-s` seconds no other step begins, and a minute
later the process ends. `compare` needs no GPU: it reads the compiled programs
(`autopar.measure.judge`), plans every step for one H200 with the table that comes with autopar, and
divides both figures by the measured seconds. Models that decide nothing are reported apart.
`--kernels` lists a step's kernels as judged and as profiled. `--json` writes the programs too, to
an archive beside the file: from it, `judge` judges the steps of such a file again. `predict` plans
them again, and leaves the judge's figures.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path

from benchmarks.script import check_names, command_line, write_json

GRACE_S = 60.0


def run_measure(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    ends_s = time.monotonic() + options.limit_s
    limit = threading.Timer(options.limit_s + GRACE_S, os._exit, (1,))
    limit.daemon = True
    limit.start()
    import jax

    from benchmarks.judge_h200.cases import (
        all_cases,
        example_cases,
        held_out_cases,
        planned_cases,
    )
    from benchmarks.judge_h200.measuring import Folder, measure
    from benchmarks.judge_h200.operations import all_operations, rarer_operations
    from benchmarks.pipeline_rows import machine

    kinds = {
        "operations": all_operations,
        "rarer-operations": rarer_operations,
        "examples": example_cases,
        "held-out": held_out_cases,
        "planned": planned_cases,
        "models": all_cases,
    }
    cases = list(kinds[options.kind]())
    wanted = options.only or [case.name for case in cases]
    check_names(parser, "--only", wanted, [case.name for case in cases])
    about = {
        "command": command_line("benchmarks.judge_h200", FOLDER=str(options.out)),
        **machine(),
        "device": jax.devices()[0].device_kind,
    }
    chosen = [case for case in cases if case.name in wanted]
    late = measure(chosen, Folder(options.out, about), tiny=options.tiny, ends_s=ends_s)
    if not late:
        limit.cancel()


def run_compare(options: argparse.Namespace) -> None:
    from benchmarks.judge_h200.comparing import (
        archive_of,
        compare,
        kernel_lines,
        text,
        write_programs,
    )

    if options.kernels:
        print("\n".join(kernel_lines(options.folder, options.kernels)))
        return
    document = compare(options.folder, tiny=options.tiny, plans=not options.judge_only)
    write_json(options.json, document)
    if options.json:
        write_programs(options.folder, archive_of(Path(options.json)))
    print(text(document["rows"]))


def run_again(options: argparse.Namespace) -> None:
    from benchmarks.judge_h200.comparing import predict, rejudge, text

    if options.command == "judge":
        document = rejudge(options.file)
    else:
        document = predict(options.file, tiny=options.tiny)
    write_json(str(options.file), document)
    print(text(document["rows"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    measure = commands.add_parser("measure", help="on a GPU")
    measure.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    measure.add_argument("--limit-s", type=float, default=300.0)
    measure.add_argument("--only", nargs="+", metavar="NAME")
    measure.set_defaults(kind="models")
    kind = measure.add_mutually_exclusive_group()
    for flag in ("--held-out", "--planned", "--examples", "--operations", "--rarer-operations"):
        kind.add_argument(flag, action="store_const", dest="kind", const=flag.removeprefix("--"))
    compare = commands.add_parser("compare", help="anywhere")
    compare.add_argument("folder", type=Path)
    compare.add_argument("--json", metavar="FILE", help="write all figures to this file")
    compare.add_argument("--kernels", metavar="NAME", help="only list this step's kernels")
    compare.add_argument("--judge-only", action="store_true", help="do not plan")
    again = [commands.add_parser(name, help="anywhere") for name in ("judge", "predict")]
    for command in again:
        command.add_argument("file", type=Path)
    for command in (measure, compare, again[1]):
        command.add_argument("--tiny", action="store_true", help="a dry run on any device")
    options = parser.parse_args()
    if options.command == "measure":
        run_measure(options, measure)
    elif options.command == "compare":
        run_compare(options)
    else:
        run_again(options)


if __name__ == "__main__":
    main()
