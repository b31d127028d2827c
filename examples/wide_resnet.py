"""A Wide-ResNet with BatchNorm, trained on made-up images on all devices.

    python examples/wide_resnet.py
    python examples/wide_resnet.py --size 1b --batch 256 --cluster ray --address auto
    autopar plan examples/wide_resnet.py:make_step --cluster 2x8:a100-sxm-40gb --set size=4b

BatchNorm's statistics cover the whole batch, however it is split. Model and step are in
examples/models/wide_resnet.py.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import jax

import autopar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common, data
from examples.models import build, wide_resnet

SIZES = [name.removeprefix("wresnet-") for name in wide_resnet.EXAMPLES]


def make_step(size: str = "1b", batch: int = 1536) -> tuple[Any, tuple[Any, Any]]:
    """For `autopar plan` and `autopar sweep`."""
    example = build(f"wresnet-{size}", batch)
    return example.train_step, (example.abstract_state(), example.abstract_batch())


def main() -> None:
    parser = common.arguments(__doc__, sizes=SIZES, size="tiny", steps=40, batch=32)
    arguments = parser.parse_args()
    example = build(f"wresnet-{arguments.size}", arguments.batch)
    config, shapes = example.config, example.abstract_batch()
    with common.devices(arguments):
        train_step = autopar.parallelize(example.train_step)
        method = autopar.CreateStateParallel(train_step, shapes)
        state = autopar.parallelize(example.create_state, method=method)(jax.random.key(0))
        common.show(train_step.plan(state, shapes))

        progress = common.Progress(arguments.steps, "images", arguments.batch)
        source = data.patterned_images(config.image_size, config.num_classes, arguments.batch)
        source = itertools.islice(source, arguments.steps)
        with autopar.data_loader(source, train_step) as batches:
            for batch in batches:
                state, loss = train_step(state, batch)
                progress(loss)


if __name__ == "__main__":
    main()
