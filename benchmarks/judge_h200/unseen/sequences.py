"""Long sequences without quadratic attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    bf16,
    convolution,
    cross_entropy,
    f32,
    half,
    heads_of,
    integers,
    layer_norm,
    rms_norm,
    trained,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def state_space(
    rows: int,
    *,
    width: int = 1024,
    head: int = 64,
    state: int = 128,
    length: int = 4096,
    chunk: int = 256,
    vocabulary: int = 32000,
    depth: int = 2,
) -> ZooStep:
    """State spaces as products inside chunks, and a recurrence from chunk to chunk (Mamba 2)."""
    inner = 2 * width
    heads = inner // head
    sizes: Sizes = {"embed": (vocabulary, width), "norm": (width,)}
    for n in range(depth):
        sizes |= {f"in_{n}": (width, 2 * inner + 2 * state + heads), f"out_{n}": (inner, width)}
        sizes |= {f"conv_{n}": (4, 1, inner + 2 * state), f"decay_{n}": (heads,)}
        sizes |= {f"skip_{n}": (heads,), f"step_{n}": (heads,), f"norm_{n}": (width,)}
        sizes |= {f"inner_norm_{n}": (inner,)}

    def sums(x: jax.Array) -> jax.Array:
        """(…, t) → (…, t, t): sums of x over s < i ≤ t, and -inf above."""
        total = jnp.cumsum(x, -1)
        apart = total[..., :, None] - total[..., None, :]
        return jnp.where(jnp.tril(jnp.ones(apart.shape[-2:], bool)), apart, -jnp.inf)

    def scanned(x: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        """x: (batch, chunks, t, heads, head), a: its log decay, b, c: (batch, chunks, t, state)"""
        a = a.transpose(0, 3, 1, 2)  # (batch, heads, chunks, t)
        total = jnp.cumsum(a, -1)
        inside = jnp.exp(sums(a)).astype(bf16)
        scores = jnp.einsum("bcln,bcsn->bcls", c, b)
        y = jnp.einsum("bcls,bhcls,bcshp->bclhp", scores, inside, x)
        left = jnp.exp(total[..., -1:] - total).astype(bf16)
        states = jnp.einsum("bcln,bhcl,bclhp->bchpn", b, left, x)

        def tick(before: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            added, decay = now
            return before * decay[..., None, None] + added, before

        first = jnp.zeros((rows, heads, head, state))
        decays = jnp.exp(total[..., -1]).transpose(2, 0, 1)
        given = states.swapaxes(0, 1).astype(f32)
        _, before = jax.lax.scan(tick, first, (given, decays))
        before = before.swapaxes(0, 1).astype(bf16)
        out = jnp.exp(total).astype(bf16)
        return y + jnp.einsum("bcln,bchpn,bhcl->bclhp", c, before, out)

    def loss(params: Any, text: jax.Array) -> jax.Array:
        w = half(params)
        x = w["embed"][text]
        for n in range(depth):
            z, xbc, step = jnp.split(
                rms_norm(x, w[f"norm_{n}"]) @ w[f"in_{n}"],
                [inner, 2 * inner + 2 * state],
                -1,
            )
            xbc = jnp.pad(xbc, ((0, 0), (3, 0), (0, 0)))
            xbc = convolution(xbc, w[f"conv_{n}"], groups=inner + 2 * state, padding="VALID")
            y, b, c = jnp.split(jax.nn.silu(xbc), [inner, inner + state], -1)
            step = jax.nn.softplus(step.astype(f32) + params[f"step_{n}"])
            y = y.reshape(rows, length // chunk, chunk, heads, head)
            b, c = (v.reshape(rows, length // chunk, chunk, state) for v in (b, c))
            step = step.reshape(rows, length // chunk, chunk, heads)
            decay = -jnp.exp(params[f"decay_{n}"]) * step
            seen = scanned(y * step[..., None].astype(bf16), decay, b, c)
            seen = seen + y * w[f"skip_{n}"][:, None]
            seen = seen.reshape(rows, length, inner) * jax.nn.silu(z)
            x = x + rms_norm(seen, w[f"inner_norm_{n}"]) @ w[f"out_{n}"]
        logits = rms_norm(x, w["norm"]) @ w["embed"].T
        return cross_entropy(logits[:, :-1], text[:, 1:])

    return trained(lambda: weights(sizes), loss, lambda i: (integers(i, vocabulary, rows, length),))


def random_features(
    rows: int,
    *,
    width: int = 768,
    heads: int = 12,
    length: int = 4096,
    features: int = 256,
    depth: int = 3,
) -> ZooStep:
    """A softmax by positive random features of queries and keys (Performer), both ways."""
    vocabulary, head = 512, width // heads
    sizes: Sizes = {"embed": (vocabulary, width), "places": (length, width)}
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"up_{n}": (width, 4 * width), f"down_{n}": (4 * width, width)}
    sizes["out"] = (width, vocabulary)

    def init() -> Any:
        q, _ = jnp.linalg.qr(
            jax.random.normal(jax.random.key(1), (features // head + 1, head, head))
        )
        return weights(sizes) | {"directions": q.reshape(-1, head)[:features] * head**0.5}

    def positive(x: jax.Array, directions: jax.Array, is_query: bool) -> jax.Array:
        x = x.astype(f32) * head**-0.25
        along = jnp.einsum("blhd,fd->blhf", x, directions)
        power = (x**2).sum(-1, keepdims=True) / 2
        top = along.max(-1, keepdims=True) if is_query else along.max((1, 3), keepdims=True)
        top = jax.lax.stop_gradient(top)
        return ((jnp.exp(along - power - top) + 1e-4) * features**-0.5).astype(bf16)

    def loss(params: Any, text: jax.Array, labels: jax.Array) -> jax.Array:
        w, directions = half(params), jax.lax.stop_gradient(params["directions"])
        x = w["embed"][text] + w["places"]
        for n in range(depth):
            qkv = jnp.split(layer_norm(x) @ w[f"qkv_{n}"], 3, -1)
            q, k, v = (heads_of(y, heads) for y in qkv)
            q, k = positive(q, directions, True), positive(k, directions, False)
            memory = jnp.einsum("blhf,blhd->bhfd", k, v)
            below = jnp.einsum("blhf,bhf->blh", q, k.sum(1, dtype=f32).astype(bf16))
            seen = jnp.einsum("blhf,bhfd->blhd", q, memory) / below[..., None]
            x = x + seen.reshape(rows, length, width) @ w[f"o_{n}"]
            x = x + jax.nn.gelu(layer_norm(x) @ w[f"up_{n}"]) @ w[f"down_{n}"]
        return cross_entropy(layer_norm(x) @ w["out"], labels)

    def batch(i: int) -> tuple[jax.Array, ...]:
        text = integers(i, vocabulary, rows, length)
        return jnp.where(integers(i + 1, 7, rows, length) == 0, 0, text), text

    return trained(init, loss, batch)
