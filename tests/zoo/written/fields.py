"""Radiance fields: NeRF with a coarse and a fine network, in nnx."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import normal, pick, trained_with_key


def encode(x: jax.Array, frequencies: int) -> jax.Array:
    angles = x[..., None] * 2.0 ** jnp.arange(frequencies)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.concatenate([x, waves.reshape(*x.shape[:-1], -1)], axis=-1)


class Radiance(nnx.Module):
    """Density and colour of a point, seen from a direction; the input enters again midway."""

    def __init__(self, width: int, depth: int, frequencies: int, rngs: nnx.Rngs):
        point = 3 + 6 * frequencies
        self.frequencies, self.skip = frequencies, depth // 2
        widths = [point] + [width + (point if i + 1 == self.skip else 0) for i in range(depth - 1)]
        self.layers = nnx.List([nnx.Linear(w, width, rngs=rngs) for w in widths])
        self.density = nnx.Linear(width, 1, rngs=rngs)
        self.colour = nnx.Linear(width + point, width // 2, rngs=rngs)
        self.out = nnx.Linear(width // 2, 3, rngs=rngs)

    def __call__(self, points: jax.Array, directions: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = encoded = encode(points, self.frequencies)
        for i, layer in enumerate(self.layers):
            x = jnp.concatenate([x, encoded], axis=-1) if i == self.skip else x
            x = nnx.relu(layer(x))
        view = jnp.broadcast_to(encode(directions, self.frequencies)[:, None], encoded.shape)
        colour = nnx.relu(self.colour(jnp.concatenate([x, view], axis=-1)))
        return nnx.softplus(self.density(x)[..., 0] - 1), nnx.sigmoid(self.out(colour))


def render(density: jax.Array, colour: jax.Array, depths: jax.Array) -> tuple[jax.Array, jax.Array]:
    gaps = jnp.diff(depths, axis=-1, append=depths[:, -1:] + 1)
    alpha = 1 - jnp.exp(-density * gaps)
    transmitted = jnp.cumprod(1 - alpha + 1e-6, axis=-1)
    weights = alpha * jnp.pad(transmitted, ((0, 0), (1, 0)), constant_values=1.0)[:, :-1]
    return jnp.einsum("rs,rsc->rc", weights, colour), weights


def resample(key: jax.Array, depths: jax.Array, weights: jax.Array, count: int) -> jax.Array:
    """Depths by the inverse of the weights' cumulative distribution, with the old ones, sorted."""
    cdf = jnp.cumsum(weights + 1e-2, axis=-1)
    draw = jax.random.uniform(key, (len(depths), count)) * cdf[:, -1:]
    index = jax.vmap(jnp.searchsorted)(cdf, draw).clip(0, depths.shape[1] - 1)
    return jnp.sort(jnp.concatenate([depths, jnp.take_along_axis(depths, index, 1) + 0.01], 1), 1)


@zoo_program("nerf", source="written", layers=True)
def nerf(size: Size) -> ZooStep:
    rays, samples, width, depth, frequencies = pick(
        size, (16, 5, 16, 4, 2), (65536, 64, 256, 8, 10), (4096, 64, 256, 8, 10)
    )

    def split() -> Any:
        rngs = nnx.Rngs(0)
        nets = nnx.List([Radiance(width, depth, frequencies, rngs) for _ in range(2)])
        return nnx.split(nets)

    graph = nnx.graphdef(nnx.eval_shape(lambda: nnx.merge(*split())))

    def loss(params: Any, key: jax.Array, origin: jax.Array, way: jax.Array, colour: Any) -> Any:
        coarse, fine = nnx.merge(graph, params)
        near_key, fine_key = jax.random.split(key)
        bins = jnp.arange(samples) + jax.random.uniform(near_key, (len(origin), samples))
        depths, error = bins / samples, 0.0
        for net in (coarse, fine):
            points = origin[:, None] + depths[..., None] * way[:, None]
            rgb, weights = render(*net(points, way), depths)
            error += jnp.mean((rgb - colour) ** 2)
            depths = resample(fine_key, depths, jax.lax.stop_gradient(weights), samples)
        return error

    def make_batch(i: int) -> tuple:
        colour = jax.nn.sigmoid(normal(3 * i + 2, rays, 3))
        return normal(3 * i, rays, 3), normal(3 * i + 1, rays, 3), colour

    return trained_with_key(lambda: split()[1], loss, make_batch)
