"""A Llama train step for `autopar plan` and `autopar sweep`.

autopar plan examples/train_llama.py:make_step --cluster 50x4:v100-32gb --set size=13b
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from examples.models import Example, llama
from examples.models.llama import LlamaConfig

SIZES = {
    "tiny": llama.EXAMPLES["llama-tiny"].config,
    "7b": llama.EXAMPLES["llama2-7b"].config,
    "13b": llama.EXAMPLES["llama2-13b"].config,
    "70b": LlamaConfig(8192, 80, 64, 8, 28672, dtype=jnp.bfloat16),
    "3-8b": llama.EXAMPLES["llama3-8b"].config,
}


def make_example(
    size: str = "13b", batch: int = 1024, seq: int | None = None, layers: int | None = None
) -> Example:
    if size not in SIZES:
        raise ValueError(f"size={size!r}: there are {', '.join(SIZES)}")
    changes = {"seq_len": seq, "num_layers": layers}
    given = {name: value for name, value in changes.items() if value is not None}
    return llama.example(dataclasses.replace(SIZES[size], **given), batch, f"llama-{size}")


def make_step(
    size: str = "13b", batch: int = 1024, seq: int | None = None, layers: int | None = None
) -> tuple[Any, tuple[Any, Any]]:
    """`size`: one of `SIZES`; `batch`: sequences per step; `seq`: tokens of each; `layers`: another
    depth."""
    example = make_example(size, batch, seq, layers)
    return example.train_step, (example.abstract_state(), example.abstract_batch())
