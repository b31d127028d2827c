"""A mixture of experts (GShard), trained on all devices by a step written for one.

    python examples/moe.py
    python examples/moe.py --size 2.4b --batch 256 --cluster ray --address auto
    autopar plan examples/moe.py:make_step --cluster 1x8:h100-sxm --set size=10b

The first command runs here, on virtual CPU devices if there is no GPU; the second on a Ray cluster;
the third plans for a cluster that need not exist. Model and step are in examples/models/moe.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import jax

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common, data
from examples.models import Example, moe

SIZES = {name.removeprefix("moe-"): model.config for name, model in moe.EXAMPLES.items()}
SIZES["tiny"] = dataclasses.replace(SIZES["tiny"], learning_rate=1e-2)


def make_example(
    size: str = "10b", batch: int = 1024, seq: int | None = None, layers: int | None = None
) -> Example:
    config = common.sized(SIZES, size, seq_len=seq, num_layers=layers)
    return moe.example(config, batch, f"moe-{size}")


def make_step(
    size: str = "10b", batch: int = 1024, seq: int | None = None, layers: int | None = None
) -> tuple[Any, tuple[Any, Any]]:
    """For `autopar plan` and `autopar sweep`. `size`: one of `SIZES`; `batch`: sequences per step;
    `seq`: tokens per sequence; `layers`: number of layers."""
    example = make_example(size, batch, seq, layers)
    return example.train_step, (example.abstract_state(), example.abstract_batch())


def main() -> None:
    parser = common.arguments(__doc__, sizes=SIZES, size="tiny", steps=60, batch=16)
    arguments = parser.parse_args()
    example = make_example(arguments.size, arguments.batch)
    config, shapes = example.config, example.abstract_batch()
    with common.devices(arguments):
        train_step = autopar.parallelize(example.train_step)
        # The state is created in the step's shards, never whole on one device.
        method = autopar.CreateStateParallel(train_step, shapes)
        state = autopar.parallelize(example.create_state, method=method)(jax.random.key(0))
        common.show(train_step.plan(state, shapes))

        tokens_per_step = arguments.batch * config.seq_len
        progress = common.Progress(arguments.steps, "tokens", tokens_per_step)
        source = data.token_chains(config.vocab_size, config.seq_len, arguments.batch)
        source = itertools.islice(source, arguments.steps)
        with autopar.data_loader(source, train_step) as batches:
            for batch in batches:
                state, loss = train_step(state, batch)
                progress(loss)


if __name__ == "__main__":
    main()
