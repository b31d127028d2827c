"""Loops over time, speech, sequences of states and of actions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adamw,
    attend,
    bf16,
    convolution,
    cross_entropy,
    f32,
    half,
    heads_of,
    integers,
    layer_norm,
    normal,
    trained,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def _gru(w: Any, name: str, h: jax.Array, given: jax.Array) -> jax.Array:
    """`given`: of the input, by the same three gates."""
    own = jnp.split(h @ w[f"{name}_h"], 3, -1)
    reset, update, new = jnp.split(given, 3, -1)
    update = jax.nn.sigmoid(update + own[1])
    new = jnp.tanh(new + jax.nn.sigmoid(reset + own[0]) * own[2])
    return (1 - update) * new + update * h


def translator(
    rows: int, *, width: int = 512, length: int = 48, vocabulary: int = 16000
) -> ZooStep:
    """A recurrent encoder and a decoder that attends to it at every word, in float32."""
    sizes: Sizes = {"from": (vocabulary, width), "to": (vocabulary, width)}
    sizes |= {"out": (2 * width, vocabulary), "weigh": (width, width)}
    sizes |= {"read_x": (width, 3 * width), "read_h": (width, 3 * width)}
    sizes |= {"write_x": (2 * width, 3 * width), "write_h": (width, 3 * width)}

    def loss(w: Any, text: jax.Array, said: jax.Array) -> jax.Array:
        def read(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = _gru(w, "read", h, x)
            return h, h

        first = jnp.zeros((rows, width))
        h, seen = jax.lax.scan(read, first, (w["from"][text] @ w["read_x"]).swapaxes(0, 1))
        keys = seen @ w["weigh"]

        def write(carry: Any, x: jax.Array) -> Any:
            h, context = carry
            h = _gru(w, "write", h, jnp.concatenate([x, context], -1) @ w["write_x"])
            share = jax.nn.softmax(jnp.einsum("bd,tbd->bt", h, keys))
            context = jnp.einsum("bt,tbd->bd", share, seen)
            return (h, context), jnp.concatenate([h, context], -1)

        _, made = jax.lax.scan(write, (h, first), w["to"][said].swapaxes(0, 1))
        return cross_entropy(made[:-1] @ w["out"], said.T[1:])

    def batch(i: int) -> tuple[jax.Array, ...]:
        return (
            integers(i, vocabulary, rows, length),
            integers(i + 1, vocabulary, rows, length),
        )

    return trained(lambda: weights(sizes), loss, batch, adamw(clip=1.0))


def linear_recurrences(
    rows: int, *, width: int = 512, states: int = 384, length: int = 2048, depth: int = 2
) -> ZooStep:
    """Complex diagonal recurrences by an associative scan, with gated units (LRU), in float32."""
    sizes: Sizes = {"in": (64, width), "out": (width, 10)}
    for n in range(depth):
        sizes |= {f"turn_{n}": (states,), f"decay_{n}": (states,), f"skip_{n}": (width,)}
        sizes |= {f"b_{n}": (width, 2 * states), f"c_{n}": (2 * states, width)}
        sizes |= {f"gate_{n}": (width, 2 * width)}

    def loss(w: Any, x: jax.Array, label: jax.Array) -> jax.Array:
        x = x @ w["in"]
        for n in range(depth):
            y = layer_norm(x)
            size = jnp.exp(-jnp.exp(w[f"decay_{n}"] - 2))
            factor = size * jnp.exp(1j * jnp.exp(w[f"turn_{n}"]))
            real, imaginary = jnp.split(y @ w[f"b_{n}"], 2, -1)
            given = (real + 1j * imaginary) * jnp.sqrt(1 - size**2)

            def joined(one: Any, two: Any) -> Any:
                return two[0] * one[0], two[0] * one[1] + two[1]

            factors = jnp.broadcast_to(factor, given.shape)
            _, h = jax.lax.associative_scan(joined, (factors, given), axis=1)
            made = jnp.concatenate([h.real, h.imag], -1) @ w[f"c_{n}"]
            made = jax.nn.gelu(made + w[f"skip_{n}"] * y)
            value, gate = jnp.split(made @ w[f"gate_{n}"], 2, -1)
            x = x + value * jax.nn.sigmoid(gate)
        return cross_entropy(x.mean(1) @ w["out"], label)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, length, 64), integers(i, 10, rows)

    return trained(lambda: weights(sizes), loss, batch)


def conformer(
    rows: int,
    *,
    width: int = 512,
    heads: int = 8,
    frames: int = 800,
    window: int = 31,
    depth: int = 2,
) -> ZooStep:
    """Speech: halves of feed-forward layers around attention and a depthwise convolution of 31
    frames; every fourth frame is kept, and frames are classed."""
    kept, classes = frames // 4, 1024
    sizes: Sizes = {"one": (3, 3, 1, 128), "two": (3, 3, 128, 128), "places": (kept, width)}
    sizes |= {"in": (128 * 20, width), "out": (width, classes)}
    for n in range(depth):
        for part in ("before", "after"):
            sizes |= {f"{part}_up_{n}": (width, 4 * width), f"{part}_down_{n}": (4 * width, width)}
        sizes |= {f"qkv_{n}": (width, 3 * width), f"o_{n}": (width, width)}
        sizes |= {f"gates_{n}": (width, 2 * width), f"along_{n}": (window, 1, width)}
        sizes |= {f"point_{n}": (width, width), f"scale_{n}": (width,)}

    def loss(params: Any, sound: jax.Array, labels: jax.Array) -> jax.Array:
        w = half(params)
        x = jax.nn.relu(convolution(sound.astype(bf16)[..., None], w["one"], 2))
        x = jax.nn.relu(convolution(x, w["two"], 2))
        x = x.reshape(rows, kept, -1) @ w["in"] + w["places"]

        def half_layer(x: jax.Array, part: str, n: int) -> jax.Array:
            y = jax.nn.silu(layer_norm(x) @ w[f"{part}_up_{n}"]) @ w[f"{part}_down_{n}"]
            return x + 0.5 * y

        for n in range(depth):
            x = half_layer(x, "before", n)
            q, k, v = (heads_of(z, heads) for z in jnp.split(layer_norm(x) @ w[f"qkv_{n}"], 3, -1))
            x = x + attend(q, k, v) @ w[f"o_{n}"]
            value, gate = jnp.split(layer_norm(x) @ w[f"gates_{n}"], 2, -1)
            y = convolution(value * jax.nn.sigmoid(gate), w[f"along_{n}"], groups=width)
            wide = y.astype(f32)
            wide = (wide - wide.mean((0, 1))) * jax.lax.rsqrt(wide.var((0, 1)) + 1e-5)
            y = jax.nn.silu(wide.astype(bf16) * (1 + w[f"scale_{n}"]))
            x = layer_norm(half_layer(x + y @ w[f"point_{n}"], "after", n))
        return cross_entropy(x @ w["out"], labels)

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, frames, 80), integers(i, classes, rows, kept)

    return trained(lambda: weights(sizes), loss, batch)


def plans_of_robots(rows: int, *, channels: int = 256, horizon: int = 16) -> ZooStep:
    """Diffusion over short sequences of actions: a U-Net of convolutions along time, scaled and
    shifted by what the robot sees, in float32."""
    seen, wide = 512, (channels, 2 * channels, 4 * channels)
    sizes: Sizes = {"look": (132, seen), "last": (1, channels, 10)}
    blocks = {"down_0": (10, wide[0]), "down_1": (wide[0], wide[1]), "down_2": (wide[1], wide[2])}
    blocks |= {"middle": (wide[2], wide[2])}
    blocks |= {"up_1": (2 * wide[2], wide[1]), "up_0": (2 * wide[1], wide[0])}
    for name, (below, above) in blocks.items():
        sizes |= {f"{name}_1": (5, below, above), f"{name}_2": (5, above, above)}
        sizes |= {f"{name}_skip": (1, below, above), f"{name}_film": (seen, 2 * above)}
        sizes |= {f"{name}_norm_1": (above,), f"{name}_norm_2": (above,)}

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.reshape(rows, x.shape[1], 8, -1)
        mean = wide.mean((1, 3), keepdims=True)
        wide = (wide - mean) * jax.lax.rsqrt(wide.var((1, 3), keepdims=True) + 1e-5)
        return wide.reshape(x.shape) * (1 + scale)

    def mish(x: jax.Array) -> jax.Array:
        return x * jnp.tanh(jax.nn.softplus(x))

    def block(w: Any, name: str, x: jax.Array, state: jax.Array) -> jax.Array:
        scale, shift = jnp.split((mish(state) @ w[f"{name}_film"])[:, None], 2, -1)
        y = mish(norm(convolution(x, w[f"{name}_1"]), w[f"{name}_norm_1"]))
        y = y * (1 + scale) + shift
        y = mish(norm(convolution(y, w[f"{name}_2"]), w[f"{name}_norm_2"]))
        return y + convolution(x, w[f"{name}_skip"])

    def loss(w: Any, looked: jax.Array, actions: jax.Array, noise: jax.Array) -> jax.Array:
        state = looked @ w["look"]
        share = jax.nn.sigmoid(looked[:, :1, None])
        x = jnp.sqrt(share) * actions + jnp.sqrt(1 - share) * noise
        kept = []
        for n in range(3):
            x = block(w, f"down_{n}", x, state)
            kept.append(x)
            x = x[:, ::2] if n < 2 else x
        x = block(w, "middle", x, state)
        for n in (1, 0):
            x = block(w, f"up_{n}", jnp.concatenate([x, kept[n + 1]], -1), state)
            x = jnp.repeat(x, 2, 1)
        return ((convolution(x, w["last"]) - noise) ** 2).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        shape = (rows, horizon, 10)
        return normal(i, rows, 132), normal(i + 1, *shape), normal(i + 2, *shape)

    return trained(lambda: weights(sizes), loss, batch, adamw(1e-4, 1e-6))


def corrected_actors(
    rows: int, *, time: int = 80, width: int = 256, actions: int = 18, features: int = 1024
) -> ZooStep:
    """A recurrent actor on what others did: an LSTM over time, and returns corrected backwards
    (IMPALA), in float32."""
    sizes: Sizes = {"see": (features, width), "x": (width, 4 * width), "h": (width, 4 * width)}
    sizes |= {"policy": (width, actions), "value": (width, 1), "bias": (4 * width,)}

    def loss(w: Any, seen: jax.Array, done: jax.Array, taken: jax.Array, others: jax.Array) -> Any:
        given = jax.nn.relu(seen @ w["see"]) @ w["x"] + w["bias"]
        ends = done.astype(f32)

        def lstm(carry: Any, now: Any) -> Any:
            x, end = now
            h, c = (part * (1 - end)[:, None] for part in carry)
            i, f, g, o = jnp.split(x + h @ w["h"], 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((rows, width))
        _, states = jax.lax.scan(lstm, (zeros, zeros), (given, ends))
        log_p = jax.nn.log_softmax(states @ w["policy"])
        value = (states @ w["value"])[..., 0]
        own = jnp.take_along_axis(log_p, taken[..., None], -1)[..., 0]
        ratio = jnp.minimum(jnp.exp(own - others), 1)
        rewards, keep = jnp.tanh(seen[..., 0]), 0.99 * (1 - ends)
        later = jnp.concatenate([value[1:], value[-1:]])
        delta = jax.lax.stop_gradient(ratio * (rewards + keep * later - value))

        def back(total: jax.Array, now: Any) -> Any:
            change, held = now
            total = change + held * total
            return total, total

        held = jax.lax.stop_gradient(keep * ratio)
        _, gain = jax.lax.scan(back, jnp.zeros(rows), (delta, held), reverse=True)
        wanted = jax.lax.stop_gradient(gain + value)
        advantage = jax.lax.stop_gradient(ratio * (rewards + keep * later - value) + gain - delta)
        entropy = -(jnp.exp(log_p) * log_p).sum(-1).mean()
        error = ((wanted - value) ** 2).mean()
        return 0.5 * error - (own * advantage).mean() - 0.01 * entropy

    def batch(i: int) -> tuple[jax.Array, ...]:
        done, taken = integers(i, 50, time, rows) == 0, integers(i + 1, actions, time, rows)
        return normal(i, time, rows, features), done, taken, -jnp.abs(normal(i + 2, time, rows))

    return trained(lambda: weights(sizes), loss, batch, adamw(6e-4, 0.0, clip=40.0))
