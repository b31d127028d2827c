"""Gradients accumulated over micro-batches: the same numbers in less memory.

    python examples/gradient_accumulation.py
    python examples/gradient_accumulation.py --micro-batches 8 --devices 4

The step is unchanged. `num_micro_batches=n` runs it over n parts of its batch, adds up the
gradients, reduces them once, and updates once. Means over masked tokens and dropout are those of
the whole batch, so the losses agree with those of the plain step.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common, data
from examples.models import build

TOLERANCE = 1e-3  # for losses: the order of additions differs


def main() -> None:
    parser = common.arguments(__doc__, steps=20, batch=64)
    parser.add_argument("--micro-batches", type=common.whole_number, default=4)
    arguments = parser.parse_args()
    example = build("bert-tiny", arguments.batch, num_layers=1, learning_rate=3e-3)
    config, shapes = example.config, example.abstract_batch()
    source = data.masked_topics(
        config.vocab_size, config.seq_len, arguments.batch, config.masked_fraction
    )
    batches = list(itertools.islice(source, arguments.steps))
    with common.devices(arguments):
        losses = {}
        for num in (1, arguments.micro_batches):
            method = autopar.ShardParallel(num_micro_batches=num)
            train_step = autopar.parallelize(example.train_step, method=method)
            plan = train_step.plan(example.abstract_state(), shapes)
            peak = plan.estimated_peak_bytes / 2**20
            print(f"{num} micro-batch(es): predicted peak memory {peak:.2f} MiB per device")
            state, losses[num] = example.create_state(), []
            progress = common.Progress(arguments.steps, "tokens", arguments.batch * config.seq_len)
            for batch in batches:
                state, loss = train_step(state, batch)
                losses[num].append(float(loss))
                progress(loss)
            print()
    whole, parts = losses[1], losses[arguments.micro_batches]
    worst = max(abs(a - b) for a, b in zip(whole, parts, strict=True))
    print(f"losses agree: {worst <= TOLERANCE} (largest difference {worst:.1e})")
    raise SystemExit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
