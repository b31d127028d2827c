"""A mixture of experts with 10 billion parameters on eight GPUs: made-up tokens, checkpoints,
metrics, resume.

    python examples/train_moe.py --run runs/moe
    python examples/train_moe.py --size tiny --steps 20 --batch 16 --run runs/tiny
    autopar plan examples/train_moe.py:make_step --cluster 1x8:h100-sxm --report plan.html

The first command trains on all GPUs of this host; the second anywhere, in a minute; the third plans
for GPUs that need not exist. The model is GShard's (examples/models/moe.py).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common, data, training_run
from examples.models import Example, moe

SIZES = {
    "10b": moe.EXAMPLES["moe-10b"].config,
    "1.3b": moe.EXAMPLES["moe-1.3b"].config,
    "tiny": dataclasses.replace(moe.EXAMPLES["moe-tiny"].config, learning_rate=1e-2),
}


def make_example(size: str = "10b", batch: int = 1024, layers: int | None = None) -> Example:
    return moe.example(common.sized(SIZES, size, num_layers=layers), batch, f"moe-{size}")


def make_step(
    size: str = "10b", batch: int = 1024, layers: int | None = None
) -> tuple[Any, tuple[Any, Any]]:
    """For `autopar plan`. `batch`: sequences per step."""
    return training_run.make_step(make_example(size, batch, layers))


def main() -> None:
    parser = training_run.arguments(__doc__, sizes=SIZES, size="10b", steps=1000, batch=1024)
    given = parser.parse_args()
    example = make_example(given.size, given.batch, given.layers)
    config = example.config

    def batches(first: int) -> Iterator[data.Batch]:
        return data.token_chains(config.vocab_size, config.seq_len, given.batch, first=first)

    training_run.train(example, batches, given, "sequences")


if __name__ == "__main__":
    main()
