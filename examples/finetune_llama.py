"""Fine-tuning Llama3-8B on eight GPUs: a text file or made-up tokens, checkpoints, metrics, resume.

    python examples/finetune_llama.py --text book.txt --run runs/llama
    python examples/finetune_llama.py --size tiny --steps 20 --run runs/tiny
    autopar plan examples/finetune_llama.py:make_step --cluster 1x8:h100-sxm --report plan.html

The first command trains on all GPUs of this host; the second anywhere, in a minute; the third plans
for GPUs that need not exist. A text is read as bytes, one token each: bring your own tokenizer.
Parameters begin at random; a checkpoint of step 0 in RUN/checkpoints, made by
`autopar.save_checkpoint` from weights that you have, takes their place.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the package `examples` is
from examples import common, data, training_run
from examples.models import Example, llama

SIZES = {
    "8b": dataclasses.replace(llama.EXAMPLES["llama3-8b"].config, learning_rate=1e-5),
    "tiny": dataclasses.replace(
        llama.EXAMPLES["llama-tiny"].config, learning_rate=1e-2, vocab_size=256
    ),
}


def make_example(size: str = "8b", batch: int = 16, layers: int | None = None) -> Example:
    config = common.sized(SIZES, size, num_layers=layers)
    return llama.example(config, batch, f"llama3-{size}")


def make_step(
    size: str = "8b", batch: int = 16, layers: int | None = None
) -> tuple[Any, tuple[Any, Any]]:
    """For `autopar plan`. `batch`: sequences per step."""
    return training_run.make_step(make_example(size, batch, layers))


def main() -> None:
    parser = training_run.arguments(__doc__, sizes=SIZES, size="8b", steps=1000, batch=16)
    parser.add_argument("--text", help="a file to train on; default: made-up tokens")
    given = parser.parse_args()
    example = make_example(given.size, given.batch, given.layers)
    config = example.config

    def batches(first: int) -> Iterator[data.Batch]:
        if given.text:
            return data.text_windows(Path(given.text), config.seq_len, given.batch, first=first)
        return data.token_chains(config.vocab_size, config.seq_len, given.batch, first=first)

    training_run.train(example, batches, given, "sequences")


if __name__ == "__main__":
    main()
