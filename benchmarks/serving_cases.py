"""The models of the serving benchmark: names → shapes, as in Hugging Face's `config.json`.

Weights are random and created on the device, so no files are needed. They are bfloat16, except for
the tiny models, which are for dry runs and for comparing the engine's tokens with the loop's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

_GPT2_XL = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "n_positions": 1024,
}
_OPT_1_3B = {
    "model_type": "opt",
    "vocab_size": 50272,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "ffn_dim": 8192,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
}
_LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
_TINY = {"vocab_size": 2048, "n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 512}
_TINY |= {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "ffn_dim": 1024}
_TINY |= {"intermediate_size": 688, "max_position_embeddings": 512}

MODELS: dict[str, dict[str, Any]] = {
    "gpt2-xl": {**_GPT2_XL, "dtype": "bfloat16"},
    "opt-1.3b": {**_OPT_1_3B, "dtype": "bfloat16"},
    "llama-7b": {**_LLAMA_7B, "dtype": "bfloat16"},
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "gpt2-tiny": {**_GPT2_XL, **_TINY},
    "opt-tiny": {**_OPT_1_3B, **_TINY},
    "llama-tiny": {**_LLAMA_7B, **_TINY, "num_key_value_heads": 2},
}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of all cases of a run.

    Attributes:
      prompt, new_tokens: of every sequence in the decode comparison.
      length: entries of the cache, both of the engine and of the loop.
      prompt_lengths, answer: of the HTTP load.
    """

    batches: tuple[int, ...] = (1, 8, 64)
    prompt: int = 128
    new_tokens: int = 256
    length: int = 512
    rounds: int = 5
    clients: tuple[int, ...] = (1, 8, 64)
    seconds: float = 12.0
    prompt_lengths: tuple[int, ...] = (16, 64, 200)
    answer: int = 64


TINY_SIZES = Sizes(
    batches=(1, 8, 64),
    prompt=16,
    new_tokens=96,
    length=128,
    rounds=5,
    seconds=10.0,
    prompt_lengths=(8, 16, 32),
    answer=32,
)
