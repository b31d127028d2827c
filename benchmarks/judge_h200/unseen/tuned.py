"""Fine-tuning: a quantized base with small matrices beside it, and preferences between answers."""

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
    rms_norm,
    rotated,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]
_BLOCK = 64


def quantized_base(
    rows: int,
    *,
    width: int = 4096,
    heads: int = 32,
    inner: int = 11008,
    length: int = 1024,
    vocabulary: int = 32000,
    depth: int = 2,
    rank: int = 16,
) -> ZooStep:
    """Llama whose matrices are 8-bit numbers with a scale for each 64 of them, made again in the
    backward pass, with matrices of low rank beside them."""
    shapes: Sizes = {part: (width, width) for part in "qkvo"}
    shapes |= {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}

    def quantized(key: jax.Array, shape: tuple[int, ...]) -> dict[str, jax.Array]:
        codes = jax.random.randint(key, (shape[0] // _BLOCK, _BLOCK, shape[1]), -127, 128, jnp.int8)
        scale = jnp.full((shape[0] // _BLOCK, 1, shape[1]), 1e-4 / shape[0] ** 0.5, bf16)
        return {"codes": codes, "scale": scale}

    def make_state() -> Any:
        keys = jax.random.split(jax.random.key(0), depth)
        base = [
            {
                name: quantized(own, shape)
                for own, (name, shape) in zip(
                    jax.random.split(key, len(shapes)), shapes.items(), strict=True
                )
            }
            for key in keys
        ]
        small: Sizes = {}
        for n in range(depth):
            for name, (into, out) in shapes.items():
                small |= {f"{name}_a_{n}": (into, rank), f"{name}_b_{n}": (rank, out)}
        embed = (0.02 * jax.random.normal(keys[0], (vocabulary, width))).astype(bf16)
        params = weights(small)
        return {"base": base, "embed": embed, "params": params, "opt": adam.init(params)}

    adam = adamw(1e-4, 0.0, clip=0.3)

    def loss(params: Any, base: Any, embed: jax.Array, text: jax.Array) -> jax.Array:
        w = half(params)

        def times(x: jax.Array, n: int, name: str) -> jax.Array:
            matrix = base[n][name]
            whole = (matrix["codes"].astype(bf16) * matrix["scale"]).reshape(-1, shapes[name][1])
            return x @ whole + 2.0 * ((x @ w[f"{name}_a_{n}"]) @ w[f"{name}_b_{n}"])

        def layer(x: jax.Array, n: int) -> jax.Array:
            y = rms_norm(x, jnp.zeros(width))
            q, k, v = (heads_of(times(y, n, part), heads) for part in "qkv")
            x = x + times(attend(rotated(q), rotated(k), v, causal(length)), n, "o")
            y = rms_norm(x, jnp.zeros(width))
            y = jax.nn.silu(times(y, n, "gate")) * times(y, n, "up")
            return x + times(y, n, "down")

        x = embed[text]
        for n in range(depth):
            x = jax.checkpoint(layer, static_argnums=1)(x, n)
        logits = rms_norm(x, jnp.zeros(width)) @ embed.T
        return cross_entropy(logits[:, :-1], text[:, 1:])

    def step(state: Any, text: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(
            state["params"], state["base"], state["embed"], text
        )
        params, opt = adam.update(grads, state["opt"], state["params"])
        return state | {"params": params, "opt": opt}, value

    return ZooStep(step, make_state, lambda i: (integers(i, vocabulary, rows, length),))


def preferences(
    rows: int,
    *,
    width: int = 2048,
    heads: int = 16,
    length: int = 512,
    vocabulary: int = 32000,
    depth: int = 2,
) -> ZooStep:
    """Direct preference optimization: a frozen copy of the model says how likely both answers
    were."""
    sizes: Sizes = {"embed": (vocabulary, width), "head": (width, vocabulary)}
    for n in range(depth):
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"in_{n}": (width, 6 * width), f"out_{n}": (3 * width, width)}
        sizes |= {f"norm_{n}_{part}": (width,) for part in range(2)}
    adam = adamw(5e-7, 0.0, clip=1.0)

    def likelihood(w: Any, text: jax.Array, is_answer: jax.Array) -> jax.Array:
        x = w["embed"][text]
        for n in range(depth):
            qkv = jnp.split(rms_norm(x, w[f"norm_{n}_0"]) @ w[f"qkv_{n}"], 3, -1)
            q, k, v = (heads_of(y, heads) for y in qkv)
            x = x + attend(rotated(q), rotated(k), v, causal(length)) @ w[f"o_{n}"]
            gate, value = jnp.split(rms_norm(x, w[f"norm_{n}_1"]) @ w[f"in_{n}"], 2, -1)
            x = x + (jax.nn.silu(gate) * value) @ w[f"out_{n}"]
        log_p = jax.nn.log_softmax((x @ w["head"]).astype(f32)[:, :-1])
        each = jnp.take_along_axis(log_p, text[:, 1:, None], -1)[..., 0]
        return (each * is_answer[:, 1:]).sum(-1)

    def loss(params: Any, frozen: Any, text: jax.Array, is_answer: jax.Array) -> jax.Array:
        """Chosen answers are the first half of the rows."""
        ratio = likelihood(half(params), text, is_answer) - likelihood(frozen, text, is_answer)
        return -jax.nn.log_sigmoid(0.1 * (ratio[:rows] - ratio[rows:])).mean()

    def make_state() -> Any:
        params = weights(sizes)
        return {"params": params, "frozen": half(params), "opt": adam.init(params)}

    def step(state: Any, text: jax.Array, is_answer: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], state["frozen"], text, is_answer)
        params, opt = adam.update(grads, state["opt"], state["params"])
        return state | {"params": params, "opt": opt}, value

    def batch(i: int) -> tuple[jax.Array, ...]:
        is_answer = jnp.broadcast_to(jnp.arange(length) > length // 4, (2 * rows, length))
        return integers(i, vocabulary, 2 * rows, length), is_answer

    return ZooStep(step, make_state, batch)
