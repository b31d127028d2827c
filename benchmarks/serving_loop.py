"""A hand-written decode loop: configuration and parameters → tokens, on one device.

This is the reference of `benchmarks/serving.py`: plain `jax.jit`, one product for queries, keys and
values, one for gate and up, the cache donated and written in place, each sequence at its own
position, the most likely token fed back on the device. There are two ways to drive it: one call per
token without waiting for any, and `lax.scan` over many tokens in one call.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from examples.llm_serving.config import ModelConfig

Tree = dict[str, Any]


def fuse_parameters(config: ModelConfig, params: Tree) -> Tree:
    """The engine's parameters as (in, out) matrices: all queries, then keys, then values; gate,
    then up."""

    @jax.jit
    def fused_layer(layer: Tree) -> Tree:
        hidden = config.hidden_size
        heads = _by_kind(layer["qkv"])
        fused = {
            "norms": (layer["attention_norm"], layer["feed_forward_norm"]),
            "qkv": heads.reshape(-1, hidden).T,
            "o": layer["o"].reshape(hidden, -1).T,
            "down": layer["down"].T,
            "up": layer["gate_up" if config.gated else "up"].reshape(-1, hidden).T,
        }
        if config.attention_bias:
            fused["qkv_bias"] = _by_kind(layer["qkv_bias"]).ravel()
            fused["o_bias"] = layer["o_bias"]
        if config.feed_forward_bias:
            fused |= {"up_bias": layer["up_bias"], "down_bias": layer["down_bias"]}
        return fused

    kept = {name: value for name, value in params.items() if name != "layers"}
    return {**kept, "layers": [fused_layer(layer) for layer in params["layers"]]}


def _by_kind(qkv: jax.Array) -> jax.Array:
    """(kv heads, group + 2, …) → heads in the order of queries, keys, values."""
    kinds = [qkv[:, :-2], qkv[:, -2:-1], qkv[:, -1:]]
    return jnp.concatenate([kind.reshape(-1, *qkv.shape[2:]) for kind in kinds])


def make_cache(config: ModelConfig, batch: int, length: int, dtype: Any) -> list[Any]:
    shape = (batch, config.num_kv_heads, length, config.head_size)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)]


def next_tokens(
    config: ModelConfig, params: Tree, cache: list[Any], tokens: jax.Array, positions: jax.Array
) -> tuple[list[Any], jax.Array]:
    """Each sequence's token at its position → the cache with it, and the likeliest next tokens."""
    batch, size = tokens.shape[0], config.head_size
    num_q, num_kv = config.num_heads, config.num_kv_heads
    rows, length = jnp.arange(batch), cache[0][0].shape[2]
    seen = (jnp.arange(length) <= positions[:, None])[:, None, None]
    x = params["embedding"][tokens]
    if config.learned_positions:
        x = x + params["positions"][positions + config.position_offset]
    rotation = None if config.learned_positions else _rotation(config, positions)
    filled = []
    for layer_params, (keys, values) in zip(params["layers"], cache, strict=True):
        y = _norm(config, layer_params["norms"][0], x)
        qkv = _product(y, layer_params, "qkv").reshape(batch, num_q + 2 * num_kv, size)
        q, k, v = jnp.split(qkv, [num_q, num_q + num_kv], axis=1)
        if rotation is not None:
            q, k = _rotate(q, rotation), _rotate(k, rotation)
        keys = keys.at[rows, :, positions].set(k)
        values = values.at[rows, :, positions].set(v)
        q = q.reshape(batch, num_kv, num_q // num_kv, size) / math.sqrt(size)
        scores = jnp.einsum("bkgd,bkld->bkgl", q, keys, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(x.dtype)
        mixed = jnp.einsum("bkgl,bkld->bkgd", weights, values).reshape(batch, -1)
        x = x + _product(mixed, layer_params, "o")
        y = _product(_norm(config, layer_params["norms"][1], x), layer_params, "up")
        if config.gated:
            gate, up = jnp.split(y, 2, axis=1)
            y = jax.nn.silu(gate) * up
        else:
            y = jax.nn.relu(y) if config.activation == "relu" else jax.nn.gelu(y)
        x = x + _product(y, layer_params, "down")
        filled.append((keys, values))
    x = _norm(config, params["final_norm"], x)
    head = params["embedding"] if config.tied_head else params["head"]
    logits = jnp.einsum("be,ve->bv", x, head, preferred_element_type=jnp.float32)
    return filled, jnp.argmax(logits, -1).astype(jnp.int32)


class Loop:
    """Decodes a batch of prompts of one length, greedily.

    Args:
      tokens_per_call: 1 for a call per token; otherwise the length of the scan.
    """

    def __init__(self, config: ModelConfig, fused: Tree, tokens_per_call: int):
        step = functools.partial(next_tokens, config)

        def many(params: Tree, cache: Any, tokens: jax.Array, positions: jax.Array) -> Any:
            def body(carry: Any, _: Any) -> Any:
                cache, tokens, positions = carry
                cache, tokens = step(params, cache, tokens, positions)
                return (cache, tokens, positions + 1), tokens

            carry = (cache, tokens, positions)
            (cache, tokens, positions), out = lax.scan(body, carry, length=tokens_per_call)
            return cache, tokens, positions, out

        def one(params: Tree, cache: Any, tokens: jax.Array, positions: jax.Array) -> Any:
            cache, tokens = step(params, cache, tokens, positions)
            return cache, tokens, positions + 1, tokens

        self._params = fused
        self._tokens_per_call = tokens_per_call
        self._call = jax.jit(one if tokens_per_call == 1 else many, donate_argnums=1)

    def run(self, cache: Any, tokens: jax.Array, start: int, num_tokens: int) -> tuple[Any, Any]:
        """From a filled cache and the last token of each prompt, at position `start`, decodes
        `num_tokens` more (a multiple of tokens per call) → cache, tokens of (num_tokens, batch) or
        a list."""
        positions = jnp.full(tokens.shape, start, jnp.int32)
        outs = []
        for _ in range(num_tokens // self._tokens_per_call):
            cache, tokens, positions, out = self._call(self._params, cache, tokens, positions)
            outs.append(out)
        jax.block_until_ready(outs[-1])
        return cache, outs

    def fill(self, cache: Any, prompts: jax.Array) -> Any:
        """Fills the cache with all but the last token of each prompt (batch, length)."""
        for index in range(prompts.shape[1] - 1):
            positions = jnp.full(prompts.shape[:1], index, jnp.int32)
            cache, *_ = self._call(self._params, cache, prompts[:, index], positions)
        return cache


def _product(x: jax.Array, weights: Tree, name: str) -> jax.Array:
    y = x @ weights[name]
    return y + weights[f"{name}_bias"] if f"{name}_bias" in weights else y


def _norm(config: ModelConfig, weights: Tree, x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    if config.norm == "layer":
        y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + config.norm_eps)
    y = y * weights["scale"]
    return (y + weights["bias"] if config.norm == "layer" else y).astype(x.dtype)


def _rotation(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    exponents = jnp.arange(0, config.head_size, 2, dtype=jnp.float32) / config.head_size
    angles = positions[:, None] / config.rope_theta**exponents
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
