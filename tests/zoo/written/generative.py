"""Generative models: VAE, VQ-VAE, a GAN with two optimizers in one step, a RealNVP flow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import mlp, mlp_init, normal, pick, trained, trained_with_key


class Encoder(nn.Module):
    dim: int
    depth: int
    out: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for level in range(self.depth):
            x = nn.relu(nn.Conv(self.dim * 2**level, (4, 4), strides=(2, 2))(x))
        return nn.Conv(self.out, (1, 1))(x)


class Decoder(nn.Module):
    dim: int
    depth: int
    channels: int = 3

    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        for level in reversed(range(self.depth)):
            z = nn.relu(nn.ConvTranspose(self.dim * 2**level, (4, 4), strides=(2, 2))(z))
        return nn.Conv(self.channels, (3, 3))(z)


@zoo_program("vae", source="written", layers=True)
def vae(size: Size) -> ZooStep:
    dim, depth, latent = pick(size, (8, 2, 6), (128, 3, 16))
    shape = pick(size, (16, 12, 12, 3), (256, 256, 256, 3), (32, 256, 256, 3))
    encoder: Any = Encoder(dim, depth, 2 * latent)
    decoder: Any = Decoder(dim, depth)
    small = shape[1] // 2**depth

    def init() -> Any:
        return {
            "encoder": encoder.init(jax.random.key(0), jnp.zeros((1, *shape[1:]))),
            "decoder": decoder.init(jax.random.key(1), jnp.zeros((1, small, small, latent))),
        }

    def loss(params: Any, key: jax.Array, images: jax.Array) -> jax.Array:
        mean, log_var = jnp.split(encoder.apply(params["encoder"], images), 2, axis=-1)
        z = mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape)
        error = jnp.sum((decoder.apply(params["decoder"], z) - images) ** 2, axis=(1, 2, 3))
        kl = 0.5 * jnp.sum(mean**2 + jnp.exp(log_var) - 1 - log_var, axis=(1, 2, 3))
        return jnp.mean(error + kl)

    return trained_with_key(init, loss, lambda i: (normal(i, *shape),))


@zoo_program("vqvae", source="written", layers=True)
def vqvae(size: Size) -> ZooStep:
    """The nearest code of a table, with the gradient passed straight through."""
    dim, depth, latent, codes = pick(size, (8, 2, 6, 13), (128, 3, 64, 8192))
    shape = pick(size, (16, 12, 12, 3), (256, 256, 256, 3))
    encoder: Any = Encoder(dim, depth, latent)
    decoder: Any = Decoder(dim, depth)
    small = shape[1] // 2**depth

    def init() -> Any:
        return {
            "encoder": encoder.init(jax.random.key(0), jnp.zeros((1, *shape[1:]))),
            "decoder": decoder.init(jax.random.key(1), jnp.zeros((1, small, small, latent))),
            "codes": jax.random.normal(jax.random.key(2), (codes, latent)),
        }

    def loss(params: Any, images: jax.Array) -> jax.Array:
        z, table = encoder.apply(params["encoder"], images), params["codes"]
        distance = jnp.sum(table**2, -1) - 2 * jnp.einsum("bhwd,nd->bhwn", z, table)
        q = table[distance.argmin(-1)]
        stop = jax.lax.stop_gradient
        fake = decoder.apply(params["decoder"], z + stop(q - z))
        commit = jnp.mean((stop(z) - q) ** 2) + 0.25 * jnp.mean((z - stop(q)) ** 2)
        return jnp.mean((fake - images) ** 2) + commit

    return trained(init, loss, lambda i: (normal(i, *shape),))


@zoo_program("gan", source="written", layers=True, micro_batches=1)
def gan(size: Size) -> ZooStep:
    """The discriminator's update, then the generator's against the new discriminator,
    which is that of the whole batch."""
    dim, depth, latent = pick(size, (8, 2, 6), (128, 4, 128))
    shape = pick(size, (16, 12, 12, 3), (512, 128, 128, 3), (64, 128, 128, 3))
    small = shape[1] // 2**depth
    discriminator: Any = Encoder(dim, depth, 1)
    generator: Any = Decoder(dim, depth)
    g_tx, d_tx = optax.adam(1e-3, b1=0.5, eps=1e-3), optax.adam(4e-3, b1=0.5, eps=1e-3)

    def make_state() -> Any:
        g = generator.init(jax.random.key(0), jnp.zeros((1, small, small, latent)))
        d = discriminator.init(jax.random.key(1), jnp.zeros((1, *shape[1:])))
        return {"g": g, "d": d, "g_opt": g_tx.init(g), "d_opt": d_tx.init(d)}

    def step(state: Any, images: jax.Array, z: jax.Array) -> Any:
        def d_loss(d: Any) -> jax.Array:
            fake = generator.apply(state["g"], z)
            real_logits, fake_logits = discriminator.apply(d, images), discriminator.apply(d, fake)
            return jnp.mean(jax.nn.softplus(-real_logits)) + jnp.mean(jax.nn.softplus(fake_logits))

        d_value, grads = jax.value_and_grad(d_loss)(state["d"])
        updates, d_opt = d_tx.update(grads, state["d_opt"])
        d = optax.apply_updates(state["d"], updates)

        def g_loss(g: Any) -> jax.Array:
            logits = discriminator.apply(d, generator.apply(g, z))
            return jnp.mean(jax.nn.softplus(-logits))

        g_value, grads = jax.value_and_grad(g_loss)(state["g"])
        updates, g_opt = g_tx.update(grads, state["g_opt"])
        g = optax.apply_updates(state["g"], updates)
        return {"g": g, "d": d, "g_opt": g_opt, "d_opt": d_opt}, (d_value, g_value)

    def make_batch(i: int) -> tuple:
        return normal(2 * i, *shape), normal(2 * i + 1, shape[0], small, small, latent)

    return ZooStep(step, make_state, make_batch)


@zoo_program("flow", source="written", layers=True)
def flow(size: Size) -> ZooStep:
    """RealNVP: couplings that swap halves, and the logarithm of their determinants."""
    rows, width, hidden, depth = pick(
        size, (16, 6, 24, 4), (65536, 64, 4096, 16), (16384, 64, 4096, 4)
    )

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), depth)
        return [mlp_init(key, width // 2, hidden, hidden, width) for key in keys]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        log_det = jnp.zeros(x.shape[0])
        a, b = jnp.split(x, 2, axis=-1)
        for coupling in params:
            shift, log_scale = jnp.split(mlp(coupling, a), 2, axis=-1)
            log_scale = jnp.tanh(log_scale)
            a, b = b * jnp.exp(log_scale) + shift, a
            log_det += log_scale.sum(-1)
        z = jnp.concatenate([a, b], axis=-1)
        return jnp.mean(0.5 * jnp.sum(z**2, -1) - log_det)

    return trained(init, loss, lambda i: (normal(i, rows, width),))
