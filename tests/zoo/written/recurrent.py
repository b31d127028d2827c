"""Recurrences over time: LSTM (scan), Mamba (associative scan), RWKV (scan of a matrix state)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.language import LMSize, cast, embedding_init, next_token_loss, rms_norm
from tests.zoo.written.training import adamw_if_real, dense_init, integers, pick, trained


@zoo_program("lstm", source="written", layers=True)
def lstm(size: Size) -> ZooStep:
    """A language model of LSTM layers; the sequence is carried time-major through the scans."""
    s = pick(
        size,
        LMSize(16, 7, 61, 24, 1, 2),
        LMSize(512, 256, 50000, 2048, 1, 4),
        LMSize(64, 128, 50000, 1024, 1, 2),
    )

    def init() -> Any:
        a, b, *keys = jax.random.split(jax.random.key(0), s.depth + 2)
        return {
            "embedding": embedding_init(a, s.vocabulary, s.dim),
            "cells": [
                {"w": dense_init(k, 2 * s.dim, 4 * s.dim), "b": jnp.zeros(4 * s.dim)} for k in keys
            ],
            "head": dense_init(b, s.dim, s.vocabulary),
        }

    def run(cell: Any, inputs: jax.Array) -> jax.Array:
        def tick(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            gates = jnp.concatenate([x, h], axis=-1) @ cell["w"] + cell["b"]
            i, f, g, o = jnp.split(gates, 4, axis=-1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros(inputs.shape[1:])
        return jax.lax.scan(tick, (zeros, zeros), inputs)[1]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens].swapaxes(0, 1)
        for cell in params["cells"]:
            x = run(cell, x)
        return next_token_loss(x.swapaxes(0, 1) @ params["head"], tokens)

    return trained(init, loss, lambda i: (integers(i, s.vocabulary, s.rows, s.length),))


def combine(one: Any, two: Any) -> Any:
    """One after the other of h → a h + b, for pairs (a, b)."""
    return one[0] * two[0], two[0] * one[1] + two[1]


@zoo_program("mamba", source="written", layers=True)
def mamba(size: Size) -> ZooStep:
    """Selective state spaces: h' = exp(Δ A) h + Δ B x, y = C h, all times at once."""
    s = pick(
        size,
        LMSize(16, 7, 61, 24, 1, 2),
        LMSize(64, 2048, 50280, 2048, 1, 48, jnp.bfloat16),
        LMSize(4, 1024, 50280, 1024, 1, 2, jnp.bfloat16),
    )
    inner, rank = 2 * s.dim, max(s.dim // 16, 2)
    states, window = pick(size, (3, 4), (16, 4))

    def layer_init(key: jax.Array) -> Any:
        a, b, c, d, e = jax.random.split(key, 5)
        return {
            "norm": jnp.ones(s.dim),
            "in": dense_init(a, s.dim, 2 * inner),
            "conv": dense_init(b, window, inner),
            "x": dense_init(c, inner, rank + 2 * states),
            "dt": dense_init(d, rank, inner),
            "dt_bias": jnp.full(inner, -2.0),
            "log_a": jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (inner, 1))),
            "skip": jnp.ones(inner),
            "out": dense_init(e, inner, s.dim),
        }

    def init() -> Any:
        a, *keys = jax.random.split(jax.random.key(0), s.depth + 1)
        return {
            "embedding": embedding_init(a, s.vocabulary, s.dim),
            "layers": [layer_init(k) for k in keys],
            "norm": jnp.ones(s.dim),
        }

    def state_space(w: Any, x: jax.Array) -> jax.Array:
        dt, b, c = jnp.split(x @ w["x"], [rank, rank + states], axis=-1)
        dt = jax.nn.softplus(dt @ w["dt"] + w["dt_bias"])
        decay = jnp.exp(-dt[..., None] * jnp.exp(w["log_a"]))
        drive = (dt * x)[..., None] * b[:, :, None]

        _, h = jax.lax.associative_scan(combine, (decay, drive), axis=1)
        return jnp.einsum("btdn,btn->btd", h, c) + w["skip"] * x

    @jax.checkpoint
    def layer(w: Any, x: jax.Array) -> jax.Array:
        y, gate = jnp.split(rms_norm(x, w["norm"]) @ w["in"], 2, axis=-1)
        y = jax.lax.conv_general_dilated(
            y,
            w["conv"][:, None],
            window_strides=(1,),
            padding=[(window - 1, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=inner,
        )
        y = state_space(w, jax.nn.silu(y)) * jax.nn.silu(gate)
        return x + y @ w["out"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        p = cast(params, s.dtype)
        x = p["embedding"][tokens]
        for w in p["layers"]:
            x = layer(w, x)
        return next_token_loss(rms_norm(x, p["norm"]) @ p["embedding"].T, tokens)

    return trained(init, loss, lambda i: (integers(i, s.vocabulary, s.rows, s.length),))


def shifted(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def channel_mix(w: Any, x: jax.Array) -> jax.Array:
    x = x + (shifted(x) - x) * w["mix"]
    return jnp.square(jax.nn.relu(x @ w["k"])) @ w["v"]


@zoo_program("rwkv", source="written", layers=True)
def rwkv(size: Size) -> ZooStep:
    """Time mixing with a matrix per head that decays as the data says, then channel mixing."""
    s = pick(
        size,
        LMSize(16, 7, 61, 24, 3, 2),
        LMSize(64, 1024, 65536, 2048, 32, 24, jnp.bfloat16),
        LMSize(8, 128, 65536, 1024, 16, 2, jnp.bfloat16),
    )
    features = s.dim // s.heads

    def layer_init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 8)
        time = {n: dense_init(k, s.dim, s.dim) for n, k in zip("rkvwgo", keys[:6], strict=True)}
        return {
            "time": time | {"mix": jnp.full((5, s.dim), 0.5), "bonus": jnp.zeros(s.dim)},
            "channel": {
                "k": dense_init(keys[6], s.dim, 3 * s.dim),
                "v": dense_init(keys[7], 3 * s.dim, s.dim),
                "mix": jnp.full(s.dim, 0.5),
            },
            "norms": jnp.ones((3, s.dim)),
        }

    def init() -> Any:
        a, b, *keys = jax.random.split(jax.random.key(0), s.depth + 2)
        return {
            "embedding": embedding_init(a, s.vocabulary, s.dim),
            "layers": [layer_init(k) for k in keys],
            "norm": jnp.ones(s.dim),
            "head": dense_init(b, s.dim, s.vocabulary),
        }

    def time_mix(w: Any, x: jax.Array, norm: jax.Array) -> jax.Array:
        before = shifted(x)
        mixed = [x + (before - x) * m for m in w["mix"]]
        r, k, v, d, g = (y @ w[n] for n, y in zip("rkvwg", mixed, strict=True))
        decay = jnp.exp(-jnp.exp(d.astype(jnp.float32) - 1))

        bonus, shape = w["bonus"].reshape(s.heads, features, 1), (*x.shape[:2], s.heads, features)

        def tick(state: jax.Array, now: Any) -> Any:
            r, k, v, decay = now
            kv = k[..., :, None] * v[..., None, :]
            out = jnp.einsum("bhi,bhij->bhj", r, state + bonus * kv)
            return decay[..., None] * state + kv, out

        zeros = jnp.zeros((x.shape[0], s.heads, features, features))
        rkvd = (y.astype(jnp.float32).reshape(shape).swapaxes(0, 1) for y in (r, k, v, decay))
        _, out = jax.lax.scan(tick, zeros, tuple(rkvd))
        out = out.swapaxes(0, 1).reshape(x.shape).astype(x.dtype)
        return (rms_norm(out, norm) * jax.nn.silu(g)) @ w["o"]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        p = cast(params, s.dtype)
        x = p["embedding"][tokens]
        for w in p["layers"]:
            x = x + time_mix(w["time"], rms_norm(x, w["norms"][0]), w["norms"][2])
            x = x + channel_mix(w["channel"], rms_norm(x, w["norms"][1]))
        return next_token_loss(rms_norm(x, p["norm"]) @ p["head"], tokens)

    def make_batch(i: int) -> tuple:
        return (integers(i, s.vocabulary, s.rows, s.length),)

    return trained(init, loss, make_batch, adamw_if_real(size))
