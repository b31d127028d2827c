"""Language models in plain JAX: T5, sliding-window attention, MLA, packed sequences.

Parameters of equal layers are lists of dicts; `sliding_window` stacks them and scans.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import (
    adamw_if_real,
    cross_entropy,
    dense_init,
    integers,
    pick,
    trained,
)


class LMSize(NamedTuple):
    rows: int
    length: int
    vocabulary: int
    dim: int
    heads: int
    depth: int
    dtype: Any = jnp.float32


def embedding_init(key: jax.Array, vocabulary: int, dim: int) -> jax.Array:
    return jax.random.normal(key, (vocabulary, dim)) * 0.02


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def rope(x: jax.Array, position: jax.Array | None = None) -> jax.Array:
    """Rotates pairs of features of (batch, length, heads, features) by their position."""
    half = x.shape[-1] // 2
    position = jnp.arange(x.shape[1])[None] if position is None else position
    angle = position[..., None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
    """softmax(q k / √d + bias) v; a masked position has a bias of -1e9."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(scores + bias).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def masked(mask: Any) -> jax.Array:
    return jnp.where(mask, 0.0, -1e9)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


def merge_heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], -1)


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def swiglu_init(key: jax.Array, dim: int, width: int) -> dict[str, jax.Array]:
    a, b, c = jax.random.split(key, 3)
    return {
        "gate": dense_init(a, dim, width),
        "up": dense_init(b, dim, width),
        "down": dense_init(c, width, dim),
    }


def swiglu(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


# T5


def relative_buckets(queries: int, keys: int, buckets: int, bidirectional: bool) -> np.ndarray:
    """The bucket of every distance: exact for near ones, logarithmic for far ones."""
    distance = np.arange(keys)[None] - np.arange(queries)[:, None]
    base = np.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        base = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = buckets // 2
    far = exact + np.log(np.maximum(distance, 1) / exact) / np.log(128 / exact) * (buckets - exact)
    return base + np.where(distance < exact, distance, np.minimum(far.astype(int), buckets - 1))


def t5_attend(p: Any, x: jax.Array, memory: jax.Array, bias: jax.Array, heads: int) -> jax.Array:
    q, k, v = x @ p["q"], memory @ p["k"], memory @ p["v"]
    q, k, v = (split_heads(y, heads) for y in (q, k, v))
    return merge_heads(attention(q, k, v, bias)) @ p["o"]


@zoo_program("t5", source="written", layers=True)
def t5(size: Size) -> ZooStep:
    """Encoder and decoder with cross-attention, relative position biases and tied embeddings."""
    s = pick(
        size,
        LMSize(16, 9, 61, 32, 4, 2),
        LMSize(256, 512, 32128, 1024, 16, 24, jnp.bfloat16),
        LMSize(32, 512, 32128, 1024, 16, 2, jnp.bfloat16),
    )
    out_length, width, buckets = pick(size, (7, 48, 8), (114, 2816, 32))

    def attention_init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        return {n: dense_init(k, s.dim, s.dim) for n, k in zip("qkvo", keys, strict=True)}

    def layer_init(key: jax.Array, decoder: bool) -> Any:
        a, b, c = jax.random.split(key, 3)
        layer = {"self": attention_init(a), "mlp": swiglu_init(b, s.dim, width)}
        if decoder:
            layer["cross"] = attention_init(c)
        return layer | {"norms": jnp.ones((2 + decoder, s.dim))}

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 2 * s.depth + 2)
        return {
            "embedding": embedding_init(keys[0], s.vocabulary, s.dim),
            "bias": jnp.zeros((2, buckets, s.heads)),
            "encoder": [layer_init(k, False) for k in keys[2 : s.depth + 2]],
            "decoder": [layer_init(k, True) for k in keys[s.depth + 2 :]],
            "norms": jnp.ones((2, s.dim)),
        }

    def position_bias(table: jax.Array, length: int, bidirectional: bool) -> jax.Array:
        return table[relative_buckets(length, length, buckets, bidirectional)].transpose(2, 0, 1)

    def loss(params: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        p = cast(params, s.dtype)
        x = p["embedding"][source]
        bias = position_bias(p["bias"][0], source.shape[1], True)
        bias = bias + masked(source != 0)[:, None, None]
        for layer in p["encoder"]:
            y = rms_norm(x, layer["norms"][0])
            x = x + t5_attend(layer["self"], y, y, bias, s.heads)
            x = x + swiglu(layer["mlp"], rms_norm(x, layer["norms"][1]))
        memory = rms_norm(x, p["norms"][0])
        cross = masked(source != 0)[:, None, None]
        causal = position_bias(p["bias"][1], out_length, False)
        causal = causal + masked(np.tril(np.ones((out_length, out_length), bool)))
        x = p["embedding"][jnp.pad(target[:, :-1], ((0, 0), (1, 0)))]
        for layer in p["decoder"]:
            y = rms_norm(x, layer["norms"][0])
            x = x + t5_attend(layer["self"], y, y, causal, s.heads)
            x = x + t5_attend(
                layer["cross"], rms_norm(x, layer["norms"][1]), memory, cross, s.heads
            )
            x = x + swiglu(layer["mlp"], rms_norm(x, layer["norms"][2]))
        return cross_entropy(rms_norm(x, p["norms"][1]) @ p["embedding"].T, target)

    def make_batch(i: int) -> tuple:
        source = integers(2 * i, s.vocabulary, s.rows, s.length)
        return source, integers(2 * i + 1, s.vocabulary, s.rows, out_length)

    return trained(init, loss, make_batch, adamw_if_real(size))


# Sliding windows


def window_mask(blocks: int, window: int) -> jax.Array:
    """(block, query, key) → whether the query sees the key, of its block and the one before."""
    ahead = jnp.arange(2 * window)[None] - window - jnp.arange(window)[:, None]
    near = (ahead <= 0) & (ahead > -window)
    inside = (jnp.arange(blocks)[:, None] > 0) | (jnp.arange(2 * window) >= window)
    return near & inside[:, None]


@zoo_program("sliding-window", source="written", layers=True)
def sliding_window(size: Size) -> ZooStep:
    """Each block of the sequence attends to itself and the one before; layers are scanned, and
    grouped queries share a key."""
    s = pick(
        size,
        LMSize(16, 12, 61, 32, 4, 3),
        LMSize(64, 8192, 32000, 4096, 32, 32, jnp.bfloat16),
        LMSize(1, 8192, 32000, 2048, 16, 4, jnp.bfloat16),
    )
    window, kv_heads, width = pick(size, (4, 2, 48), (1024, 8, 14336), (1024, 4, 7168))
    features = s.dim // s.heads

    def layer_init(key: jax.Array) -> Any:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "q": dense_init(a, s.dim, s.dim),
            "kv": dense_init(b, s.dim, 2 * kv_heads * features),
            "o": dense_init(c, s.dim, s.dim),
            "mlp": swiglu_init(d, s.dim, width),
            "norms": jnp.ones((2, s.dim)),
        }

    def init() -> Any:
        a, b, c = jax.random.split(jax.random.key(0), 3)
        return {
            "embedding": embedding_init(a, s.vocabulary, s.dim),
            "layers": jax.vmap(layer_init)(jax.random.split(b, s.depth)),
            "norm": jnp.ones(s.dim),
            "head": dense_init(c, s.dim, s.vocabulary),
        }

    def local_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def blocks(x: jax.Array) -> jax.Array:
            return x.reshape(x.shape[0], -1, window, *x.shape[2:])

        def with_previous(x: jax.Array) -> jax.Array:
            x = blocks(x)
            before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
            return jnp.concatenate([before, x], axis=2)

        q, k, v = blocks(q), with_previous(k), with_previous(v)
        q = q.reshape(*q.shape[:3], kv_heads, -1, features)
        scores = jnp.einsum("bnqkgd,bnskd->bnkgqs", q, k).astype(jnp.float32) / features**0.5
        mask = window_mask(q.shape[1], window)
        weights = jax.nn.softmax(scores + masked(mask)[:, None, None]).astype(v.dtype)
        out = jnp.einsum("bnkgqs,bnskd->bnqkgd", weights, v)
        return out.reshape(out.shape[0], s.length, s.dim)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        p = cast(params, s.dtype)

        def layer(x: jax.Array, w: Any) -> Any:
            y = rms_norm(x, w["norms"][0])
            q = rope(split_heads(y @ w["q"], s.heads))
            k, v = jnp.split(split_heads(y @ w["kv"], 2 * kv_heads), 2, axis=2)
            x = x + local_attention(q, rope(k), v) @ w["o"]
            return x + swiglu(w["mlp"], rms_norm(x, w["norms"][1])), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), p["embedding"][tokens], p["layers"])
        return next_token_loss(rms_norm(x, p["norm"]) @ p["head"], tokens)

    return trained(init, loss, lambda i: (integers(i, s.vocabulary, s.rows, s.length),))


# Multi-head latent attention


@zoo_program("mla", source="written", layers=True)
def mla(size: Size) -> ZooStep:
    """Keys and values come from one low-rank latent; rotary features have a key of their own that
    all heads share."""
    s = pick(
        size, LMSize(16, 7, 61, 32, 4, 2), LMSize(64, 4096, 102400, 2048, 16, 27, jnp.bfloat16)
    )
    latent, nope, rotary, width = pick(size, (10, 8, 4, 48), (512, 128, 64, 10944))

    def layer_init(key: jax.Array) -> Any:
        a, b, c, d, e = jax.random.split(key, 5)
        return {
            "q": dense_init(a, s.dim, s.heads * (nope + rotary)),
            "down": dense_init(b, s.dim, latent + rotary),
            "up": dense_init(c, latent, s.heads * 2 * nope),
            "o": dense_init(d, s.heads * nope, s.dim),
            "mlp": swiglu_init(e, s.dim, width),
            "norms": jnp.ones((2, s.dim)),
            "latent_norm": jnp.ones(latent),
        }

    def init() -> Any:
        a, b, *keys = jax.random.split(jax.random.key(0), s.depth + 2)
        return {
            "embedding": embedding_init(a, s.vocabulary, s.dim),
            "layers": [layer_init(k) for k in keys],
            "norm": jnp.ones(s.dim),
            "head": dense_init(b, s.dim, s.vocabulary),
        }

    def attend(w: Any, x: jax.Array, bias: jax.Array) -> jax.Array:
        q = split_heads(x @ w["q"], s.heads)
        q = jnp.concatenate([q[..., :nope], rope(q[..., nope:])], axis=-1)
        down = x @ w["down"]
        shared = rope(down[:, :, None, latent:])
        kv = split_heads(rms_norm(down[..., :latent], w["latent_norm"]) @ w["up"], s.heads)
        shared = jnp.broadcast_to(shared, (*kv.shape[:3], rotary))
        k = jnp.concatenate([kv[..., :nope], shared], axis=-1)
        return merge_heads(attention(q, k, kv[..., nope:], bias)) @ w["o"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        p = cast(params, s.dtype)
        causal = masked(np.tril(np.ones((s.length, s.length), bool)))
        x = p["embedding"][tokens]
        for w in p["layers"]:
            x = x + attend(w, rms_norm(x, w["norms"][0]), causal)
            x = x + swiglu(w["mlp"], rms_norm(x, w["norms"][1]))
        return next_token_loss(rms_norm(x, p["norm"]) @ p["head"], tokens)

    return trained(init, loss, lambda i: (integers(i, s.vocabulary, s.rows, s.length),))


# Packed sequences


@zoo_program("packed", source="written", layers=True)
def packed(size: Size) -> ZooStep:
    """Several documents per row: attention stays within a document, positions restart, and the
    loss is a mean over the tokens that have a next one."""
    s = pick(
        size, LMSize(16, 11, 61, 32, 4, 2), LMSize(128, 4096, 50304, 2048, 16, 24, jnp.bfloat16)
    )

    def layer_init(key: jax.Array) -> Any:
        a, b, c = jax.random.split(key, 3)
        return {
            "qkv": dense_init(a, s.dim, 3 * s.dim),
            "o": dense_init(b, s.dim, s.dim),
            "mlp": swiglu_init(c, s.dim, 2 * s.dim),
            "norms": jnp.ones((2, s.dim)),
        }

    def init() -> Any:
        a, *keys = jax.random.split(jax.random.key(0), s.depth + 1)
        return {
            "embedding": embedding_init(a, s.vocabulary, s.dim),
            "layers": [layer_init(k) for k in keys],
            "norm": jnp.ones(s.dim),
        }

    def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        p, tokens, segments = cast(params, s.dtype), batch["tokens"], batch["segments"]
        same = segments[:, :, None] == segments[:, None, :]
        bias = masked(same & np.tril(np.ones((s.length, s.length), bool)))[:, None]
        x = p["embedding"][tokens]
        for w in p["layers"]:
            qkv = split_heads(rms_norm(x, w["norms"][0]) @ w["qkv"], 3 * s.heads)
            q, k, v = jnp.split(qkv, 3, axis=2)
            q, k = rope(q, batch["positions"]), rope(k, batch["positions"])
            x = x + merge_heads(attention(q, k, v, bias)) @ w["o"]
            x = x + swiglu(w["mlp"], rms_norm(x, w["norms"][1]))
        logits = (rms_norm(x, p["norm"]) @ p["embedding"].T)[:, :-1].astype(jnp.float32)
        counted = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]
        return -jnp.sum(log_p * counted) / jnp.maximum(counted.sum(), 1)

    def make_batch(i: int) -> tuple:
        starts = integers(i, 4, s.rows, s.length) == 0
        segments = 1 + jnp.cumsum(starts, axis=1)
        index = jnp.arange(s.length)
        positions = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
        tokens = integers(i + 1, s.vocabulary, s.rows, s.length)
        return ({"tokens": tokens, "segments": segments, "positions": positions},)

    return trained(init, loss, make_batch)
