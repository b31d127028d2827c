"""Locates parameters in Hugging Face's files: from a `ModelConfig` to a `Source` per leaf.

A parameter is a view of (a part of) one stored matrix: transposed (GPT-2 stores (in, out)), some of
its rows (GPT-2 stores q, k and v together), with rows split into heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from examples.llm_serving.config import ModelConfig
from examples.llm_serving.decoder import param_shapes


@dataclasses.dataclass(frozen=True)
class Source:
    """The location of a parameter in the files.

    Attributes:
      path: of the leaf in the pytree, for messages.
      name: of the stored array.
      stored_shape: the required shape of the stored array.
      is_transposed: stored as (in, out).
      rows: which rows of it, after transposing; None for all.
      shape: of the parameter.
    """

    path: str
    name: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    is_transposed: bool = False
    rows: tuple[int, int] | None = None

    def view(self, stored: np.ndarray) -> np.ndarray:
        """The parameter as a view of the stored array: nothing is read."""
        array = stored.T if self.is_transposed else stored
        if self.rows is not None:
            array = array[self.rows[0] : self.rows[1]]
        return array.reshape(self.shape)


def find_sources(config: ModelConfig) -> Any:
    """A `Source` for every parameter, in the pytree of `param_shapes`."""
    table = _TABLES[config.architecture]

    def source(keys: tuple[Any, ...], shape: tuple[int, ...]) -> Source:
        names = [key.key if hasattr(key, "key") else key.idx for key in keys]
        path = "params" + jax.tree_util.keystr(keys)
        if names[0] == "layers":
            prefix, leaf = f"{table['layers']}.{names[1]}.", ".".join(map(str, names[2:]))
        else:
            prefix, leaf = "", ".".join(map(str, names))
        if config.architecture == "gpt2" and names[0] == "layers":
            return _in_gpt2(path, prefix, leaf, shape)
        return Source(path, prefix + table[leaf], _flat(leaf, shape), shape)

    return jax.tree_util.tree_map_with_path(
        source, param_shapes(config), is_leaf=lambda x: isinstance(x, tuple)
    )


def _flat(leaf: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stored shape, in which heads and head size are one dimension."""
    if leaf in ("q", "k", "v"):
        return (shape[0] * shape[1], shape[2])
    if leaf in ("q_bias", "k_bias", "v_bias"):
        return (shape[0] * shape[1],)
    if leaf == "o":
        return (shape[0], shape[1] * shape[2])
    return shape


def _in_gpt2(path: str, prefix: str, leaf: str, shape: tuple[int, ...]) -> Source:
    name, flat = prefix + _GPT2[leaf], _flat(leaf, shape)
    part = leaf.removesuffix("_bias")
    if part in ("q", "k", "v"):
        number = ("q", "k", "v").index(part)
        rows = (number * flat[0], (number + 1) * flat[0])
        stored = (flat[-1], 3 * flat[0]) if len(flat) == 2 else (3 * flat[0],)
        return Source(path, name, stored, shape, len(flat) == 2, rows)
    return Source(path, name, flat[::-1], shape, len(flat) == 2)


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
