"""Faults while a pipeline trains on Ray: the errors, and the recovery.

    python -m benchmarks.kills [--kills N] [--seed S] [--disk FOLDER] [--json FILE]
    python -m benchmarks.kills --kills 32 --steps 2500 --every 500 --checkpoint-every 50    (a soak)
    python -m benchmarks.kills --mode processes --kills 20               (without Ray)

Rounds of 60 steps of a small MLP, alternating between a pipeline on two meshes of two processes and
one mesh of four processes, each process with two virtual CPU devices, on two Ray nodes of this
machine. Training uses `autopar.run_training` with a checkpoint every 5 steps. The kinds of kills
are in `tests/ray/kills.py`. `exact` means that all losses and the last state equal those of a run
without kills bit for bit; `within_stated` means that the error came within the time that
docs/ray.md states. `--disk` names a folder on a small file system (a tmpfs of 64 MiB, say), which
is filled at times. The wall clock jumps at times where a C compiler is installed. `driver_bytes`
and `worker_bytes` are the memory of the driver and of the largest worker after each recovery,
`worker_bytes_before` that of the largest worker before the fault. The soak has eight rounds,
so 20,000 steps, and a fault every 500.

The results file is written after every kill. If it has results of the same command, the benchmark
goes on after them, unless `--anew` is given; rows of one process have one `start`.

Runs with different seeds and files may run side by side; `python -m benchmarks.kills_page FILES…`
puts the figures of all of them into docs/training.md.

`--mode processes`: two processes of `jax.distributed`, started by hand as `torchrun` or SLURM would
start them, of which one is killed, stopped or asked to end; then the launcher starts both again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import autopar
from benchmarks.script import script_parser, write_json
from tests.ray import clock, kills
from tests.ray.process_kills import STATED_S as OF_PROCESSES
from tests.ray.process_kills import ProcessSoak, process_mixture

STATED_S = {"ray": kills.STATED_S, "processes": OF_PROCESSES}
Tell = Callable[[int, dict[str, Any]], None]


def about(mode: str) -> dict[str, Any]:
    return {
        "command": _command(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "ray")},
        "heartbeat_s": kills.HEARTBEAT_S,
        "silence_limit_s": kills.SILENCE_LIMIT_S,
        "stated_s": STATED_S[mode],
    }


def _command() -> str:
    given = [argument for argument in sys.argv[1:] if argument != "--anew"]
    return " ".join(["python -m benchmarks.kills", *given])


def earlier(path: str | None) -> dict[str, Any]:
    """What the same command has written to its file; empty if it has not."""
    if path is None or not Path(path).exists():
        return {}
    body = json.loads(Path(path).read_text())
    return body if body.get("command") == _command() else {}


def left_of(whats: Sequence[str], done: Sequence[str]) -> list[str]:
    """What is left to do, in its order."""
    left = list(whats)
    for what in done:
        if what in left:
            left.remove(what)
    return left


def summary(rows: list[dict[str, Any]], stated_s: dict[str, float]) -> dict[str, Any]:
    """By kind: how many, how many behaved as stated, and the times."""
    found = {}
    for what in dict.fromkeys(row["what"] for row in rows):
        own = [row for row in rows if row["what"] == what]
        errors = [row["error_s"] for row in own if row["error_s"] is not None]
        steps = [row["next_step_s"] for row in own if row["next_step_s"] is not None]
        found[what] = {
            "count": len(own),
            "exact": sum(bool(row["exact"]) for row in own),
            "within_stated": sum(e <= stated_s[what] for e in errors),
            "as_it_should_be": sum(not row["wrong"] for row in own),
            "error_s": [min(errors), statistics.median(errors), max(errors)] if errors else [],
            "driver_bytes": [row["driver_bytes"] for row in own],
            "worker_bytes": [row["worker_bytes"] for row in own],
            "next_step_s": [min(steps), statistics.median(steps), max(steps)] if steps else [],
        }
    return found


def on_ray(arguments: argparse.Namespace, whats: list[str], seed: int, tell: Tell) -> None:
    """Faults of workers, nodes, the driver and its host, on Ray."""

    def told(record: kills.Record) -> None:
        tell(record.number, record.as_row())

    with tempfile.TemporaryDirectory() as folder:
        nodes = kills.Nodes(2, cpus_per_node=8)
        try:
            options = kills.options(Path(folder) / "cache")
            autopar.init(**options, num_hosts=4, devices_per_host=2)
            kills.Soak(
                whats,
                list(kills.METHODS),
                Path(folder),
                seed,
                nodes=nodes,
                num_steps=arguments.steps,
                disk=arguments.disk,
                every=arguments.every,
                checkpoint_every=arguments.checkpoint_every,
                tell=told,
            ).run()
        finally:
            autopar.shutdown()
            nodes.close()


def in_processes(arguments: argparse.Namespace, whats: list[str], seed: int, tell: Tell) -> None:
    """Faults of processes of `jax.distributed`."""
    with tempfile.TemporaryDirectory() as folder:
        soak = ProcessSoak(Path(folder), seed, num_steps=arguments.steps)
        for number, what in enumerate(whats):
            tell(number, soak.fault(what))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--mode", choices=list(STATED_S), default="ray")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--steps", type=int, default=60, help="of a round")
    parser.add_argument("--every", type=int, default=0, help="the fewest steps between two faults")
    parser.add_argument("--checkpoint-every", type=int, default=kills.CHECKPOINT_EVERY)
    parser.add_argument("--anew", action="store_true", help="do not go on after earlier results")
    arguments = parser.parse_args()
    mode = arguments.mode
    if mode == "ray" and not clock.can_jump() and shutil.which("cc") is not None:
        with tempfile.TemporaryDirectory() as folder:
            again = ["-m", "benchmarks.kills", *sys.argv[1:]]
            raise SystemExit(clock.run_with_clock(again, Path(folder)))
    before = {} if arguments.anew else earlier(arguments.json)
    rows: dict[int, dict[str, Any]] = dict(enumerate(before.get("rows", [])))
    num_before = len(rows)
    seed = before.get("seed", arguments.seed)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    print(f"--kills {arguments.kills} --seed {seed}, {num_before} done before", flush=True)
    result = {**about(mode), "seed": seed, "asked_kills": arguments.kills}
    result["load_before"] = os.getloadavg()[0]

    def tell(number: int, row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        rows[num_before + number] = {**row, "number": num_before + number, "start": num_before}
        every = [rows[n] for n in sorted(rows)]
        body = {
            **result,
            "load_after": os.getloadavg()[0],
            "kills": len(every),
            "summary": summary(every, STATED_S[mode]),
            "rows": every,
        }
        write_json(arguments.json, body)

    if mode == "ray":
        whats = kills.mixture(arguments.kills, seed, arguments.disk is not None)
    else:
        whats = process_mixture(arguments.kills, seed)
    whats = left_of(whats, [row["what"] for row in rows.values()])
    run = on_ray if mode == "ray" else in_processes
    run(arguments, whats, seed + num_before, tell)


if __name__ == "__main__":
    main()
