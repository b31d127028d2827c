"""Mixtures of experts: dropless with `ragged_dot`, dropless by sorting into padded blocks, and with
a capacity per expert.

The blocks of an expert's tokens depend on the whole batch, so only the capacity's einsum has rows
that micro-batches leave alone (and even there, what is dropped differs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.language import (
    LMSize,
    attention,
    cast,
    embedding_init,
    masked,
    merge_heads,
    next_token_loss,
    rms_norm,
    rope,
    split_heads,
)
from tests.zoo.written.training import dense_init, integers, pick, trained

SMALL = LMSize(16, 7, 61, 24, 3, 2)
REAL = LMSize(64, 2048, 50304, 2048, 16, 16, jnp.bfloat16)
ONE_GPU = LMSize(8, 1024, 50304, 1024, 16, 2, jnp.bfloat16)


class Experts(NamedTuple):
    num_experts: int
    top: int
    width: int


def experts_of(size: Size) -> Experts:
    return pick(size, Experts(5, 2, 16), Experts(64, 8, 1024), Experts(16, 2, 2048))


Mix = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


def moe_language_model(s: LMSize, e: Experts, mix: Mix) -> ZooStep:
    """`mix(w, tokens, weights, chosen)` applies every token's experts."""

    def layer_init(key: jax.Array) -> Any:
        a, b, c, d, f = jax.random.split(key, 5)
        stack = jax.vmap(dense_init, in_axes=(0, None, None))
        return {
            "qkv": dense_init(a, s.dim, 3 * s.dim),
            "o": dense_init(b, s.dim, s.dim),
            "router": dense_init(c, s.dim, e.num_experts),
            "up": stack(jax.random.split(d, e.num_experts), s.dim, e.width),
            "down": stack(jax.random.split(f, e.num_experts), e.width, s.dim),
            "norms": jnp.ones((2, s.dim)),
        }

    def init() -> Any:
        a, *keys = jax.random.split(jax.random.key(0), s.depth + 1)
        return {
            "embedding": embedding_init(a, s.vocabulary, s.dim),
            "layers": [layer_init(k) for k in keys],
            "norm": jnp.ones(s.dim),
        }

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        p, balance = cast(params, s.dtype), 0.0
        causal = masked(np.tril(np.ones((s.length, s.length), bool)))
        x = p["embedding"][tokens]
        for w in p["layers"]:
            qkv = split_heads(rms_norm(x, w["norms"][0]) @ w["qkv"], 3 * s.heads)
            q, k, v = jnp.split(qkv, 3, axis=2)
            x = x + merge_heads(attention(rope(q), rope(k), v, causal)) @ w["o"]
            y = rms_norm(x, w["norms"][1]).reshape(-1, s.dim)
            gates = jax.nn.softmax((y @ w["router"]).astype(jnp.float32))
            weights, chosen = jax.lax.top_k(gates, e.top)
            weights = weights / weights.sum(-1, keepdims=True)
            load = jnp.mean(jax.nn.one_hot(chosen, e.num_experts).sum(1), axis=0) / e.top
            balance += e.num_experts * jnp.sum(load * gates.mean(0))
            x = x + mix(w, y, weights.astype(y.dtype), chosen).reshape(x.shape)
        logits = rms_norm(x, p["norm"]) @ p["embedding"].T
        return next_token_loss(logits, tokens) + 0.01 * balance

    return trained(init, loss, lambda i: (integers(i, s.vocabulary, s.rows, s.length),))


@zoo_program("moe-ragged-dot", source="written", layers=True, micro_batches=1)
def moe_ragged_dot(size: Size) -> ZooStep:
    e = experts_of(size)

    def mix(w: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=e.num_experts)
        y = x[order // e.top]
        y = jax.lax.ragged_dot(jax.nn.silu(jax.lax.ragged_dot(y, w["up"], sizes)), w["down"], sizes)
        return jnp.zeros_like(x).at[order // e.top].add(y * weights.ravel()[order, None])

    return moe_language_model(pick(size, SMALL, REAL, ONE_GPU), e, mix)


@zoo_program("moe-dropless", source="written", layers=True, micro_batches=1)
def moe_dropless(size: Size) -> ZooStep:
    """Every expert's tokens are padded to whole blocks; a block multiplies its expert's weights,
    gathered for it: the smaller the blocks, the more copies of the weights."""
    e, block = experts_of(size), pick(size, 4, 512, 128)

    def mix(w: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        expert = chosen.ravel()
        order = jnp.argsort(expert, stable=True)
        sizes = jnp.bincount(expert, length=e.num_experts)
        padded = (sizes + block - 1) // block * block
        first, first_padded = jnp.cumsum(sizes) - sizes, jnp.cumsum(padded) - padded
        rank = jnp.arange(expert.size) - first[expert[order]]
        place = first_padded[expert[order]] + rank
        blocks = -(-expert.size // block) + e.num_experts
        gathered = jnp.zeros((blocks * block, x.shape[1]), x.dtype).at[place].set(x[order // e.top])
        starts = jnp.arange(blocks) * block
        owner = jnp.searchsorted(jnp.cumsum(padded), starts, side="right").clip(
            0, e.num_experts - 1
        )
        y = gathered.reshape(blocks, block, -1)
        y = jax.nn.silu(jnp.einsum("nbd,ndf->nbf", y, w["up"][owner]))
        y = jnp.einsum("nbf,nfd->nbd", y, w["down"][owner]).reshape(blocks * block, -1)
        y = y[place] * weights.ravel()[order, None]
        return jax.ops.segment_sum(y, order // e.top, num_segments=x.shape[0])

    return moe_language_model(pick(size, SMALL, REAL, ONE_GPU), e, mix)


@zoo_program("moe-capacity", source="written", layers=True, micro_batches=1)
def moe_capacity(size: Size) -> ZooStep:
    """Tokens beyond an expert's capacity are dropped; a scatter dispatches, a gather returns."""
    e = experts_of(size)

    def mix(w: Any, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        capacity = -(-chosen.size * 5 // (4 * e.num_experts))
        expert = chosen.ravel()
        hot = jax.nn.one_hot(expert, e.num_experts, dtype=jnp.int32)
        rank = jnp.sum((jnp.cumsum(hot, axis=0) - 1) * hot, axis=-1)
        kept = rank < capacity
        rank = jnp.where(kept, rank, capacity)
        source = jnp.repeat(x, e.top, axis=0)
        slots = jnp.zeros((e.num_experts, capacity, x.shape[1]), x.dtype)
        slots = slots.at[expert, rank].set(source, mode="drop")
        y = jax.nn.silu(jnp.einsum("ecd,edf->ecf", slots, w["up"]))
        y = jnp.einsum("ecf,efd->ecd", y, w["down"])
        y = y.at[expert, rank].get(mode="fill", fill_value=0) * weights.reshape(-1, 1)
        return y.reshape(-1, e.top, x.shape[1]).sum(1)

    return moe_language_model(pick(size, SMALL, REAL, ONE_GPU), e, mix)
