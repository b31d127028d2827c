"""Meshes, scenes, operators between functions, and transport of points."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adamw,
    convolution,
    f32,
    half,
    integers,
    layer_norm,
    normal,
    trained,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def meshes(rows: int, *, edges_per: int = 6, width: int = 128, depth: int = 2) -> ZooStep:
    """Nodes and edges of a mesh, each with a network of its own (MeshGraphNets), in float32.
    `rows` nodes."""
    edges = rows * edges_per
    sizes: Sizes = {"nodes": (11, width), "edges": (7, width), "out": (width, 3)}
    for n in range(depth):
        for name, parts in (("edge", 3), ("node", 2)):
            sizes |= {f"{name}_1_{n}": (parts * width, width), f"{name}_2_{n}": (width, width)}
            sizes |= {f"{name}_bias_{n}": (width,), f"{name}_norm_{n}": (width,)}

    def net(w: Any, name: str, n: int, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(x @ w[f"{name}_1_{n}"] + w[f"{name}_bias_{n}"])
        return layer_norm(x @ w[f"{name}_2_{n}"], w[f"{name}_norm_{n}"])

    def loss(w: Any, nodes: jax.Array, between: jax.Array, ends: jax.Array, wanted: jax.Array):
        x, e = nodes @ w["nodes"], between @ w["edges"]
        for n in range(depth):
            e = e + net(w, "edge", n, jnp.concatenate([e, x[ends[0]], x[ends[1]]], -1))
            got = jax.ops.segment_sum(e, ends[1], rows)
            x = x + net(w, "node", n, jnp.concatenate([x, got], -1))
        return ((x @ w["out"] - wanted) ** 2).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        ends = integers(i, rows, 2, edges)
        return normal(i, rows, 11), normal(i + 1, edges, 7), ends, normal(i + 2, rows, 3)

    return trained(lambda: weights(sizes), loss, batch, adamw(1e-4, 0.0))


def hashed_scene(
    rows: int, *, levels: int = 12, held: int = 2**19, width: int = 64, samples: int = 32
) -> ZooStep:
    """Points in a scene, whose features are mixed from eight corners in hashed tables of several
    sizes, then a small network (Instant NGP). `rows` rays."""
    sizes: Sizes = {"tables": (levels, held, 2), "one": (2 * levels, width), "two": (width, 16)}
    sizes |= {"three": (16, width), "four": (width, 3)}
    grids = [int(16 * 1.5**level) for level in range(levels)]

    def features(w: Any, points: jax.Array) -> jax.Array:
        primes = jnp.array([1, 2654435761, 805459861], jnp.uint32)
        corners = jnp.stack(jnp.meshgrid(*[jnp.arange(2)] * 3), -1).reshape(8, 3)
        found = []
        for level, grid in enumerate(grids):
            place = points * grid
            low = jnp.floor(place)
            corner = (low.astype(jnp.int32)[:, None] + corners).astype(jnp.uint32) * primes
            at = (corner[..., 0] ^ corner[..., 1] ^ corner[..., 2]) % held
            near = (place - low)[:, None]
            weight = jnp.where(corners == 1, near, 1 - near).prod(-1)
            found.append((w["tables"][level][at] * weight[..., None]).sum(1))
        return jnp.concatenate(found, -1)

    def loss(w: Any, origin: jax.Array, wanted: jax.Array) -> jax.Array:
        depth = (jnp.arange(samples) + 0.5) / samples
        aim = jnp.sin(origin * 12)
        points = jax.nn.sigmoid(origin[:, None] + depth[:, None] * aim[:, None])
        x = jax.nn.relu(features(w, points.reshape(-1, 3)) @ w["one"]) @ w["two"]
        colour = jax.nn.sigmoid(jax.nn.relu(x @ w["three"]) @ w["four"])
        dense = jax.nn.softplus(x[:, 0]).reshape(rows, samples) / samples
        passed = jnp.exp(dense - jnp.cumsum(dense, -1))
        share = (1 - jnp.exp(-dense)) * passed
        made = (share[..., None] * colour.reshape(rows, samples, 3)).sum(1)
        return ((made - wanted) ** 2).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, 3), jax.nn.sigmoid(normal(i + 1, rows, 3))

    return trained(lambda: weights(sizes), loss, batch, adamw(1e-2, 0.0))


def branch_and_trunk(
    rows: int, *, sensors: int = 1000, points: int = 4096, width: int = 1024, depth: int = 4
) -> ZooStep:
    """An operator between functions: one network reads the function, one the place (DeepONet), in
    float32."""
    sizes: Sizes = {}
    for name, given in (("branch", sensors), ("trunk", 2)):
        for n in range(depth):
            sizes |= {f"{name}_{n}": (width if n else given, width), f"{name}_bias_{n}": (width,)}

    def net(w: Any, name: str, x: jax.Array) -> jax.Array:
        for n in range(depth):
            x = x @ w[f"{name}_{n}"] + w[f"{name}_bias_{n}"]
            x = jnp.tanh(x) if n < depth - 1 else x
        return x

    def loss(w: Any, read: jax.Array, places: jax.Array, wanted: jax.Array) -> jax.Array:
        made = net(w, "branch", read) @ net(w, "trunk", places).T
        return ((made - wanted) ** 2).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, sensors), normal(i + 1, points, 2), normal(i + 2, rows, points)

    return trained(lambda: weights(sizes), loss, batch)


def transport(rows: int, *, given: int = 256, width: int = 512, trips: int = 40) -> ZooStep:
    """A generator learns by the cost of moving its points to real ones: forty trips of Sinkhorn's
    iteration in a loop, in float32."""
    sizes: Sizes = {"one": (given, width), "two": (width, width), "three": (width, 64)}

    def loss(w: Any, noise: jax.Array, real: jax.Array) -> jax.Array:
        x = jax.nn.relu(jax.nn.relu(noise @ w["one"]) @ w["two"]) @ w["three"]
        cost = ((x**2).sum(-1)[:, None] + (real**2).sum(-1) - 2 * x @ real.T) / 64
        log_size, wide = -jnp.log(rows), -cost / 0.1

        def trip(_: int, both: Any) -> Any:
            f, g = both
            f = log_size - jax.nn.logsumexp(wide + g, 1)
            return f, log_size - jax.nn.logsumexp(wide + f[:, None], 0)

        zeros = jnp.zeros(rows)
        f, g = jax.lax.fori_loop(0, trips, trip, (zeros, zeros))
        return (jnp.exp(wide + f[:, None] + g) * cost).sum()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, given), normal(i + 1, rows, 64)

    return trained(lambda: weights(sizes), loss, batch)


def organs(rows: int, *, channels: int = 32, size: int = 64) -> ZooStep:
    """A U-Net for volumes: convolutions in three dimensions, normed for each volume, and the
    overlap of what is marked."""
    wide = (channels, 2 * channels, 4 * channels)
    blocks = {"down_0": (1, wide[0]), "down_1": (wide[0], wide[1]), "low": (wide[1], wide[2])}
    blocks |= {"up_1": (wide[2] + wide[1], wide[1]), "up_0": (wide[1] + wide[0], wide[0])}
    sizes: Sizes = {"last": (1, 1, 1, wide[0], 4)}
    for name, (below, above) in blocks.items():
        sizes |= {f"{name}_1": (3, 3, 3, below, above), f"{name}_2": (3, 3, 3, above, above)}

    def block(w: Any, name: str, x: jax.Array) -> jax.Array:
        for part in (1, 2):
            y = convolution(x, w[f"{name}_{part}"]).astype(f32)
            mean = y.mean((1, 2, 3), keepdims=True)
            y = (y - mean) * jax.lax.rsqrt(y.var((1, 2, 3), keepdims=True) + 1e-5)
            x = jax.nn.leaky_relu(y).astype(x.dtype)
        return x

    def halved(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_window(
            x, -jnp.inf, jax.lax.max, (1, 2, 2, 2, 1), (1, 2, 2, 2, 1), "VALID"
        )

    def doubled(x: jax.Array) -> jax.Array:
        for axis in (1, 2, 3):
            x = jnp.repeat(x, 2, axis)
        return x

    def loss(params: Any, volumes: jax.Array, labels: jax.Array) -> jax.Array:
        w = half(params)
        top = block(w, "down_0", volumes.astype(w["last"].dtype))
        next_ = block(w, "down_1", halved(top))
        x = block(w, "low", halved(next_))
        x = block(w, "up_1", jnp.concatenate([doubled(x), next_], -1))
        x = block(w, "up_0", jnp.concatenate([doubled(x), top], -1))
        p = jax.nn.softmax(convolution(x, w["last"]).astype(f32))
        wanted = jax.nn.one_hot(labels, 4)
        both, each = (p * wanted).sum((1, 2, 3)), (p + wanted).sum((1, 2, 3))
        return 1 - (2 * both / (each + 1e-5)).mean()

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, size, size, size, 1), integers(i, 4, rows, size, size, size)

    return trained(lambda: weights(sizes), loss, batch)
