"""Points and graphs."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.judge_h200.unseen.training import (
    adamw,
    cross_entropy,
    integers,
    momentum,
    normal,
    trained,
    trained_with_statistics,
    weights,
)
from tests.zoo.program import ZooStep

Sizes = dict[str, tuple[int, ...]]


def point_clouds(rows: int, *, num_points: int = 1024, k: int = 20) -> ZooStep:
    """Every layer gathers the nearest neighbours of each point among its own features (DGCNN), in
    float32 with batch norm."""
    widths = (3, 64, 64, 128, 256)
    sizes: Sizes = {"join": (sum(widths[1:]), 1024), "dense": (2048, 512), "classes": (512, 40)}
    norms = {"join": 1024, "dense": 512}
    for n, (into, out) in enumerate(itertools.pairwise(widths)):
        sizes[f"edge_{n}"] = (2 * into, out)
        norms[f"edge_{n}"] = out
    sizes |= {f"{name}_scale": (wide,) for name, wide in norms.items()}
    sizes |= {f"{name}_bias": (wide,) for name, wide in norms.items()}

    def init() -> tuple[Any, Any]:
        return weights(sizes), {name: jnp.zeros((2, wide)) for name, wide in norms.items()}

    def neighbours(x: jax.Array) -> jax.Array:
        square = (x**2).sum(-1)
        near = 2 * jnp.einsum("bid,bjd->bij", x, x) - square[:, :, None] - square[:, None]
        return jax.lax.top_k(jax.lax.stop_gradient(near), k)[1]

    def loss(w: Any, stats: Any, points: jax.Array, labels: jax.Array) -> Any:
        new = {}

        def norm(x: jax.Array, name: str) -> jax.Array:
            axes = tuple(range(x.ndim - 1))
            mean, var = x.mean(axes), x.var(axes)
            new[name] = 0.9 * stats[name] + 0.1 * jnp.stack([mean, var])
            x = (x - mean) * jax.lax.rsqrt(var + 1e-5)
            return jax.nn.leaky_relu(x * (1 + w[f"{name}_scale"]) + w[f"{name}_bias"], 0.2)

        x, found = points, []
        for n in range(len(widths) - 1):
            others = jax.vmap(lambda x, i: x[i])(x, neighbours(x))
            own = jnp.broadcast_to(x[:, :, None], others.shape)
            edges = jnp.concatenate([others - own, own], -1)
            x = norm(edges @ w[f"edge_{n}"], f"edge_{n}").max(2)
            found.append(x)
        x = norm(jnp.concatenate(found, -1) @ w["join"], "join")
        x = jnp.concatenate([x.max(1), x.mean(1)], -1)
        return cross_entropy(norm(x @ w["dense"], "dense") @ w["classes"], labels), new

    def batch(i: int) -> tuple[jax.Array, ...]:
        return normal(i, rows, num_points, 3), integers(i, 40, rows)

    return trained_with_statistics(init, loss, batch, momentum())


def sampled_neighbours(
    rows: int, *, nodes: int = 232965, features: int = 602, width: int = 256
) -> ZooStep:
    """The mean of sampled neighbours, and of theirs (GraphSAGE), from a table of features."""
    near, far, classes = 15, 10, 41
    sizes: Sizes = {"out": (width, classes)}
    for n, into in enumerate((features, width)):
        sizes |= {f"own_{n}": (into, width), f"other_{n}": (into, width), f"bias_{n}": (width,)}

    def loss(
        w: Any, table: jax.Array, one: jax.Array, two: jax.Array, three: jax.Array, y: jax.Array
    ) -> jax.Array:
        def layer(n: int, own: jax.Array, others: jax.Array) -> jax.Array:
            mean = others.mean(-2)
            x = jax.nn.relu(own @ w[f"own_{n}"] + mean @ w[f"other_{n}"] + w[f"bias_{n}"])
            return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6)

        seeds, first, second = table[one], table[two], table[three]
        hidden, others = layer(0, seeds, first), layer(0, first, second)
        return cross_entropy(layer(1, hidden, others) @ w["out"], y)

    def batch(i: int) -> tuple[jax.Array, ...]:
        places = ((rows,), (rows, near), (rows, near, far))
        sampled = tuple(integers(i + n, nodes, *shape) for n, shape in enumerate(places))
        return normal(i, nodes, features), *sampled, integers(i, classes, rows)

    return trained(lambda: weights(sizes), loss, batch, adamw(1e-2, 0.0))
