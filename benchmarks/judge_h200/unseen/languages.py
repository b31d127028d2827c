"""Transformers on text and proteins."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adamw,
    attend,
    bf16,
    causal,
    cross_entropy,
    f32,
    half,
    heads_of,
    integers,
    layer_norm,
    rms_norm,
    rotated,
    trained,
    trained_with_key,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def soft_capped(
    rows: int,
    *,
    width: int = 2048,
    heads: int = 8,
    inner: int = 16384,
    length: int = 2048,
    vocabulary: int = 256000,
    depth: int = 2,
) -> ZooStep:
    """One head of keys, gated units, scores and logits under a tanh, and every other layer sees
    half of the text only."""
    head = width // heads
    sizes: Sizes = {"embed": (vocabulary, width), "norm": (width,)}
    for n in range(depth):
        sizes |= {f"q_{n}": (width, heads * head), f"kv_{n}": (width, 2 * head)}
        sizes |= {f"o_{n}": (heads * head, width), f"gate_{n}": (width, inner)}
        sizes |= {f"up_{n}": (width, inner), f"down_{n}": (inner, width)}
        sizes |= {f"norm_{n}_{part}": (width,) for part in range(4)}

    def capped(x: jax.Array, limit: float) -> jax.Array:
        return limit * jnp.tanh(x.astype(f32) / limit)

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = half(params)
        x = w["embed"][text] * width**0.5
        place = jnp.arange(length)
        is_near = place[:, None] - place[None] < length // 2
        for n in range(depth):
            y = rms_norm(x, w[f"norm_{n}_0"])
            q = rotated(heads_of(y @ w[f"q_{n}"], heads)) * head**-0.5
            k, v = jnp.split(y @ w[f"kv_{n}"], 2, -1)
            k = rotated(k[:, :, None])[:, :, 0]
            scores = capped(jnp.einsum("bqhd,bkd->bhqk", q, k), 50.0)
            mask = causal(length) if n % 2 else causal(length) & is_near
            p = jax.nn.softmax(jnp.where(mask, scores, -2e38)).astype(bf16)
            seen = jnp.einsum("bhqk,bkd->bqhd", p, v).reshape(rows, length, -1)
            x = x + rms_norm(seen @ w[f"o_{n}"], w[f"norm_{n}_1"])
            y = rms_norm(x, w[f"norm_{n}_2"])
            y = jax.nn.gelu(y @ w[f"gate_{n}"]) * (y @ w[f"up_{n}"])
            x = x + rms_norm(y @ w[f"down_{n}"], w[f"norm_{n}_3"])
        logits = capped(rms_norm(x, w["norm"]) @ w["embed"].T, 30.0)
        return cross_entropy(logits[:, :-1], text[:, 1:])

    return trained(
        lambda: weights(sizes),
        loss,
        lambda i: (integers(i, vocabulary, rows, length),),
        adamw(clip=1.0),
    )


def latent_experts(
    rows: int,
    *,
    width: int = 1024,
    heads: int = 16,
    length: int = 2048,
    vocabulary: int = 32000,
    experts: int = 32,
    chosen: int = 4,
    depth: int = 2,
) -> ZooStep:
    """Keys and values of one narrow latent, experts that all tokens share beside routed ones."""
    head, turned, latent, inner = width // heads, 32, width // 4, width // 2
    capacity = max(8, rows * length * chosen * 5 // (4 * experts))
    sizes: Sizes = {"embed": (vocabulary, width), "head": (width, vocabulary), "norm": (width,)}
    for n in range(depth):
        sizes |= {f"q_down_{n}": (width, latent), f"q_{n}": (latent, heads * (head + turned))}
        sizes |= {f"kv_down_{n}": (width, latent + turned), f"kv_{n}": (latent, heads * 2 * head)}
        sizes |= {f"o_{n}": (heads * head, width), f"router_{n}": (width, experts)}
        sizes |= {f"shared_in_{n}": (width, 2 * inner), f"shared_out_{n}": (inner, width)}
        sizes |= {f"in_{n}": (experts, width, 2 * inner), f"out_{n}": (experts, inner, width)}
        sizes |= {f"norm_{n}_{part}": (width,) for part in range(2)}
        sizes |= {f"norm_{n}_latent": (latent,)}

    def gated(x: jax.Array) -> jax.Array:
        gate, value = jnp.split(x, 2, -1)
        return jax.nn.silu(gate) * value

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = half(params)

        def attention(x: jax.Array, n: int) -> jax.Array:
            q = heads_of((x @ w[f"q_down_{n}"]) @ w[f"q_{n}"], heads)
            q, q_turned = q[..., :head], rotated(q[..., head:])
            kv = x @ w[f"kv_down_{n}"]
            k_turned = rotated(kv[:, :, None, latent:])
            kv = heads_of(rms_norm(kv[..., :latent], w[f"norm_{n}_latent"]) @ w[f"kv_{n}"], heads)
            k, v = jnp.split(kv, 2, -1)
            k_turned = jnp.broadcast_to(k_turned, (*k.shape[:3], turned))
            q, k = jnp.concatenate([q, q_turned], -1), jnp.concatenate([k, k_turned], -1)
            return attend(q, k, v, causal(length)) @ w[f"o_{n}"]

        def routed(x: jax.Array, n: int) -> jax.Array:
            x = x.reshape(-1, width)
            affinity = jax.nn.sigmoid((x @ w[f"router_{n}"]).astype(f32))
            gates, expert = jax.lax.top_k(affinity, chosen)
            gates = gates / gates.sum(-1, keepdims=True)
            expert, token = expert.reshape(-1), jnp.arange(x.shape[0]).repeat(chosen)
            order = jnp.argsort(expert)
            expert, token, gate = expert[order], token[order], gates.reshape(-1)[order]
            first = jnp.searchsorted(expert, jnp.arange(experts))
            slot = jnp.arange(expert.shape[0]) - first[expert]
            slots = jnp.zeros((experts, capacity, width), bf16)
            slots = slots.at[expert, slot].set(x[token], mode="drop")
            made = gated(jnp.einsum("ecd,edf->ecf", slots, w[f"in_{n}"]))
            made = jnp.einsum("ecf,efd->ecd", made, w[f"out_{n}"])
            back = made.at[expert, slot].get(mode="fill", fill_value=0)
            back = back * gate[:, None].astype(bf16)
            return jnp.zeros_like(x).at[token].add(back).reshape(rows, length, width)

        x = w["embed"][text]
        for n in range(depth):
            x = x + attention(rms_norm(x, w[f"norm_{n}_0"]), n)
            y = rms_norm(x, w[f"norm_{n}_1"])
            x = x + gated(y @ w[f"shared_in_{n}"]) @ w[f"shared_out_{n}"] + routed(y, n)
        logits = rms_norm(x, w["norm"]) @ w["head"]
        return cross_entropy(logits[:, :-1], text[:, 1:])

    return trained(lambda: weights(sizes), loss, lambda i: (integers(i, vocabulary, rows, length),))


def proteins(
    rows: int, *, width: int = 1280, heads: int = 20, length: int = 2048, depth: int = 2
) -> ZooStep:
    """Masked amino acids of long chains, some of which are padded."""
    letters = 33
    sizes: Sizes = {"embed": (letters, width), "dense": (width, width), "bias": (letters,)}
    for n in range(depth):
        sizes |= {f"{part}_{n}": (width, width) for part in "qkvo"}
        sizes |= {f"{part}_bias_{n}": (width,) for part in "qkvo"}
        sizes |= {f"up_{n}": (width, 4 * width), f"down_{n}": (4 * width, width)}

    def loss(params: Any, key: jax.Array, chain: jax.Array, lengths: jax.Array) -> jax.Array:
        w = half(params)
        is_there = jnp.arange(length) < lengths[:, None]
        is_masked = jax.random.bernoulli(key, 0.15, chain.shape) & is_there
        x = w["embed"][jnp.where(is_masked, letters - 1, chain)]
        x = jnp.where(is_there[..., None], x, 0)
        for n in range(depth):
            y = layer_norm(x)
            q, k, v = (heads_of(y @ w[f"{p}_{n}"] + w[f"{p}_bias_{n}"], heads) for p in "qkv")
            seen = attend(rotated(q), rotated(k), v, is_there[:, None, None])
            x = x + seen @ w[f"o_{n}"] + w[f"o_bias_{n}"]
            x = x + jax.nn.gelu(layer_norm(x) @ w[f"up_{n}"], approximate=False) @ w[f"down_{n}"]
        x = layer_norm(jax.nn.gelu(layer_norm(x) @ w["dense"]))
        logits = (x @ w["embed"].T + w["bias"]).astype(f32)
        picked = jnp.take_along_axis(logits, chain[..., None], -1)[..., 0]
        each = jax.nn.logsumexp(logits, -1) - picked
        return (each * is_masked).sum() / jnp.maximum(is_masked.sum(), 1)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return integers(i, letters - 1, rows, length), 1 + integers(i + 1, length, rows)

    return trained_with_key(lambda: weights(sizes), loss, batch)
