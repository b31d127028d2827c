"""Recommenders: DLRM with large tables of uneven sizes, and two towers with in-batch negatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import cross_entropy, integers, mlp, mlp_init, normal, pick, trained

CRITEO = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282,
    10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152,
    12_973, 108, 36,
)  # fmt: skip


@zoo_program("dlrm", source="written", layers=True)
def dlrm(size: Size) -> ZooStep:
    """Bags of categories summed per table, and dot products of all pairs of features."""
    tables, dim, dense = pick(
        size, ((101, 37, 3, 64), 8, 13), (CRITEO, 128, 13), ((1_000_000,) * 8, 128, 13)
    )
    rows, bag = pick(size, (16, 3), (65536, 4), (16384, 4))
    bottom, top = pick(size, ((16,), (24, 12)), ((512, 256), (1024, 1024, 512, 256)))
    pairs = np.tril_indices(len(tables) + 1, k=-1)

    def init() -> Any:
        a, b, *keys = jax.random.split(jax.random.key(0), len(tables) + 2)
        return {
            "bottom": mlp_init(a, dense, *bottom, dim),
            "top": mlp_init(b, dim + len(pairs[0]), *top, 1),
            "tables": [
                jax.random.uniform(k, (n, dim), minval=-0.3, maxval=0.3)
                for k, n in zip(keys, tables, strict=True)
            ],
        }

    def loss(params: Any, batch: dict[str, Any]) -> jax.Array:
        x = mlp(params["bottom"], batch["dense"], jax.nn.relu)
        looked_up = [
            table[index].sum(1)
            for table, index in zip(params["tables"], batch["sparse"], strict=True)
        ]
        features = jnp.stack([x, *looked_up], axis=1)
        dots = jnp.einsum("bid,bjd->bij", features, features)[:, pairs[0], pairs[1]]
        logits = mlp(params["top"], jnp.concatenate([x, dots], axis=-1), jax.nn.relu)[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["click"]).mean()

    def make_batch(i: int) -> tuple:
        sparse = [integers(i + 7 * t, n, rows, bag) for t, n in enumerate(tables)]
        click = (normal(i, rows) > 0).astype(jnp.float32)
        return ({"dense": normal(i + 1, rows, dense), "sparse": sparse, "click": click},)

    return trained(init, loss, make_batch, optax.adagrad(0.01, eps=1e-3))


@zoo_program("two-towers", source="written", layers=True, micro_batches=1)
def two_towers(size: Size) -> ZooStep:
    """The other rows of the batch are the negatives, corrected by how often they are drawn."""
    rows, users, items, dim, hidden = pick(
        size,
        (16, 53, 41, 8, 24),
        (65536, 20_000_000, 5_000_000, 128, 1024),
        (16384, 2_000_000, 500_000, 128, 1024),
    )

    def init() -> Any:
        a, b, c, d = jax.random.split(jax.random.key(0), 4)
        return {
            "users": jax.random.normal(a, (users, dim)),
            "items": jax.random.normal(b, (items, dim)),
            "user": mlp_init(c, dim, hidden, dim),
            "item": mlp_init(d, dim, hidden, dim),
        }

    def loss(params: Any, user: jax.Array, item: jax.Array, frequency: jax.Array) -> jax.Array:
        u, v = (
            mlp(params["user"], params["users"][user]),
            mlp(params["item"], params["items"][item]),
        )
        logits = u @ v.T / dim**0.5 - jnp.log(frequency)
        return cross_entropy(logits, jnp.arange(rows))

    def make_batch(i: int) -> tuple:
        frequency = 0.1 + jax.nn.sigmoid(normal(i, rows))
        return integers(i, users, rows), integers(i + 1, items, rows), frequency

    return trained(init, loss, make_batch, optax.adagrad(0.01, eps=1e-3))
