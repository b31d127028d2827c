"""Locates parameters in Hugging Face's files: from a `ModelConfig` to a `Source` per leaf.

A parameter is one stored matrix, or several side by side: queries, keys and values, or gate and up,
which the decoder multiplies at once. Each is a view of the stored one: transposed (GPT-2 stores
(in, out)), some of its rows (GPT-2 stores q, k and v together), with rows split into heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from examples.llm_serving.config import ModelConfig
from examples.llm_serving.decoder import param_shapes

_Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StoredPart:
    """The location in the files of a parameter, or of a part of it.

    Attributes:
      name: of the stored array.
      stored_shape: the required shape of the stored array.
      shape: of the part.
      is_transposed: stored as (in, out).
      rows: which rows of it, after transposing; None for all.
    """

    name: str
    stored_shape: _Shape
    shape: _Shape
    is_transposed: bool = False
    rows: tuple[int, int] | None = None

    def view(self, stored: np.ndarray) -> np.ndarray:
        """The part as a view of the stored array: nothing is read."""
        array = stored.T if self.is_transposed else stored
        if self.rows is not None:
            array = array[self.rows[0] : self.rows[1]]
        return array.reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a parameter's values are.

    Attributes:
      path: of the leaf in the pytree, for messages.
      shape: of the parameter.
      parts: its values, concatenated along `axis`.
    """

    path: str
    shape: _Shape
    parts: tuple[StoredPart, ...]
    axis: int = 0


def find_sources(config: ModelConfig) -> Any:
    """A `Source` for every parameter, in the pytree of `param_shapes`."""
    table = _TABLES[config.architecture]

    def source(keys: tuple[Any, ...], shape: _Shape) -> Source:
        names = [key.key if hasattr(key, "key") else key.idx for key in keys]
        path = "params" + jax.tree_util.keystr(keys)
        if names[0] == "layers":
            prefix, leaf = f"{table['layers']}.{names[1]}.", ".".join(map(str, names[2:]))
        else:
            prefix, leaf = "", ".".join(map(str, names))
        axis, part_shapes = _part_shapes(leaf, shape)
        parts = []
        for part, (part_shape, stored) in part_shapes.items():
            name = prefix + table[part]
            if config.architecture == "gpt2" and names[0] == "layers":
                parts.append(_in_gpt2(part, name, part_shape, stored))
            else:
                parts.append(StoredPart(name, stored, part_shape))
        return Source(path, shape, tuple(parts), axis)

    return jax.tree_util.tree_map_with_path(
        source, param_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )


def _part_shapes(leaf: str, shape: _Shape) -> tuple[int, dict[str, tuple[_Shape, _Shape]]]:
    """(the axis along which a parameter has its parts, each part's shape, here and stored). Stored,
    heads and head size are one dimension."""
    matrix = leaf.removesuffix("_bias")
    ending = leaf.removeprefix(matrix)
    if matrix == "qkv":
        kv_heads, rows, size, *hidden = shape
        counts = {"q": rows - 2, "k": 1, "v": 1}
        return 1, {
            name + ending: (
                (kv_heads, count, size, *hidden),
                (kv_heads * count * size, *hidden),
            )
            for name, count in counts.items()
        }
    if matrix == "gate_up":
        return 0, {name + ending: ((1, *shape[1:]), shape[1:]) for name in ("gate", "up")}
    if leaf == "o":
        return 0, {leaf: (shape, (shape[0], shape[1] * shape[2]))}
    return 0, {leaf: (shape, shape)}


def _in_gpt2(leaf: str, name: str, shape: _Shape, stored: _Shape) -> StoredPart:
    """GPT-2 stores matrices as (in, out), and those of q, k and v as one."""
    is_matrix = len(stored) == 2
    number = {"q": 0, "k": 1, "v": 2}.get(leaf.removesuffix("_bias"))
    if number is None:
        return StoredPart(name, stored[::-1], shape, is_matrix)
    count = stored[0]
    rows = (number * count, (number + 1) * count)
    return StoredPart(name, (*stored[1:], 3 * count), shape, is_matrix, rows)


_GPT2 = {
    "layers": "transformer.h",
    "embedding": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "final_norm.scale": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head": "lm_head.weight",
    "attention_norm.scale": "ln_1.weight",
    "attention_norm.bias": "ln_1.bias",
    "q": "attn.c_attn.weight",
    "k": "attn.c_attn.weight",
    "v": "attn.c_attn.weight",
    "o": "attn.c_proj.weight",
    "q_bias": "attn.c_attn.bias",
    "k_bias": "attn.c_attn.bias",
    "v_bias": "attn.c_attn.bias",
    "o_bias": "attn.c_proj.bias",
    "feed_forward_norm.scale": "ln_2.weight",
    "feed_forward_norm.bias": "ln_2.bias",
    "up": "mlp.c_fc.weight",
    "up_bias": "mlp.c_fc.bias",
    "down": "mlp.c_proj.weight",
    "down_bias": "mlp.c_proj.bias",
}

_OPT = {
    "layers": "model.decoder.layers",
    "embedding": "model.decoder.embed_tokens.weight",
    "positions": "model.decoder.embed_positions.weight",
    "project_in": "model.decoder.project_in.weight",
    "project_out": "model.decoder.project_out.weight",
    "final_norm.scale": "model.decoder.final_layer_norm.weight",
    "final_norm.bias": "model.decoder.final_layer_norm.bias",
    "head": "lm_head.weight",
    "attention_norm.scale": "self_attn_layer_norm.weight",
    "attention_norm.bias": "self_attn_layer_norm.bias",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.out_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.out_proj.bias",
    "feed_forward_norm.scale": "final_layer_norm.weight",
    "feed_forward_norm.bias": "final_layer_norm.bias",
    "up": "fc1.weight",
    "up_bias": "fc1.bias",
    "down": "fc2.weight",
    "down_bias": "fc2.bias",
}

_LLAMA = {
    "layers": "model.layers",
    "embedding": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm.scale": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "feed_forward_norm.scale": "post_attention_layernorm.weight",
    "up": "mlp.up_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "down": "mlp.down_proj.weight",
    "up_bias": "mlp.up_proj.bias",
    "gate_bias": "mlp.gate_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}

_TABLES = {"gpt2": _GPT2, "opt": _OPT, "llama": _LLAMA}

# Models without a head are saved without this prefix.
BASE_PREFIXES = {"gpt2": "transformer.", "opt": "model.", "llama": "model."}

# Stored next to the parameters: causal masks and rotary tables, which we compute.
IGNORED_ENDINGS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
