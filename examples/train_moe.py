"""A mixture-of-experts (GShard) train step for `autopar plan` and `autopar sweep`.

autopar plan examples/train_moe.py:make_step --cluster 1x8:h100-sxm --set size=10b
"""

from __future__ import annotations

import dataclasses
from typing import Any

from examples.models import Example, moe

SIZES = {name.removeprefix("moe-"): model.config for name, model in moe.EXAMPLES.items()}


def make_example(
    size: str = "10b", batch: int = 1024, seq: int | None = None, layers: int | None = None
) -> Example:
    if size not in SIZES:
        raise ValueError(f"size={size!r}: there are {', '.join(SIZES)}")
    changes = {"seq_len": seq, "num_layers": layers}
    given = {name: value for name, value in changes.items() if value is not None}
    return moe.example(dataclasses.replace(SIZES[size], **given), batch, f"moe-{size}")


def make_step(
    size: str = "10b", batch: int = 1024, seq: int | None = None, layers: int | None = None
) -> tuple[Any, tuple[Any, Any]]:
    """`size`: one of `SIZES`; `batch`: sequences per step; `seq`: tokens of each; `layers`: another
    depth."""
    example = make_example(size, batch, seq, layers)
    return example.train_step, (example.abstract_state(), example.abstract_batch())
