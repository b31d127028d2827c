"""A scanned GPT as a pipeline in processes that SLURM or Kubernetes starts, with checkpoints.

    sbatch examples/clusters/slurm.sh
    kubectl apply -f examples/clusters/kubernetes.yaml
    autopar launch --ranks 4 --platform cpu -- python examples/clusters/train.py --size tiny

Every process runs this script. A job that is started again goes on from the last checkpoint,
with as many processes as before or others. See docs/multi_controller.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path

import jax

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where the package `examples` is
from examples import data
from examples.models import build

SIZES = {"tiny": ("gpt-tiny", 4), "1.3b": ("gpt-1.3b", 24)}  # model, layers


def join() -> None:
    """Join the job's other processes, before anything touches a device."""
    if "COORDINATOR" in os.environ:  # kubernetes.yaml sets these
        jax.distributed.initialize(
            os.environ["COORDINATOR"],
            int(os.environ["NUM_PROCESSES"]),
            int(os.environ["JOB_COMPLETION_INDEX"]),
        )
    else:
        jax.distributed.initialize()  # SLURM and `autopar launch` say the rest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="1.3b")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="in all, with earlier starts")
    parser.add_argument("--checkpoints", help="a folder that all hosts see")
    arguments = parser.parse_args()

    join()
    name, num_layers = SIZES[arguments.size]
    example = build(name, batch_size=arguments.batch, num_layers=num_layers, scan_layers=True)
    shapes = example.abstract_batch()
    stages = autopar.UniformStages(arguments.stages)
    method = autopar.PipeshardParallel(arguments.micro_batches, stages=stages)
    train_step = autopar.parallelize(example.train_step, method=method)
    method = autopar.CreateStateParallel(train_step, shapes)
    create_state = autopar.parallelize(example.create_state, method=method)

    folder, state = arguments.checkpoints, create_state(jax.random.key(0))
    first = (folder and autopar.latest_step(folder)) or 0
    if first:
        state = autopar.restore_checkpoint(folder, train_step)
    config = example.config
    batches = data.token_chains(config.vocab_size, config.seq_len, arguments.batch, first=first)
    batches = itertools.islice(batches, max(0, arguments.steps - first))
    with autopar.data_loader(batches, train_step) as loader:
        for number, batch in enumerate(loader, first + 1):
            state, loss = train_step(state, batch)
            value = float(loss)  # small results can be read in every process
            if jax.process_index() == 0:
                print(f"step {number}: loss {value:.4f}", flush=True)
            if folder and (number % 100 == 0 or number == arguments.steps):
                autopar.save_checkpoint(folder, state, number)


if __name__ == "__main__":
    main()
