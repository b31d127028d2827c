"""A decoder with a cache of keys and values: from parameters, cache and tokens to logits.

Plain functions over pytrees with the layers written out, so that autopar can shard every product
and cut stages between layers.

    prefill  one prompt, padded to some length: fills one slot of the cache, returns its last logits
    decode   the next token of every slot: adds to the cache, returns logits of every slot

Matrices are (out, in) as in Hugging Face, with heads as a separate dimension. Those that multiply
the same input are one array, so that one product reads it once:

    qkv      (kv heads, group + 2, head size, hidden): of each head of keys and values the queries
             that read it, then its keys, then its values
    gate_up  (2, feed forward, hidden)
    o        (hidden, heads, head size)

Split over kv heads, or over the feed-forward dimension, a device has whole heads with their keys
and values, or gate and up of the same units: taking the product apart moves nothing.

The cache has keys and values of (slots, kv heads, length, head size) per layer. Entries after a
slot's position are never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples.llm_serving.config import ModelConfig

Params = dict[str, Any]
Cache = list[dict[str, jax.Array]]
# layer's cache, queries, keys, values by token -> layer's cache, mixed values by token
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[Any, jax.Array]]


def param_shapes(config: ModelConfig) -> Params:
    """The pytree of parameter shapes."""
    hidden, inner = config.hidden_size, config.feed_forward_size
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    group = heads // kv_heads

    def norm() -> Params:
        return {"scale": (hidden,)} | ({"bias": (hidden,)} if config.norm == "layer" else {})

    def layer_shapes() -> Params:
        first, units = ("gate_up", (2, inner)) if config.gated else ("up", (inner,))
        layer: Params = {
            "attention_norm": norm(),
            "qkv": (kv_heads, group + 2, size, hidden),
            "o": (hidden, heads, size),
            "feed_forward_norm": norm(),
            first: (*units, hidden),
            "down": (hidden, inner),
        }
        if config.attention_bias:
            layer |= {"qkv_bias": (kv_heads, group + 2, size), "o_bias": (hidden,)}
        if config.feed_forward_bias:
            layer |= {f"{first}_bias": units, "down_bias": (hidden,)}
        return layer

    params: Params = {
        "embedding": (config.vocab_size, config.embedding_size),
        "layers": [layer_shapes() for _ in range(config.num_layers)],
    }
    if config.learned_positions:
        params["positions"] = (config.max_positions + config.position_offset, hidden)
    if config.embedding_size != hidden:
        params["project_in"] = (hidden, config.embedding_size)
        params["project_out"] = (config.embedding_size, hidden)
    if config.final_norm:
        params["final_norm"] = norm()
    if not config.tied_head:
        params["head"] = (config.vocab_size, config.embedding_size)
    return params


def param_types(config: ModelConfig, dtype: Any) -> Params:
    """The same as `jax.ShapeDtypeStruct`s."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        param_shapes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def make_cache(config: ModelConfig, num_slots: int, length: int, dtype: Any) -> Cache:
    shape = (num_slots, config.num_kv_heads, length, config.head_size)
    return [
        {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}
        for _ in range(config.num_layers)
    ]


def prefill(
    config: ModelConfig,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    length: jax.Array,
    slot: jax.Array,
) -> tuple[Cache, jax.Array]:
    """`tokens` (padded length,), of which the first `length` count, into a slot -> the logits
    (vocabulary,) of its next token."""
    positions = jnp.arange(tokens.shape[0])
    # Padding comes after the prompt, so no token of the prompt sees it.
    is_seen = positions[None, :] <= positions[:, None]
    at = (slot, 0, 0, 0)

    def attend(layer_cache: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, jax.Array]:
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        layer_cache = {
            "k": lax.dynamic_update_slice(layer_cache["k"], k[None], at),
            "v": lax.dynamic_update_slice(layer_cache["v"], v[None], at),
        }
        scores = jnp.einsum("tkgd,kud->kgtu", q, k, preferred_element_type=jnp.float32)
        weights = _masked_softmax(scores, is_seen[None, None])
        return layer_cache, jnp.einsum("kgtu,kud->tkgd", weights.astype(v.dtype), v)

    cache, hidden = _run_layers(config, params, cache, tokens, positions, attend)
    last = lax.dynamic_slice_in_dim(hidden, length - 1, 1)
    return cache, _logits(config, params, last)[0]


def decode(
    config: ModelConfig,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    attended: int | None = None,
) -> tuple[Cache, jax.Array]:
    """The token of every slot (slots,), each at its position -> logits (slots, vocabulary). Reads
    only the first `attended` entries of the cache; all active positions are below that."""
    length = cache[0]["k"].shape[2]
    attended = length if attended is None else attended
    # A slot whose request has ended may advance for some steps; it rewrites its last entry.
    positions = jnp.minimum(positions, length - 1)
    is_seen = jnp.arange(attended)[None, :] <= positions[:, None]

    def attend(layer_cache: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, jax.Array]:
        layer_cache = {
            "k": _write(layer_cache["k"], k, positions),
            "v": _write(layer_cache["v"], v, positions),
        }
        k, v = layer_cache["k"][:, :, :attended], layer_cache["v"][:, :, :attended]
        scores = jnp.einsum("skgd,skld->skgl", q, k, preferred_element_type=jnp.float32)
        weights = _masked_softmax(scores, is_seen[:, None, None])
        return layer_cache, jnp.einsum("skgl,skld->skgd", weights.astype(v.dtype), v)

    cache, hidden = _run_layers(config, params, cache, tokens, positions, attend)
    return cache, _logits(config, params, hidden)


def _write(cache: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """`new` (slots, kv heads, head size) at each slot's position."""

    def one(slot: jax.Array, row: jax.Array, position: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(slot, row[:, None], (0, position, 0))

    return jax.vmap(one)(cache, new, positions)


def _masked_softmax(scores: jax.Array, is_seen: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(is_seen, scores, -1e30), axis=-1)


def _run_layers(
    config: ModelConfig,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
) -> tuple[Cache, jax.Array]:
    """Tokens and their positions -> the last layer's output (tokens, hidden)."""
    x = params["embedding"][tokens]
    if "project_in" in params:
        x = jnp.einsum("te,he->th", x, params["project_in"])
    rotation = None
    if config.learned_positions:
        # Padding may be past the last position; nothing reads its output.
        last = config.max_positions - 1
        x = x + params["positions"][jnp.minimum(positions, last) + config.position_offset]
    else:
        rotation = _rotation(config, positions)
    filled = []
    for layer, layer_cache in zip(params["layers"], cache, strict=True):
        layer_cache, x = _layer(config, layer, layer_cache, x, rotation, attend)
        filled.append(layer_cache)
    if config.final_norm:
        x = _norm(config, params["final_norm"], x)
    return filled, x


def _layer(
    config: ModelConfig,
    layer: Params,
    cache: Any,
    x: jax.Array,
    rotation: tuple[jax.Array, jax.Array] | None,
    attend: Attend,
) -> tuple[Any, jax.Array]:
    y = _norm(config, layer["attention_norm"], x) if config.norm_first else x
    qkv = _with_bias(jnp.einsum("te,kgde->tkgd", y, layer["qkv"]), layer.get("qkv_bias"))
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    if rotation is not None:
        cos, sin = rotation
        q, k = _rotate(q, (cos[:, None], sin[:, None])), _rotate(k, rotation)
    q = q * (1 / math.sqrt(config.head_size))
    cache, mixed = attend(cache, q, k, v)
    mixed = mixed.reshape(mixed.shape[0], config.num_heads, config.head_size)
    y = _with_bias(jnp.einsum("thd,ehd->te", mixed, layer["o"]), layer.get("o_bias"))
    x = x + y
    if not config.norm_first:
        x = _norm(config, layer["attention_norm"], x)
    y = _norm(config, layer["feed_forward_norm"], x) if config.norm_first else x
    if config.gated:
        both = jnp.einsum("te,gfe->tgf", y, layer["gate_up"])
        both = _with_bias(both, layer.get("gate_up_bias"))
        up = _activation(config.activation, both[:, 0]) * both[:, 1]
    else:
        up = _with_bias(jnp.einsum("te,fe->tf", y, layer["up"]), layer.get("up_bias"))
        up = _activation(config.activation, up)
    x = x + _with_bias(jnp.einsum("tf,ef->te", up, layer["down"]), layer.get("down_bias"))
    if not config.norm_first:
        x = _norm(config, layer["feed_forward_norm"], x)
    return cache, x


def _with_bias(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias


def _logits(config: ModelConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Logits in float32 of the last layer's output."""
    if "project_out" in params:
        hidden = jnp.einsum("th,eh->te", hidden, params["project_out"])
    head = params["embedding"] if config.tied_head else params["head"]
    return jnp.einsum("te,ve->tv", hidden, head, preferred_element_type=jnp.float32)


def _norm(config: ModelConfig, weights: Params, x: jax.Array) -> jax.Array:
    """In float32, whatever the model's type."""
    y = x.astype(jnp.float32)
    if config.norm == "layer":
        y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + config.norm_eps)
    y = y * weights["scale"].astype(jnp.float32)
    if config.norm == "layer":
        y = y + weights["bias"].astype(jnp.float32)
    return y.astype(x.dtype)


def _activation(name: str, x: jax.Array) -> jax.Array:
    if name == "relu":
        return jax.nn.relu(x)
    if name in ("silu", "swish"):
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=name != "gelu")


def _rotation(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines (tokens, 1, half a head)."""
    angles = positions.astype(jnp.float32)[:, None] * rotary_frequencies(config)
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def rotary_frequencies(config: ModelConfig) -> np.ndarray:
    """The rotation of each pair of a head's numbers per position."""
    exponents = np.arange(0, config.head_size, 2, dtype=np.float32) / config.head_size
    frequencies = (1.0 / config.rope_theta**exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if not scaling.original_positions:
        return frequencies / np.float32(scaling.factor)
    turns = scaling.original_positions * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: kept, 0: divided
    return (frequencies * (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The first half of each head holds the first numbers of its pairs, as in Hugging Face."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
