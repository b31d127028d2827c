"""Training beside parameters that do not train: distillation, LoRA, and an EMA teacher."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

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
    swiglu,
    swiglu_init,
)
from tests.zoo.written.training import adamw, dense_init, integers, normal, pick


def decoder_init(key: jax.Array, s: LMSize, width: int) -> Any:
    def layer(key: jax.Array) -> Any:
        a, b, c = jax.random.split(key, 3)
        return {
            "qkv": dense_init(a, s.dim, 3 * s.dim),
            "o": dense_init(b, s.dim, s.dim),
            "mlp": swiglu_init(c, s.dim, width),
            "norms": jnp.ones((2, s.dim)),
        }

    first, *keys = jax.random.split(key, s.depth + 1)
    embedding = embedding_init(first, s.vocabulary, s.dim)
    return {"embedding": embedding, "layers": [layer(k) for k in keys], "norm": jnp.ones(s.dim)}


def decoder(params: Any, tokens: jax.Array, s: LMSize, adapters: Any = None) -> jax.Array:
    """Logits; with `adapters`, every layer's qkv has a low-rank term (a, b)."""
    p = cast(params, s.dtype)
    causal = masked(np.tril(np.ones((tokens.shape[1],) * 2, bool)))
    x = p["embedding"][tokens]
    for i, w in enumerate(p["layers"]):
        y = rms_norm(x, w["norms"][0])
        qkv = y @ w["qkv"]
        if adapters is not None:
            a, b = cast(adapters[i], s.dtype)
            qkv += 2 * (y @ a) @ b
        q, k, v = jnp.split(split_heads(qkv, 3 * s.heads), 3, axis=2)
        x = x + merge_heads(attention(rope(q), rope(k), v, causal)) @ w["o"]
        x = x + swiglu(w["mlp"], rms_norm(x, w["norms"][1]))
    return rms_norm(x, p["norm"]) @ p["embedding"].T


@zoo_program("distillation", source="written", layers=True)
def distillation(size: Size) -> ZooStep:
    """The teacher is in the state and returned as it was."""
    big = pick(
        size, LMSize(16, 7, 61, 32, 4, 2), LMSize(64, 2048, 32000, 4096, 32, 32, jnp.bfloat16)
    )
    little = pick(size, big._replace(dim=16, heads=2), big._replace(dim=2048, heads=16, depth=16))
    tx, heat = adamw(), 2.0

    def make_state() -> Any:
        student = decoder_init(jax.random.key(0), little, 2 * little.dim)
        teacher = decoder_init(jax.random.key(1), big, 2 * big.dim)
        teacher = cast(teacher, big.dtype)
        return {"student": student, "teacher": teacher, "opt": tx.init(student)}

    def step(state: Any, tokens: jax.Array) -> Any:
        wanted = jax.nn.softmax(decoder(state["teacher"], tokens, big).astype(jnp.float32) / heat)

        def loss(student: Any) -> jax.Array:
            logits = decoder(student, tokens, little).astype(jnp.float32)
            soft = -jnp.sum(wanted * jax.nn.log_softmax(logits / heat), -1).mean()
            return heat**2 * soft + 0.5 * next_token_loss(logits, tokens)

        value, grads = jax.value_and_grad(loss)(state["student"])
        updates, opt = tx.update(grads, state["opt"], state["student"])
        return state | {
            "student": optax.apply_updates(state["student"], updates),
            "opt": opt,
        }, value

    return ZooStep(step, make_state, lambda i: (integers(i, big.vocabulary, big.rows, big.length),))


@zoo_program("lora", source="written", layers=True)
def lora(size: Size) -> ZooStep:
    """Only the adapters have gradients and optimizer state; the base is frozen."""
    s = pick(
        size,
        LMSize(16, 7, 61, 32, 4, 2),
        LMSize(64, 4096, 32000, 4096, 32, 32, jnp.bfloat16),
        LMSize(4, 1024, 32000, 4096, 32, 2, jnp.bfloat16),
    )
    rank, width = pick(size, (3, 48), (16, 11008))
    tx = adamw()

    def make_state() -> Any:
        base = cast(decoder_init(jax.random.key(0), s, width), s.dtype)
        keys = jax.random.split(jax.random.key(1), s.depth)
        adapters = [
            (dense_init(k, s.dim, rank), 0.01 * dense_init(k, rank, 3 * s.dim)) for k in keys
        ]
        return {"base": base, "adapters": adapters, "opt": tx.init(adapters)}

    def step(state: Any, tokens: jax.Array) -> Any:
        def loss(adapters: Any) -> jax.Array:
            return next_token_loss(decoder(state["base"], tokens, s, adapters), tokens)

        value, grads = jax.value_and_grad(loss)(state["adapters"])
        updates, opt = tx.update(grads, state["opt"], state["adapters"])
        adapters = optax.apply_updates(state["adapters"], updates)
        return {"base": state["base"], "adapters": adapters, "opt": opt}, value

    return ZooStep(step, make_state, lambda i: (integers(i, s.vocabulary, s.rows, s.length),))


@zoo_program("ema", source="written", layers=True)
def ema(size: Size) -> ZooStep:
    """BYOL: a target network is the average of the online one, which learns to predict it."""
    rows, width, hidden, out = pick(size, (16, 12, 24, 8), (4096, 8192, 8192, 512))
    tx = adamw()

    def init(key: jax.Array, *widths: int) -> Any:
        keys = jax.random.split(key, len(widths) - 1)
        return [dense_init(k, m, n) for k, m, n in zip(keys, widths, widths[1:], strict=False)]

    def net(layers: Any, x: jax.Array) -> jax.Array:
        for w in layers[:-1]:
            x = jax.nn.relu(x @ w)
            x = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-2)
        x = x @ layers[-1]
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def make_state() -> Any:
        a, b = jax.random.split(jax.random.key(0))
        params = {
            "net": init(a, width, hidden, hidden, out),
            "predictor": init(b, out, hidden, out),
        }
        target = jax.tree.map(jnp.copy, params["net"])
        return {"params": params, "target": target, "opt": tx.init(params), "step": jnp.zeros(())}

    def step(state: Any, one: jax.Array, two: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            value = 0.0
            for a, b in ((one, two), (two, one)):
                predicted = net(params["predictor"], net(params["net"], a))
                value += 2 - 2 * jnp.sum(predicted * net(state["target"], b), -1).mean()
            return value  # type: ignore[return-value]

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params: Any = optax.apply_updates(state["params"], updates)
        decay = 1 - 0.004 * (jnp.cos(jnp.pi * state["step"] / 1000) + 1) / 2
        target = optax.incremental_update(params["net"], state["target"], 1 - decay)
        return {"params": params, "target": target, "opt": opt, "step": state["step"] + 1}, value

    return ZooStep(
        step, make_state, lambda i: (normal(2 * i, rows, width), normal(2 * i + 1, rows, width))
    )
