"""BERT on masked tokens, with dropout, trained on all devices by a step written for one.

    python examples/bert.py
    python examples/bert.py --size large --batch 256 --cluster ray --address auto
    autopar plan examples/bert.py:make_step --cluster 1x8:h100-sxm

Dropout draws the same bits on eight devices as on one. The loss is a mean over masked tokens, whose
number differs between devices. Model and step are in examples/models/bert.py.
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
from examples.models import bert

SIZES = {name: bert.EXAMPLES[f"bert-{name}"].config for name in ("tiny", "large")}
SIZES["tiny"] = dataclasses.replace(SIZES["tiny"], learning_rate=3e-3)


def make_step(size: str = "large", batch: int = 256) -> tuple[Any, tuple[Any, Any]]:
    """For `autopar plan` and `autopar sweep`."""
    example = bert.example(common.sized(SIZES, size), batch)
    return example.train_step, (example.abstract_state(), example.abstract_batch())


def main() -> None:
    parser = common.arguments(__doc__, sizes=SIZES, size="tiny", steps=80, batch=16)
    arguments = parser.parse_args()
    example = bert.example(SIZES[arguments.size], arguments.batch)
    config, shapes = example.config, example.abstract_batch()
    with common.devices(arguments):
        train_step = autopar.parallelize(example.train_step)
        method = autopar.CreateStateParallel(train_step, shapes)
        state = autopar.parallelize(example.create_state, method=method)(jax.random.key(0))
        common.show(train_step.plan(state, shapes))

        tokens_per_step = arguments.batch * config.seq_len
        progress = common.Progress(arguments.steps, "tokens", tokens_per_step)
        source = data.masked_topics(
            config.vocab_size, config.seq_len, arguments.batch, config.masked_fraction
        )
        source = itertools.islice(source, arguments.steps)
        with autopar.data_loader(source, train_step) as batches:
            for batch in batches:
                state, loss = train_step(state, batch)
                progress(loss)


if __name__ == "__main__":
    main()
