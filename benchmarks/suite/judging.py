"""The kept programs of `autopar bench`, judged by the judge of this tree: results → results.

    python -m benchmarks.suite.judging FOLDER

rewrites the figures of every result in FOLDER that has its program beside it, and then FOLDER's
`suite.json`. Nothing is compiled. Pipelines keep their figures: their steps are simulated with a
plan, which is not kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError
from autopar.measure.judge import judge
from benchmarks.suite.cases import Row
from benchmarks.suite.command import RESULTS, collected, merge, read_results
from benchmarks.suite.compiling import cluster_of, figures_of
from benchmarks.suite.programs import SUFFIX, read_program


def judged_again(result: dict[str, Any], row: Row, program: Path) -> dict[str, Any]:
    """A result with the figures of its program."""
    text, hosts = read_program(program)
    judged = judge(text, cluster_of(row), hosts)
    return {**result, **figures_of([(1, judged)], judged.step_s, 1e9 * result["peak_gb"])}


def judge_file(path: Path) -> int:
    """Judges the results of a file anew; returns how many had a program."""
    document = json.loads(path.read_text(encoding="utf-8"))
    row = Row(**document["row"])
    count = 0
    for index, result in enumerate(document.get("results", [])):
        program = path.with_name(f"{path.stem}-{index}{SUFFIX}")
        if program.is_file():
            document["results"][index] = judged_again(result, row, program)
            count += 1
    if count:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return count


def judge_folder(folder: Path) -> int:
    """Judges all results of a folder anew; returns how many had a program."""
    suite = folder / RESULTS
    part = read_results(suite, "folder:").get("h100")
    paths = sorted((folder / "h100").glob("*/*.json"))
    if part is None or not paths:
        raise ArgumentError(
            f"{folder}: has no results for H100s. Name the --folder of `autopar bench --only h100`."
        )
    count = sum(map(judge_file, paths))
    rows = [Row(**json.loads(path.read_text(encoding="utf-8"))["row"]) for path in paths]
    by_name = {row.name: row for row in rows}
    merge({"h100": {**part, "rows": collected(folder / "h100", list(by_name.values()))}}, suite)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the --folder of `autopar bench`")
    try:
        print(f"{judge_folder(parser.parse_args().folder)} programs judged")
    except ArgumentError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
