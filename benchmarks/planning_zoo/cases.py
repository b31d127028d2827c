"""The models and clusters of the benchmark: a name → a `Case`.

Models are those of `examples/models` and `tests/zoo` where there are any of the size, and those of
`strangers` else. Batches are what people train with on so many GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.planning_zoo import strangers
from examples.models import build, dlrm, gpt, llama, moe, vit
from examples.models.example import Example
from tests.zoo.program import Size, ZooStep, all_programs


@dataclass(frozen=True)
class Case:
    """A model on a number of H100s. `make`: its step, and its arguments as shapes."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    devices: int


def _example(make: Callable[[], Example], devices: int) -> Case:
    def shapes() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        example = make()
        return example.train_step, (example.abstract_state(), example.abstract_batch())

    return Case(shapes, devices)


def _zoo(make: Callable[[], ZooStep], devices: int) -> Case:
    def shapes() -> tuple[Callable[..., Any], tuple[Any, ...]]:
        step = make()
        batch = jax.eval_shape(lambda: step.make_batch(0))
        return step.step, (jax.eval_shape(step.make_state), *batch)

    return Case(shapes, devices)


def _real(name: str, devices: int) -> Case:
    return _zoo(lambda: all_programs()[name].build(Size.REAL), devices)


def _llama(dim: int, depth: int, heads: int, width: int, length: int = 4096) -> llama.LlamaConfig:
    return llama.LlamaConfig(
        dim, depth, heads, 8, width, seq_len=length, remat=True, dtype=jnp.bfloat16
    )


def _gpt(depth: int) -> gpt.GPTConfig:
    """GPT-1.3B's width, with so many layers."""
    return gpt.GPTConfig(2048, depth, 32, dtype=jnp.bfloat16)


_GPT_175B = gpt.GPTConfig(12288, 96, 96, seq_len=2048, dtype=jnp.bfloat16)
_MOE_400B = moe.MoEConfig(4096, 32, 96, num_heads=32, dtype=jnp.bfloat16)
_VIT_22B = vit.ViTConfig(6144, 48, 48, patch_size=14, dtype=jnp.bfloat16)
_LLAMA_70B = _llama(8192, 80, 64, 28672)
_LLAMA_405B = _llama(16384, 126, 128, 53248, 8192)

CASES: dict[str, Case] = {
    "GPT-2.6B": _example(lambda: build("gpt-2.6b", 256), 8),
    "GPT, 12 layers": _example(lambda: gpt.example(_gpt(12), 256), 8),
    "GPT, 96 layers": _example(lambda: gpt.example(_gpt(96), 256), 8),
    "GPT-39B": _example(lambda: build("gpt-39b"), 64),
    "GPT-39B, linen, float32": _zoo(lambda: strangers.linen_gpt(48, 8192, 64, 1024), 64),
    "GPT-175B": _example(lambda: gpt.example(_GPT_175B, 1536), 512),
    "Llama3-8B": _example(lambda: build("llama3-8b", 64), 64),
    "Llama-70B": _example(lambda: llama.example(_LLAMA_70B, 512), 64),
    "Llama-70B, scan": _zoo(lambda: strangers.scanned_llama(80, 8192, 64, 28672, 512), 64),
    "Llama-405B": _example(lambda: llama.example(_LLAMA_405B, 1024), 512),
    "Llama-405B, scan": _zoo(
        lambda: strangers.scanned_llama(126, 16384, 128, 53248, 1024, length=8192), 512
    ),
    "T5-11B": _zoo(lambda: strangers.t5(24, 4096, 32, 10240, 512), 64),
    "ViT-22B": _example(lambda: vit.example(_VIT_22B, 1024), 64),
    "MoE-10B": _example(lambda: build("moe-10b"), 8),
    "MoE-70B": _example(lambda: build("moe-70b"), 64),
    "MoE-400B": _example(lambda: moe.example(_MOE_400B, 2048), 512),
    "Wide-ResNet-13B": _example(lambda: build("wresnet-13b"), 64),
    "U-Net (diffusion)": _real("unet", 8),
    "DLRM": _example(lambda: dlrm.EXAMPLES["dlrm-560m"], 64),
    "Mamba": _real("mamba", 8),
}
