"""The models of autopar's tests and benchmarks, as unmodified single-device JAX.

`build("gpt-2.6b")` returns an `Example` of the registry; `build("gpt-2.6b", batch_size=32,
remat=True)` changes some of its config; `gpt.example(gpt.GPTConfig(...))` takes an ad-hoc config.
"""

from __future__ import annotations

from typing import Any

from . import bert, dlrm, gpt, llama, mlp, moe, vit, wide_resnet
from .example import Batch, Example, Family

MODELS: dict[str, Example] = {
    **mlp.EXAMPLES,
    **gpt.EXAMPLES,
    **bert.EXAMPLES,
    **llama.EXAMPLES,
    **moe.EXAMPLES,
    **wide_resnet.EXAMPLES,
    **vit.EXAMPLES,
    **dlrm.EXAMPLES,
}


def build(name: str, batch_size: int | None = None, **overrides: Any) -> Example:
    """The example `name` of `MODELS`, with the given batch size and config fields."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose from {', '.join(MODELS)}")
    return MODELS[name].replace(batch_size, **overrides)


__all__ = [
    "MODELS",
    "Batch",
    "Example",
    "Family",
    "bert",
    "build",
    "dlrm",
    "gpt",
    "llama",
    "mlp",
    "moe",
    "vit",
    "wide_resnet",
]
