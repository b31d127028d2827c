"""Training on Ray that survives a killed worker and continues from its last checkpoint.

    python examples/elastic_restart.py
    python examples/elastic_restart.py --checkpoints runs/a --kill-at 0 --address auto

The first command starts Ray here, trains on two hosts with a worker process each, and kills one of
them after step 15 (SIGKILL). `run_training` notices which one died, starts new workers, restores
the checkpoint of step 10 and replays the batches since then: the losses are the same. The second
joins a cluster and kills nothing; if the program itself is ended, the same command resumes.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common, data
from examples.gpt import SIZES, make_example


def main() -> None:
    parser = common.arguments(__doc__, sizes=SIZES, size="tiny", steps=30, batch=16)
    parser.set_defaults(cluster="ray")
    parser.add_argument(
        "--checkpoints", help="a folder that all hosts see; default: a temporary one"
    )
    parser.add_argument("--checkpoint-every", type=common.whole_number, default=10)
    parser.add_argument("--kill-at", type=int, default=15, help="step; 0 kills no worker")
    arguments = parser.parse_args()
    if arguments.address is None and arguments.hosts is None and arguments.devices is None:
        arguments.hosts, arguments.devices = 2, 4
    with tempfile.TemporaryDirectory() as temporary, common.devices(arguments):
        train(arguments, Path(arguments.checkpoints or temporary))


def train(arguments: Any, folder: Path) -> None:
    example = make_example(arguments.size, arguments.batch)
    train_step = autopar.parallelize(example.train_step, method=autopar.ShardParallel())
    losses: dict[int, float] = {}
    to_kill = {arguments.kill_at}

    def batches_from(first: int) -> Iterator[data.Batch]:
        config = example.config
        source = data.token_chains(config.vocab_size, config.seq_len, arguments.batch, first=first)
        return itertools.islice(source, arguments.steps - first)

    def on_step(number: int, loss: Any) -> None:
        value = float(loss)
        again = ""
        if number in losses:
            again = "  again, the same" if value == losses[number] else "  again, but different"
        losses[number] = value
        print(f"step {number}  loss {value:.4f}{again}", flush=True)
        if number in to_kill:
            to_kill.remove(number)
            print(f"killed worker process {kill_a_worker()}", flush=True)

    def on_restart(error: autopar.AutoparError) -> None:
        print(f"lost: {str(error).splitlines()[0]}")
        print(f"resuming from the checkpoint of step {autopar.latest_step(folder)}", flush=True)

    if (step := autopar.latest_step(folder)) is not None:
        print(f"resuming from the checkpoint of step {step}")
    autopar.run_training(
        train_step,
        example.create_state(),
        batches_from,
        checkpoint_dir=folder,
        checkpoint_every=arguments.checkpoint_every,
        on_step=on_step,
        on_restart=on_restart,
    )
    if losses:
        print(f"loss {losses[min(losses)]:.4f} → {losses[max(losses)]:.4f} in {max(losses)} steps")


def kill_a_worker() -> int:
    """Kills one of the workers that this program's Ray started on this host, without a warning,
    as a failure would. Returns its process id."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, *_ in rows}

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    workers = [int(pid) for pid, _, *args in rows if args and "ray::MeshWorker" in args[0]]
    workers = [pid for pid in workers if is_ours(pid)]
    if not workers:
        raise SystemExit("--kill-at: the workers are not on this host; kill one by hand")
    chosen = random.choice(workers)
    os.kill(chosen, signal.SIGKILL)
    return chosen


if __name__ == "__main__":
    main()
