"""Small random checkpoints of Hugging Face's models, and their own answers.

They are made by transformers itself (`save_pretrained`), so that names, shapes and numbers are what
users have. Weights are spread widely enough that the likeliest token is clear of the next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SIZES = {"vocab_size": 96}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "eos_token_id": 95, "bos_token_id": 95,
    },
    "opt": {
        "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
        "eos_token_id": 95, "pad_token_id": 1, "bos_token_id": 95,
    },
    "opt_350m": {
        "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 16,
        "do_layer_norm_before": False, "eos_token_id": 95, "pad_token_id": 1, "bos_token_id": 95,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "eos_token_id": 95, "bos_token_id": 94,
    },
    "llama3": {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
        "eos_token_id": [94, 95], "bos_token_id": 93,
    },
}  # fmt: skip


def save_checkpoint(name: str, folder: Path, dtype: Any = None, **options: Any) -> Any:
    """Write a checkpoint into the folder and return transformers' model of it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = SIZES | CONFIGS[name]
    config = AutoConfig.for_model(**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            elif path.endswith("bias"):
                parameter.normal_(0, 0.1)
            else:
                parameter.normal_(1, 0.1)
    model = model if dtype is None else model.to(dtype)
    model.save_pretrained(folder, **options)
    return model


def torch_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Of every position, (tokens, vocabulary)."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


def torch_greedy(model: Any, rows: Any, **options: Any) -> np.ndarray:
    import torch

    rows = torch.tensor(rows)
    mask = options.pop("attention_mask", None)
    mask = torch.ones_like(rows) if mask is None else torch.tensor(mask)
    with torch.no_grad():
        own = model.generate(rows, attention_mask=mask, do_sample=False, **options)
    return own.numpy()
