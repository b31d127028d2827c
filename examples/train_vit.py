"""ViT-L on eight GPUs: made-up images, checkpoints, metrics, resume.

    python examples/train_vit.py --run runs/vit
    python examples/train_vit.py --size tiny --steps 20 --batch 16 --run runs/tiny
    autopar plan examples/train_vit.py:make_step --cluster 1x8:h100-sxm --report plan.html

The first command trains on all GPUs of this host; the second anywhere, in a minute; the third plans
for GPUs that need not exist. Put your own images in place of `data.patterned_images`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common, data, training_run
from examples.models import Example, vit

SIZES = {"large": vit.EXAMPLES["vit-304m"].config, "tiny": vit.EXAMPLES["vit-tiny"].config}


def make_example(size: str = "large", batch: int = 1024, layers: int | None = None) -> Example:
    return vit.example(common.sized(SIZES, size, num_layers=layers), batch, f"vit-{size}")


def make_step(
    size: str = "large", batch: int = 1024, layers: int | None = None
) -> tuple[Any, tuple[Any, Any]]:
    """For `autopar plan`. `batch`: images per step."""
    return training_run.make_step(make_example(size, batch, layers))


def main() -> None:
    parser = training_run.arguments(__doc__, sizes=SIZES, size="large", steps=1000, batch=1024)
    given = parser.parse_args()
    example = make_example(given.size, given.batch, given.layers)
    config = example.config

    def batches(first: int) -> Iterator[data.Batch]:
        return data.patterned_images(
            config.image_size, config.num_classes, given.batch, first=first
        )

    training_run.train(example, batches, given, "images")


if __name__ == "__main__":
    main()
