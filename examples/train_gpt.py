"""A GPT train step for `autopar plan` and `autopar sweep`.

autopar plan examples/train_gpt.py:make_step --cluster 1x8:h100-sxm --set size=2.6b
"""

from __future__ import annotations

import dataclasses
from typing import Any

from examples.models import Example, gpt

SIZES = {name.removeprefix("gpt-"): model.config for name, model in gpt.EXAMPLES.items()}


def make_example(
    size: str = "2.6b", batch: int = 1024, seq: int | None = None, layers: int | None = None
) -> Example:
    if size not in SIZES:
        raise ValueError(f"size={size!r}: there are {', '.join(SIZES)}")
    changes = {"seq_len": seq, "num_layers": layers}
    given = {name: value for name, value in changes.items() if value is not None}
    return gpt.example(dataclasses.replace(SIZES[size], **given), batch, f"gpt-{size}")


def make_step(
    size: str = "2.6b", batch: int = 1024, seq: int | None = None, layers: int | None = None
) -> tuple[Any, tuple[Any, Any]]:
    """`size`: one of `SIZES`; `batch`: sequences per step; `seq`: tokens of each; `layers`: another
    depth."""
    example = make_example(size, batch, seq, layers)
    return example.train_step, (example.abstract_state(), example.abstract_batch())
