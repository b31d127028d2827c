"""Large models as people write them elsewhere: sizes → a `ZooStep`.

The examples of this repository are what the planner was tuned on. These three were written without
a look at it: a GPT of Flax's own modules, T5 as lists of dicts, and Llama as one `lax.scan` over
stacked parameters with `jax.checkpoint`.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.program import ZooStep
from tests.zoo.steps import label_loss, next_token_loss, tokens, train_step
from tests.zoo.written.language import (
    attention,
    masked,
    merge_heads,
    rms_norm,
    rope,
    split_heads,
    swiglu,
    swiglu_init,
    t5_attend,
)
from tests.zoo.written.training import dense_init


def adam() -> optax.GradientTransformation:
    return optax.adamw(1e-4)


class LinenGPT(nn.Module):
    """GPT of `flax.linen`'s own modules, in float32."""

    depth: int
    dim: int
    heads: int
    vocabulary: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.dim)(tokens)
        x = x + nn.Embed(tokens.shape[1], self.dim)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.depth):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads)(y, mask=mask)
            y = nn.Dense(4 * self.dim)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.dim)(nn.gelu(y))
        return nn.Dense(self.vocabulary, use_bias=False)(nn.LayerNorm()(x))


def linen_gpt(
    depth: int, dim: int, heads: int, rows: int, length: int = 1024, vocabulary: int = 51200
) -> ZooStep:
    model = LinenGPT(depth, dim, heads, vocabulary)

    def init() -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return next_token_loss(model.apply(params, batch), batch)

    return train_step(loss, init, tokens(rows, length, vocabulary), adam())


def t5(
    depth: int,
    dim: int,
    heads: int,
    width: int,
    rows: int,
    *,
    length: int = 512,
    out: int = 128,
    scan: bool = False,
    remat: bool = False,
) -> ZooStep:
    """`depth` layers of encoder and as many of decoder, in bfloat16. `scan`: as two scans over
    stacked layers; `remat`: under `jax.checkpoint`."""
    vocabulary = 32128

    def attention_init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        return {n: dense_init(k, dim, dim) for n, k in zip("qkvo", keys, strict=True)}

    def layer_init(key: jax.Array, decoder: bool) -> Any:
        a, b, c = jax.random.split(key, 3)
        layer = {"self": attention_init(a), "mlp": swiglu_init(b, dim, width)}
        if decoder:
            layer["cross"] = attention_init(c)
        return layer | {"norms": jnp.ones((2 + decoder, dim))}

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 2 * depth + 1)
        return {
            "embedding": 0.02 * jax.random.normal(keys[0], (vocabulary, dim)),
            "encoder": layers_init(keys[1 : depth + 1], False),
            "decoder": layers_init(keys[depth + 1 :], True),
            "norms": jnp.ones((2, dim)),
        }

    def layers_init(keys: jax.Array, decoder: bool) -> Any:
        if scan:
            return jax.vmap(lambda key: layer_init(key, decoder))(keys)
        return [layer_init(key, decoder) for key in keys]

    def run(layer: Any, x: jax.Array, layers: Any) -> jax.Array:
        layer = jax.checkpoint(layer, prevent_cse=not scan) if remat else layer
        if scan:
            return jax.lax.scan(lambda x, own: (layer(x, own), None), x, layers)[0]
        for own in layers:
            x = layer(x, own)
        return x

    def loss(params: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        p = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        padding = masked(source != 0)[:, None, None]

        def encode(x: jax.Array, layer: Any) -> jax.Array:
            y = rms_norm(x, layer["norms"][0])
            x = x + t5_attend(layer["self"], y, y, padding, heads)
            return x + swiglu(layer["mlp"], rms_norm(x, layer["norms"][1]))

        memory = rms_norm(run(encode, p["embedding"][source], p["encoder"]), p["norms"][0])
        causal = masked(jnp.tril(jnp.ones((out, out), bool)))

        def decode(x: jax.Array, layer: Any) -> jax.Array:
            y = rms_norm(x, layer["norms"][0])
            x = x + t5_attend(layer["self"], y, y, causal, heads)
            y = rms_norm(x, layer["norms"][1])
            x = x + t5_attend(layer["cross"], y, memory, padding, heads)
            return x + swiglu(layer["mlp"], rms_norm(x, layer["norms"][2]))

        x = p["embedding"][jnp.pad(target[:, :-1], ((0, 0), (1, 0)))]
        x = run(decode, x, p["decoder"])
        return label_loss(rms_norm(x, p["norms"][1]) @ p["embedding"].T, target)

    def make_batch(i: int) -> tuple[Any, ...]:
        return (*tokens(rows, length, vocabulary)(i), *tokens(rows, out, vocabulary)(i))

    return train_step(loss, init, make_batch, adam())


def scanned_llama(
    depth: int, dim: int, heads: int, width: int, rows: int, *, length: int = 4096
) -> ZooStep:
    """One `lax.scan` over stacked layers under `jax.checkpoint`, 8 heads of keys, in bfloat16."""
    vocabulary, kv_heads = 32000, 8
    features = dim // heads

    def layer_init(key: jax.Array) -> Any:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "q": dense_init(a, dim, dim),
            "kv": dense_init(b, dim, 2 * kv_heads * features),
            "o": dense_init(c, dim, dim),
            "mlp": swiglu_init(d, dim, width),
            "norms": jnp.ones((2, dim)),
        }

    def init() -> Any:
        a, b, c = jax.random.split(jax.random.key(0), 3)
        return {
            "embedding": 0.02 * jax.random.normal(a, (vocabulary, dim)),
            "layers": jax.vmap(layer_init)(jax.random.split(b, depth)),
            "norm": jnp.ones(dim),
            "head": dense_init(c, dim, vocabulary),
        }

    def attend(w: Any, x: jax.Array) -> jax.Array:
        q = rope(split_heads(x @ w["q"], heads))
        k, v = jnp.split(split_heads(x @ w["kv"], 2 * kv_heads), 2, axis=2)
        k, v = (jnp.repeat(y, heads // kv_heads, axis=2) for y in (rope(k), v))
        causal = masked(jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)))
        return merge_heads(attention(q, k, v, causal)) @ w["o"]

    @jax.checkpoint
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda y: y.astype(jnp.bfloat16), w)
        x = x + attend(w, rms_norm(x, w["norms"][0]))
        return x + swiglu(w["mlp"], rms_norm(x, w["norms"][1])), None

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        x = params["embedding"].astype(jnp.bfloat16)[batch]
        x, _ = jax.lax.scan(layer, x, params["layers"])
        x = rms_norm(x, params["norm"]).astype(jnp.bfloat16)
        return next_token_loss(x @ params["head"].astype(jnp.bfloat16), batch)

    return train_step(loss, init, tokens(rows, length, vocabulary), adam())
