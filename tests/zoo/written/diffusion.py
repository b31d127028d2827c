"""Diffusion models: DiT with classifier-free label dropout and EMA, and a DDPM U-Net.

Both draw noise and times of the batch's shape with a key that is in the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import adamw_if_real, integers, normal, pick, trained_with_key


def time_features(t: jax.Array, dim: int) -> jax.Array:
    frequencies = jnp.exp(-jnp.log(10_000.0) * jnp.arange(dim // 2) / (dim // 2))
    angles = t[:, None] * 1000 * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


class DiTBlock(nn.Module):
    """Modulated by the condition; with the gates at zero, the identity (adaLN-Zero)."""

    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array) -> jax.Array:
        dim = x.shape[-1]
        gates = nn.initializers.normal(0.02)  # not zero: three steps should show every gradient
        six = nn.Dense(6 * dim, kernel_init=gates, dtype=self.dtype)(nn.silu(condition))
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(six[:, None], 6, axis=-1)
        norm = nn.LayerNorm(use_bias=False, use_scale=False, dtype=self.dtype)
        y = norm(x) * (1 + scale1) + shift1
        x = x + gate1 * nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y)
        y = norm(x) * (1 + scale2) + shift2
        y = nn.gelu(nn.Dense(4 * dim, dtype=self.dtype)(y))
        return x + gate2 * nn.Dense(dim, dtype=self.dtype)(y)


class DiT(nn.Module):
    classes: int
    patch: int
    dim: int
    depth: int
    heads: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array, labels: jax.Array) -> jax.Array:
        b, h, w, c = x.shape
        p = self.patch
        x = x.reshape(b, h // p, p, w // p, p, c).transpose(0, 1, 3, 2, 4, 5)
        x = nn.Dense(self.dim, dtype=self.dtype)(x.reshape(b, -1, p * p * c))
        position = self.param("position", nn.initializers.normal(0.02), x.shape[1:])
        x = x + position.astype(x.dtype)
        condition = nn.Dense(self.dim, dtype=self.dtype)(time_features(t, 256))
        condition = nn.Dense(self.dim, dtype=self.dtype)(nn.silu(condition))
        condition += nn.Embed(self.classes + 1, self.dim, dtype=self.dtype)(labels)
        for _ in range(self.depth):
            x = DiTBlock(self.heads, self.dtype)(x, condition)
        x = nn.Dense(p * p * c)(nn.LayerNorm()(x))
        x = x.reshape(b, h // p, w // p, p, p, c).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(b, h, w, c)


@zoo_program("dit", source="written", layers=True)
def dit(size: Size) -> ZooStep:
    model = pick(
        size,
        DiT(10, 2, 32, 2, 4),
        DiT(1000, 2, 1152, 28, 16, jnp.bfloat16),
        DiT(1000, 2, 1152, 4, 16, jnp.bfloat16),
    )
    shape = pick(size, (16, 6, 6, 4), (256, 32, 32, 4), (64, 32, 32, 4))
    tx = adamw_if_real(size)

    def make_state() -> Any:
        x = jnp.zeros((1, *shape[1:]))
        params = model.init(jax.random.key(0), x, jnp.zeros(1), jnp.zeros(1, int))
        ema = jax.tree.map(jnp.copy, params)
        return {"params": params, "ema": ema, "opt": tx.init(params), "key": jax.random.key(1)}

    def step(state: Any, latents: jax.Array, labels: jax.Array) -> Any:
        key, noise_key, time_key, drop_key = jax.random.split(state["key"], 4)
        noise = jax.random.normal(noise_key, latents.shape)
        t = jax.nn.sigmoid(jax.random.normal(time_key, labels.shape))
        dropped = jax.random.bernoulli(drop_key, 0.1, labels.shape)
        labels = jnp.where(dropped, model.classes, labels)

        def loss(params: Any) -> jax.Array:
            mix = t[:, None, None, None]
            velocity = model.apply(params, (1 - mix) * latents + mix * noise, t, labels)
            return jnp.mean((velocity - (noise - latents)) ** 2)

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        ema = optax.incremental_update(params, state["ema"], 1e-2)
        return {"params": params, "ema": ema, "opt": opt, "key": key}, {"loss": value}

    return ZooStep(
        step, make_state, lambda i: (normal(i, *shape), integers(i, model.classes, shape[0]))
    )


class ResBlock(nn.Module):
    dim: int
    groups: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        norm = lambda y: nn.swish(nn.GroupNorm(self.groups, dtype=self.dtype)(y))  # noqa: E731
        y = nn.Conv(self.dim, (3, 3), dtype=self.dtype)(norm(x))
        y += nn.Dense(self.dim, dtype=self.dtype)(nn.swish(time))[:, None, None]
        y = nn.Conv(self.dim, (3, 3), dtype=self.dtype)(norm(y))
        return y + (x if x.shape == y.shape else nn.Dense(self.dim, dtype=self.dtype)(x))


class UNet(nn.Module):
    """Skip connections from every block on the way down to its counterpart on the way up."""

    dim: int
    multipliers: Sequence[int]
    blocks: int
    heads: int
    groups: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, t: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        time = nn.Dense(4 * self.dim, dtype=self.dtype)(time_features(t, self.dim))
        x = nn.Conv(self.dim, (3, 3), dtype=self.dtype)(x)
        skips = [x]
        for level, multiplier in enumerate(self.multipliers):
            for _ in range(self.blocks):
                x = ResBlock(multiplier * self.dim, self.groups, self.dtype)(x, time)
                if level:
                    x = self.attend(x)
                skips.append(x)
            if level + 1 < len(self.multipliers):
                x = nn.Conv(x.shape[-1], (3, 3), strides=(2, 2), dtype=self.dtype)(x)
                skips.append(x)
        x = self.attend(ResBlock(x.shape[-1], self.groups, self.dtype)(x, time))
        for level, multiplier in reversed(list(enumerate(self.multipliers))):
            for _ in range(self.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                x = ResBlock(multiplier * self.dim, self.groups, self.dtype)(x, time)
            if level:
                b, h, w, c = x.shape
                x = jax.image.resize(x, (b, 2 * h, 2 * w, c), "nearest")
                x = nn.Conv(c, (3, 3), dtype=self.dtype)(x)
        return nn.Conv(channels, (3, 3))(nn.swish(nn.GroupNorm(self.groups)(x)))

    def attend(self, x: jax.Array) -> jax.Array:
        b, h, w, c = x.shape
        y = nn.GroupNorm(self.groups, dtype=self.dtype)(x).reshape(b, h * w, c)
        y = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y)
        return x + y.reshape(x.shape)


@zoo_program("unet", source="written", layers=True)
def unet(size: Size) -> ZooStep:
    model = pick(
        size,
        UNet(8, (1, 2), 1, 2, 4),
        UNet(320, (1, 2, 4, 4), 2, 8, 32, jnp.bfloat16),
        UNet(192, (1, 2), 1, 8, 32, jnp.bfloat16),
    )
    shape = pick(size, (16, 6, 6, 3), (256, 64, 64, 4), (16, 64, 64, 4))

    def init() -> Any:
        return model.init(jax.random.key(0), jnp.zeros((1, *shape[1:])), jnp.zeros(1))

    def loss(params: Any, key: jax.Array, images: jax.Array) -> jax.Array:
        noise_key, time_key = jax.random.split(key)
        noise = jax.random.normal(noise_key, images.shape)
        t = jax.random.uniform(time_key, images.shape[:1])
        signal = jnp.cos(t * jnp.pi / 2)[:, None, None, None]
        noisy = signal * images + jnp.sqrt(1 - signal**2) * noise
        return jnp.mean((model.apply(params, noisy, t) - noise) ** 2)

    return trained_with_key(init, loss, lambda i: (normal(i, *shape),), adamw_if_real(size))
