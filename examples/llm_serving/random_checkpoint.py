"""Writes a tiny model for trying the server: `config.json`, random weights, a byte tokenizer.

    python -m examples.llm_serving.random_checkpoint FOLDER [--architecture gpt2]

The files have Hugging Face's format. The model has learned nothing: its answers are noise.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.llm_serving.config import config_from_dict
from examples.llm_serving.names import find_sources

END = "<|endoftext|>"
VOCAB_SIZE = 257  # every byte, and the end token
_COMMON = {"vocab_size": VOCAB_SIZE, "eos_token_id": 256, "bos_token_id": 256, "dtype": "float32"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**_COMMON, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "opt": {
        **_COMMON,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 128,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 64,
    },
    "llama": {
        **_COMMON,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
    },
}


def save_random_checkpoint(
    folder: str | Path, architecture: str = "gpt2", seed: int = 0, **changes: Any
) -> None:
    """Writes a model of `CONFIGS[architecture]`, with `changes` to its `config.json`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": architecture, **CONFIGS[architecture], **changes}
    (folder / "config.json").write_text(json.dumps(values, indent=1) + "\n")
    sources = jax.tree.leaves(find_sources(config_from_dict(values)))
    stored = {
        part.name: (part.stored_shape, source.path) for source in sources for part in source.parts
    }
    draw = np.random.default_rng(seed)
    arrays = {}
    for name, (shape, path) in sorted(stored.items()):
        spread = 0.2 if len(shape) > 1 else 0.02
        arrays[name] = draw.normal(0, spread, shape).astype(np.float32)
        if path.endswith("['scale']"):
            arrays[name] += 1
    _write_tensors(folder / "model.safetensors", arrays)
    _write_tokenizer(folder / "tokenizer.json")


def _write_tensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    header, offset = {}, 0
    for name, array in arrays.items():
        ends = offset + array.nbytes
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [offset, ends]}
        offset = ends
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())


def _write_tokenizer(path: Path) -> None:
    """Every byte is a token, so any text can be encoded."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.save(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--architecture", choices=list(CONFIGS), default="gpt2")
    args = parser.parse_args()
    save_random_checkpoint(args.folder, args.architecture)
    print(f"a random {args.architecture} is in {args.folder}")


if __name__ == "__main__":
    main()
