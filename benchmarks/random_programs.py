"""Random programs, each run by autopar and by `jax.jit`: how many are wrong, how many crash?

    python -m benchmarks.random_programs --seeds 0:10000 --jobs 16 --json FILE
    python -m benchmarks.random_programs --seeds 1234:1235        # one of them, with its traceback
    python -m benchmarks.random_programs --seeds 1234:1235 --shrink

Every seed is a case (tests/properties/random_cases.py) that depends on nothing else. Cases run in
worker processes on eight simulated CPU devices; an abort or a hang of XLA ends the worker, and the
case counts as crashed. FILE is written as the run goes on. A later run with the same FILE
runs only seeds that are missing there; `--again` adds those that failed. `--minutes 9` stops
after nine minutes. `--summary FILE` writes counts and failures.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.script import command_line, read_rows, script_parser, write_json

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",  # compile time matters more than run time
    "--xla_allow_excess_precision=false",  # half floats round where the program says so
    "--xla_cpu_multi_thread_eigen=false",  # a process has one core
    "--xla_cpu_parallel_codegen_split_count=1",
)
LIMIT_S = 300  # for one case, on a busy machine
SEEDS_PER_WORKER = 200  # then a fresh process, since XLA keeps what it compiled
WRITE_EVERY_S = 10


def main() -> None:
    options = _options()
    seeds = range(*options.seeds)
    rows = {row["seed"]: row for row in read_rows(options.json) or ()}
    if options.again:
        rows = {s: row for s, row in rows.items() if row["outcome"] in ("right", "refused")}
    missing = [seed for seed in seeds if seed not in rows]
    results = _Results(options.json, rows, len(missing))
    queue = _Queue(missing)
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(_run_seeds, queue, options, results.add) for _ in range(options.jobs)]
        for job in jobs:
            job.result()
    results.write()
    every = [results.rows[seed] for seed in sorted(results.rows) if seed in seeds]
    failures = [row for row in every if row["outcome"] != "right"]
    command = command_line("benchmarks.random_programs", FILE=options.json)
    write_json(options.summary, {"command": command, **summary(every), "rows": failures})
    for row in failures:
        if row["outcome"] != "refused":
            print(f"seed {row['seed']} ({row['kind']}) {row['outcome']}: {row['why']}")
    counts = Counter(row["outcome"] for row in every)
    print(f"seeds {seeds.start}:{seeds.stop}: {_counted(counts)}")
    sys.exit(1 if counts["wrong"] or counts["crashed"] else 0)


def _options() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--seeds", type=_range, default=(0, 10000), metavar="FIRST:LAST")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--minutes", type=float, default=1e6, help="then start no further case")
    parser.add_argument("--summary", metavar="FILE", help="write counts and failures to this file")
    parser.add_argument("--again", action="store_true", help="run failed seeds of FILE again")
    parser.add_argument("--shrink", action="store_true", help="drop what failures do not need")
    options = parser.parse_args()
    options.until = time.time() + 60 * options.minutes
    return options


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[k]} {k}" for k in ("right", "wrong", "crashed", "refused"))


class _Queue:
    """The seeds to run, for several threads."""

    def __init__(self, seeds: list[int]) -> None:
        self.seeds, self.lock = iter(seeds), Lock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self.lock:
            return next(self.seeds)


class _Results:
    """The rows so far, written to the file every few seconds."""

    def __init__(self, path: str | None, rows: dict[int, dict[str, Any]], missing: int) -> None:
        self.path, self.rows, self.missing = path, rows, missing
        self.begun, self.written_at, self.new = time.time(), 0.0, 0
        self.lock = Lock()

    def add(self, row: dict[str, Any]) -> None:
        with self.lock:
            self.rows[row["seed"]] = row
            self.new += 1
            if row["outcome"] in ("wrong", "crashed"):
                print(f"seed {row['seed']} {row['outcome']}: {row['why']}", flush=True)
            if time.time() - self.written_at > WRITE_EVERY_S:
                self.write()

    def write(self) -> None:
        self.written_at = time.time()
        rows = [self.rows[seed] for seed in sorted(self.rows)]
        document = {
            "command": command_line("benchmarks.random_programs", FILE=self.path),
            **summary(rows),
            "rows": rows,
        }
        if self.path:
            write_json(self.path + ".part", document)
            os.replace(self.path + ".part", self.path)
        each_s = (self.written_at - self.begun) / max(self.new, 1)
        counts = Counter(row["outcome"] for row in rows)
        print(f"{self.new} of {self.missing}, {each_s:.2f} s each: {_counted(counts)}", flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Seed range, outcomes by kind, and the time of a case."""
    by_kind: dict[str, dict[str, int]] = {}
    for row in rows:
        outcomes = by_kind.setdefault(row["kind"], {})
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    seconds = [row["seconds"] for row in rows]
    return {
        "versions": sorted({row["jax"] for row in rows if row.get("jax")}),
        "seeds": [rows[0]["seed"], rows[-1]["seed"] + 1] if rows else [],
        "cases": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
        "by_kind": {kind: by_kind[kind] for kind in sorted(by_kind)},
        "mean_s": round(sum(seconds) / max(len(seconds), 1), 2),
    }


# -- workers


def _run_seeds(
    seeds: Iterator[int], options: argparse.Namespace, add: Callable[[dict[str, Any]], None]
) -> None:
    """Runs seeds in a worker process, and in a new one when it has died or run many."""
    worker = None
    for number, seed in enumerate(seeds):
        if time.time() > options.until:
            break
        if worker is None or number % SEEDS_PER_WORKER == 0:
            if worker is not None:
                worker.end()
            worker = _Worker(options)
        row = worker.run(seed)
        add(row)
        if worker.is_lost:
            worker = None
    if worker is not None:
        worker.end()


class _Worker:
    """A process that runs one case at a time."""

    def __init__(self, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        verbose = options.seeds[1] - options.seeds[0] == 1
        self.process = context.Process(target=_work, args=(theirs, options.shrink, verbose))
        self.process.start()
        theirs.close()
        self.is_lost = False

    def run(self, seed: int) -> dict[str, Any]:
        begun = time.time()
        try:
            self.connection.send(seed)
            if self.connection.poll(LIMIT_S):
                return self.connection.recv()
            why = f"no answer within {LIMIT_S} s"
        except (EOFError, OSError):
            self.process.join()
            why = f"the process ended with {self.process.exitcode}"
        self.is_lost = True
        self.end()
        return _row(seed, "?", "crashed", why, time.time() - begun)

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def _row(seed: int, kind: str, outcome: str, why: str, seconds: float) -> dict[str, Any]:
    row = {"seed": seed, "kind": kind, "outcome": outcome, "seconds": round(seconds, 2)}
    return {**row, "why": why} if why else row


def _work(connection: Any, shrink: bool, verbose: bool) -> None:
    """Receives seeds, sends rows."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(FLAGS)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"  # XLA warns of slow reshardings
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import jax

    from tests.properties.random_cases import case_of, smaller

    for number in itertools.count():
        seed = connection.recv()
        begun = time.time()
        case = case_of(seed)
        if verbose:
            print(case)
        outcome, why = _outcome(case, verbose)
        row = _row(seed, case.kind, outcome, why, time.time() - begun)
        if outcome in ("wrong", "crashed") and shrink:
            kind = why.partition(":")[0]

            def fails(other: Any, wanted: tuple[str, str] = (outcome, kind)) -> bool:
                outcome, why = _outcome(other, False)
                return (outcome, why.partition(":")[0]) == wanted

            print(f"seed {seed}: {smaller(case, fails)}")
        connection.send({**row, "jax": jax.__version__})
        if number % 20 == 19:
            jax.clear_caches()


def _outcome(case: Any, verbose: bool) -> tuple[str, str]:
    """("right", ""), or what happened instead and why."""
    import autopar
    from tests.properties.random_cases import WrongResult, check_case

    try:
        check_case(case)
    except WrongResult as error:
        return "wrong", str(error)
    except autopar.MeshError as error:  # a mesh axis divides nothing of so small a program
        return "refused", str(error).partition("\n")[0]
    except Exception as error:
        if verbose:
            traceback.print_exc()
        text = str(error).partition("\n")[0][:300]
        return "crashed", f"{type(error).__name__}: {text}"
    return "right", ""


if __name__ == "__main__":
    main()
