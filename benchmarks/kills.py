"""Faults while a pipeline trains on Ray: the errors, and the recovery.

    python -m benchmarks.kills [--kills N] [--seed S] [--disk FOLDER] [--json FILE]
    python -m benchmarks.kills --kills 40 --steps 20000 --every 500      (a soak)

Rounds of 60 steps of a small MLP, alternating between a pipeline on two meshes of two processes and
one mesh of four processes, each process with two virtual CPU devices, on two Ray nodes of this
machine. Training uses `autopar.run_training` with a checkpoint every 5 steps. The kinds of kills
are in `tests/ray/kills.py`. `exact` means that all losses and the last state equal those of a run
without kills bit for bit; `within_stated` means that the error came within the time that
docs/ray.md states. `--disk` names a folder on a small file system (a tmpfs of 64 MiB, say), which
is filled at times. `driver_bytes` and `worker_bytes` are the memory of the driver and of the
largest worker after each recovery. The results file is written after every kill.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import autopar
from benchmarks.script import script_parser, write_json
from tests.ray import kills


def about() -> dict[str, Any]:
    return {
        "command": " ".join(["python -m benchmarks.kills", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "ray")},
        "heartbeat_s": kills.HEARTBEAT_S,
        "silence_limit_s": kills.SILENCE_LIMIT_S,
        "stated_s": kills.STATED_S,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By kind: how many, how many behaved as stated, and the times."""
    found = {}
    for what in dict.fromkeys(row["what"] for row in rows):
        own = [row for row in rows if row["what"] == what]
        errors = [row["error_s"] for row in own if row["error_s"] is not None]
        steps = [row["next_step_s"] for row in own if row["next_step_s"] is not None]
        found[what] = {
            "count": len(own),
            "exact": sum(bool(row["exact"]) for row in own),
            "within_stated": sum(e <= kills.STATED_S[what] for e in errors),
            "as_it_should_be": sum(not row["wrong"] for row in own),
            "error_s": [min(errors), statistics.median(errors), max(errors)] if errors else [],
            "driver_bytes": [row["driver_bytes"] for row in own],
            "worker_bytes": [row["worker_bytes"] for row in own],
            "next_step_s": [min(steps), statistics.median(steps), max(steps)] if steps else [],
        }
    return found


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--steps", type=int, default=60, help="of a round")
    parser.add_argument("--every", type=int, default=0, help="the fewest steps between two faults")
    arguments = parser.parse_args()
    print(f"--kills {arguments.kills} --seed {arguments.seed}", flush=True)
    rows: dict[int, dict[str, Any]] = {}
    result = {**about(), "seed": arguments.seed, "asked_kills": arguments.kills}
    result["load_before"] = os.getloadavg()[0]

    def tell(record: kills.Record) -> None:
        kills.show(record)
        rows[record.number] = record.as_row()
        every = [rows[number] for number in sorted(rows)]
        body = {
            **result,
            "load_after": os.getloadavg()[0],
            "kills": len(every),
            "summary": summary(every),
            "rows": every,
        }
        write_json(arguments.json, body)

    whats = kills.mixture(arguments.kills, arguments.seed, arguments.disk is not None)
    with tempfile.TemporaryDirectory() as folder:
        nodes = kills.Nodes(2, cpus_per_node=8)
        try:
            options = kills.options(Path(folder) / "cache")
            autopar.init(**options, num_hosts=4, devices_per_host=2)
            soak = kills.Soak(
                whats,
                list(kills.METHODS),
                Path(folder),
                arguments.seed,
                nodes=nodes,
                num_steps=arguments.steps,
                disk=arguments.disk,
                every=arguments.every,
                tell=tell,
            )
            soak.run()
        finally:
            autopar.shutdown()
            nodes.close()


if __name__ == "__main__":
    main()
