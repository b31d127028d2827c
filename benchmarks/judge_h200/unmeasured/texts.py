"""Language models as most people train them, at sizes that no other step here has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    Optimizer,
    adamw,
    attend,
    bf16,
    causal,
    cross_entropy,
    dropout,
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


def learned_places(
    rows: int,
    *,
    width: int = 1280,
    heads: int = 20,
    length: int = 1024,
    vocabulary: int = 50257,
    depth: int = 2,
) -> ZooStep:
    """GPT-2 large: learned positions, biases, one matrix for words in and out."""
    sizes: Sizes = {"words": (vocabulary, width), "places": (length, width)}
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"qkv_bias_{n}": (3 * width,)}
        sizes |= {f"o_{n}": (width, width), f"o_bias_{n}": (width,)}
        sizes |= {f"up_{n}": (width, 4 * width), f"up_bias_{n}": (4 * width,)}
        sizes |= {f"down_{n}": (4 * width, width), f"down_bias_{n}": (width,)}
        sizes |= {f"norm_{n}_{part}": (width,) for part in range(2)}

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = half(params)
        x = w["words"][text] + w["places"]
        for n in range(depth):
            y = layer_norm(x, w[f"norm_{n}_0"]) @ w[f"qkv_{n}"] + w[f"qkv_bias_{n}"]
            q, k, v = (heads_of(z, heads) for z in jnp.split(y, 3, -1))
            x = x + attend(q, k, v, causal(length)) @ w[f"o_{n}"] + w[f"o_bias_{n}"]
            y = layer_norm(x, w[f"norm_{n}_1"]) @ w[f"up_{n}"] + w[f"up_bias_{n}"]
            x = x + jax.nn.gelu(y) @ w[f"down_{n}"] + w[f"down_bias_{n}"]
        return cross_entropy((layer_norm(x) @ w["words"].T)[:, :-1], text[:, 1:])

    def batch(i: int) -> tuple[jax.Array, ...]:
        return (integers(i, vocabulary, rows, length),)

    return trained(lambda: weights(sizes), loss, batch, adamw(clip=1.0))


def _grouped_sizes(width: int, heads: int, shared: int, inner: int, depth: int) -> Sizes:
    sizes: Sizes = {}
    head = width // heads
    for n in range(depth):
        sizes |= {f"q_{n}": (width, width), f"kv_{n}": (width, 2 * shared * head)}
        sizes |= {f"o_{n}": (width, width), f"gate_{n}": (width, inner), f"up_{n}": (width, inner)}
        sizes |= {f"down_{n}": (inner, width)} | {f"norm_{n}_{k}": (width,) for k in range(2)}
    return sizes


def _grouped_layer(w: Any, n: Any, x: jax.Array, heads: int, shared: int) -> jax.Array:
    """Attention of several heads per key, and gated units. `n`: the layer, or "" in a stack."""
    rows, length, width = x.shape
    end = f"_{n}" if n != "" else ""
    y = rms_norm(x, w[f"norm{end}_0"])
    k, v = jnp.split(heads_of(y @ w[f"kv{end}"], 2 * shared), 2, 2)
    q = rotated(heads_of(y @ w[f"q{end}"], heads), 500000.0)
    q, k = q.reshape(rows, length, shared, heads // shared, -1), rotated(k, 500000.0)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", q, k).astype(f32) * (width // heads) ** -0.5
    scores = jnp.where(causal(length), scores, -1e9)
    p = jax.nn.softmax(scores).astype(bf16)
    x = x + jnp.einsum("bgrqk,bkgd->bqgrd", p, v).reshape(x.shape) @ w[f"o{end}"]
    y = rms_norm(x, w[f"norm{end}_1"])
    return x + (jax.nn.silu(y @ w[f"gate{end}"]) * (y @ w[f"up{end}"])) @ w[f"down{end}"]


def grouped_recomputed(
    rows: int,
    *,
    width: int = 3072,
    heads: int = 24,
    shared: int = 8,
    inner: int = 8192,
    length: int = 3072,
    vocabulary: int = 128256,
    depth: int = 2,
) -> ZooStep:
    """Llama 3.2 of 3B, every layer recomputed, all state in bfloat16."""
    sizes = _grouped_sizes(width, heads, shared, inner, depth)
    sizes |= {"words": (vocabulary, width), "norm": (width,)}

    def loss(w: Any, text: jax.Array) -> jax.Array:
        x = w["words"][text]
        for n in range(depth):
            names = [name for name in w if f"_{n}" in name]
            own = {name: w[name] for name in names}
            x = jax.checkpoint(lambda own, x, n=n: _grouped_layer(own, n, x, heads, shared))(own, x)
        return cross_entropy((rms_norm(x, w["norm"]) @ w["words"].T)[:, :-1], text[:, 1:])

    def batch(i: int) -> tuple[jax.Array, ...]:
        return (integers(i, vocabulary, rows, length),)

    narrow = adamw(1e-4)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        new, state = narrow.update(grads, state, params)
        return half(new), state | {"m": half(state["m"]), "v": half(state["v"])}

    return trained(lambda: half(weights(sizes)), loss, batch, Optimizer(narrow.init, update))


def accumulated(
    rows: int,
    *,
    width: int = 1536,
    heads: int = 12,
    shared: int = 2,
    inner: int = 8960,
    length: int = 1536,
    vocabulary: int = 49152,
    parts: int = 4,
    depth: int = 2,
) -> ZooStep:
    """Two keys for twelve heads; gradients of several micro-batches are added in a scan."""
    sizes = _grouped_sizes(width, heads, shared, inner, depth)
    sizes |= {"words": (vocabulary, width), "norm": (width,)}
    optimizer = adamw(clip=1.0)

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = half(params)
        x = w["words"][text]
        for n in range(depth):
            x = _grouped_layer(w, n, x, heads, shared)
        return cross_entropy((rms_norm(x, w["norm"]) @ w["words"].T)[:, :-1], text[:, 1:])

    def step(state: Any, text: jax.Array) -> Any:
        def add(total: Any, part: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(state[0], part)
            return jax.tree.map(jnp.add, total, (value / parts, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), state[0]))
        (value, grads), _ = jax.lax.scan(add, zeros, text)
        grads = jax.tree.map(lambda g: g / parts, grads)
        return optimizer.update(grads, state[1], state[0]), value

    def init() -> Any:
        params = weights(sizes)
        return params, optimizer.init(params)

    return ZooStep(step, init, lambda i: (integers(i, vocabulary, parts, rows, length),))


def stacked_layers(
    rows: int,
    *,
    width: int = 2304,
    heads: int = 18,
    shared: int = 6,
    inner: int = 6144,
    length: int = 1024,
    vocabulary: int = 32768,
    depth: int = 6,
) -> ZooStep:
    """A scan over stacked layers, each recomputed, as in large code bases."""
    one = _grouped_sizes(width, heads, shared, inner, 1)
    sizes: Sizes = {"words": (vocabulary, width), "head": (width, vocabulary), "norm": (width,)}

    def init() -> Any:
        layers = jax.vmap(lambda _: weights(one))(jnp.arange(depth))
        return weights(sizes) | {"layers": {k.replace("_0", "", 1): v for k, v in layers.items()}}

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = half(params)

        @jax.checkpoint
        def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
            return _grouped_layer(own, "", x, heads, shared), None

        x, _ = jax.lax.scan(layer, w["words"][text], w["layers"])
        return cross_entropy((rms_norm(x, w["norm"]) @ w["head"])[:, :-1], text[:, 1:])

    return trained(init, loss, lambda i: (integers(i, vocabulary, rows, length),))


def noisy_encoder(
    rows: int,
    *,
    width: int = 768,
    heads: int = 12,
    length: int = 384,
    vocabulary: int = 50265,
    depth: int = 2,
) -> ZooStep:
    """Fine-tuning RoBERTa to find answers: dropout everywhere, padding, two logits a word."""
    sizes: Sizes = {"words": (vocabulary, width), "places": (length, width), "span": (width, 2)}
    for n in range(depth):
        sizes |= {f"{part}_{n}": (width, width) for part in "qkvo"}
        sizes |= {f"{part}_bias_{n}": (width,) for part in "qkvo"}
        sizes |= {f"up_{n}": (width, 4 * width), f"up_bias_{n}": (4 * width,)}
        sizes |= {f"down_{n}": (4 * width, width), f"norm_{n}_0": (width,), f"norm_{n}_1": (width,)}

    def loss(params: Any, key: jax.Array, text: jax.Array, ends: jax.Array) -> jax.Array:
        w = half(params)
        keys = iter(jax.random.split(key, 1 + 3 * depth))
        is_there = (text > 1)[:, None, None]
        x = dropout(next(keys), layer_norm(w["words"][text] + w["places"]))
        for n in range(depth):
            q, k, v = (heads_of(x @ w[f"{p}_{n}"] + w[f"{p}_bias_{n}"], heads) for p in "qkv")
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(f32) * q.shape[-1] ** -0.5
            p = jax.nn.softmax(jnp.where(is_there, scores, -1e9)).astype(bf16)
            seen = jnp.einsum("bhqk,bkhd->bqhd", dropout(next(keys), p), v).reshape(x.shape)
            seen = dropout(next(keys), seen @ w[f"o_{n}"] + w[f"o_bias_{n}"])
            x = layer_norm(x + seen, w[f"norm_{n}_0"])
            y = jax.nn.gelu(x @ w[f"up_{n}"] + w[f"up_bias_{n}"], approximate=False)
            x = layer_norm(x + dropout(next(keys), y @ w[f"down_{n}"]), w[f"norm_{n}_1"])
        return cross_entropy((x @ w["span"]).swapaxes(1, 2), ends)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return integers(i, vocabulary, rows, length), integers(i + 1, length, rows, 2)

    return trained_with_key(lambda: weights(sizes), loss, batch, adamw(2e-5, clip=1.0))


def byte_level(
    rows: int, *, width: int = 1024, heads: int = 16, length: int = 2048, depth: int = 2
) -> ZooStep:
    """Bytes: 256 rows of an embedding, each of which many places update."""
    sizes: Sizes = {"bytes": (256, width), "head": (width, 256)}
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"up_{n}": (width, 3 * width), f"down_{n}": (3 * width, width)}
        sizes |= {f"norm_{n}_{part}": (width,) for part in range(2)}

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = half(params)
        x = w["bytes"][text]
        for n in range(depth):
            y = rms_norm(x, w[f"norm_{n}_0"]) @ w[f"qkv_{n}"]
            q, k, v = (heads_of(z, heads) for z in jnp.split(y, 3, -1))
            x = x + attend(rotated(q), rotated(k), v, causal(length)) @ w[f"o_{n}"]
            y = rms_norm(x, w[f"norm_{n}_1"]) @ w[f"up_{n}"]
            x = x + jax.nn.relu(y) ** 2 @ w[f"down_{n}"]
        return cross_entropy((layer_norm(x) @ w["head"])[:, :-1], text[:, 1:])

    return trained(lambda: weights(sizes), loss, lambda i: (integers(i, 256, rows, length),))


def dense_experts(
    rows: int,
    *,
    width: int = 1024,
    heads: int = 8,
    length: int = 1024,
    vocabulary: int = 32000,
    experts: int = 8,
    inner: int = 1792,
    depth: int = 2,
) -> ZooStep:
    """Every expert computes every token; gates of the best two weigh what they make."""
    sizes: Sizes = {"words": (vocabulary, width), "head": (width, vocabulary)}
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"router_{n}": (width, experts), f"norm_{n}_0": (width,), f"norm_{n}_1": (width,)}
        sizes |= {f"in_{n}": (experts, width, inner), f"out_{n}": (experts, inner, width)}

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = half(params)
        x, balance = w["words"][text], jnp.zeros(())
        for n in range(depth):
            y = rms_norm(x, w[f"norm_{n}_0"]) @ w[f"qkv_{n}"]
            q, k, v = (heads_of(z, heads) for z in jnp.split(y, 3, -1))
            x = x + attend(rotated(q), rotated(k), v, causal(length)) @ w[f"o_{n}"]
            y = rms_norm(x, w[f"norm_{n}_1"])
            p = jax.nn.softmax((y @ w[f"router_{n}"]).astype(f32))
            best, which = jax.lax.top_k(p, 2)
            chosen = jax.nn.one_hot(which, experts)
            gates = (chosen * (best / best.sum(-1, keepdims=True))[..., None]).sum(-2)
            balance = balance + experts * (chosen.mean((0, 1, 2)) * p.mean((0, 1))).sum()
            y = jax.nn.silu(jnp.einsum("bld,edf->blef", y, w[f"in_{n}"]))
            x = x + jnp.einsum("blef,efd,ble->bld", y, w[f"out_{n}"], gates.astype(bf16))
        logits = layer_norm(x) @ w["head"]
        return cross_entropy(logits[:, :-1], text[:, 1:]) + 0.01 * balance

    return trained(lambda: weights(sizes), loss, lambda i: (integers(i, vocabulary, rows, length),))
