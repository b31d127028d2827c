"""The models that are measured on eight ranks of one GPU, as data.

An eighth of an H200 multiplies at 60 to 90 TFLOP/s in bfloat16, and ranks exchange about 30 GB/s.
Sizes are chosen so that a step takes 10 to 100 ms and layers are few, since compiling takes most of
the time. The GPTs differ in what is large: work per parameter, parameters per token, the
vocabulary, and depth.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from examples.models import Example, build


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of `examples.models` with a batch and some of its config changed; `tiny` is the model
    for a dry run. `autotune_level` of XLA: 0 leaves products to cuBLAS, which chooses well; untuned
    convolutions take seconds, and below level 4 no kernel is checked."""

    label: str
    model: str
    batch: int
    config: dict[str, Any]
    tiny: str
    tiny_batch: int = 16
    autotune_level: int = 0

    def example(self, *, tiny: bool = False) -> Example:
        if tiny:
            example = build(self.tiny, self.tiny_batch)
            return example.replace(dropout=0.0) if hasattr(example.config, "dropout") else example
        return build(self.model, self.batch, dtype=jnp.bfloat16, **self.config)


_GPT = {"num_heads": 16, "vocab_size": 8192, "seq_len": 512}

CASES: dict[str, Case] = {
    # The largest first, while memory is in one piece.
    "llama-long": Case(
        "Llama 4 × 1024, sequence 4096, batch 8", "llama2-7b", 8,
        {
            "hidden_size": 1024, "num_layers": 4, "num_heads": 16, "num_kv_heads": 4,
            "ffn_size": 2816, "seq_len": 4096, "vocab_size": 32000,
        },
        "llama-tiny", 8,
    ),
    "gpt": Case(
        "GPT 4 × 1024, batch 64", "gpt-350m", 64,
        {**_GPT, "num_layers": 4}, "gpt-tiny",
    ),
    "gpt-wide": Case(
        "GPT 2 × 2048, batch 8", "gpt-1.3b", 8,
        {**_GPT, "num_layers": 2}, "gpt-tiny", 8,
    ),
    "gpt-vocab": Case(
        "GPT 2 × 1024, vocabulary 51200, batch 16", "gpt-350m", 16,
        {"num_layers": 2, "seq_len": 1024}, "gpt-tiny",
    ),
    "llama": Case(
        "Llama 2 × 2048, batch 16", "llama2-7b", 16,
        {
            "hidden_size": 2048, "num_layers": 2, "num_heads": 16, "num_kv_heads": 8,
            "ffn_size": 5632, "seq_len": 1024, "vocab_size": 16384,
        },
        "llama-tiny",
    ),
    "gpt-narrow": Case(
        "GPT 8 × 512, batch 128", "gpt-350m", 128,
        {"hidden_size": 512, "num_heads": 8, "num_layers": 8, "vocab_size": 8192, "seq_len": 256},
        "gpt-tiny",
    ),
    "moe": Case(
        "MoE 2 × 1024, 8 experts, batch 64", "moe-380m", 64,
        {
            "hidden_size": 1024, "num_layers": 2, "seq_len": 512, "group_size": 512,
            "vocab_size": 8192,
        },
        "moe-tiny", 32,
    ),
    "bert": Case(
        "BERT 4 × 1024, batch 64", "bert-large", 64,
        {"num_layers": 4, "seq_len": 256, "dropout": 0.0}, "bert-tiny",
    ),
    "vit": Case(
        "ViT 4 × 1024, batch 128", "vit-304m", 128,
        # Untuned, XLA's kernels compute NaN on a share of the GPU, in every program.
        {"num_layers": 4}, "vit-tiny", autotune_level=4,
    ),
    "wresnet": Case(
        "Wide-ResNet, 4 blocks of 160 to 1280 channels, batch 128", "wresnet-250m", 128,
        # At the default rate of 0.1 the second loss is anything from 6 to NaN, by rounding alone.
        {"stage_sizes": (1, 1, 1, 1), "image_size": 128, "learning_rate": 1e-3},
        "wresnet-tiny", autotune_level=4,
    ),
    "dlrm": Case(
        "DLRM, 16 tables of 131072 × 64, batch 65536", "dlrm-560m", 65536,
        {"table_rows": 2**17}, "dlrm-tiny", 32,
    ),
}  # fmt: skip
