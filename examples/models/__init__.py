"""The models autopar is tested and measured with, as unmodified single-device JAX.

`build("gpt-2.6b")` gives an `Example` of the registry; `build("gpt-2.6b", batch_size=32,
remat=True)` one with some of its config changed; `gpt.example(gpt.GPTConfig(...))` one of an ad-hoc
config. See `Example` for what it offers.
"""

from __future__ import annotations

from typing import Any

from . import bert, gpt, llama, mlp, moe, wide_resnet
from .example import Batch, Example, Family

MODELS: dict[str, Example] = {
    **mlp.EXAMPLES,
    **gpt.EXAMPLES,
    **bert.EXAMPLES,
    **llama.EXAMPLES,
    **moe.EXAMPLES,
    **wide_resnet.EXAMPLES,
}


def build(name: str, batch_size: int | None = None, **overrides: Any) -> Example:
    """Looks `name` up in `MODELS`, with another batch size or config fields where given."""
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name].replace(batch_size, **overrides)


__all__ = [
    "MODELS",
    "Batch",
    "Example",
    "Family",
    "bert",
    "build",
    "gpt",
    "llama",
    "mlp",
    "moe",
    "wide_resnet",
]
