"""Graph networks on one large graph: messages along edges, gathered by `segment_sum`.

Nodes depend on each other, so the batch cannot be cut into micro-batches.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.zoo.program import Size, ZooStep, zoo_program
from tests.zoo.written.training import (
    cross_entropy,
    dense_init,
    integers,
    mlp,
    mlp_init,
    normal,
    pick,
    trained,
)


@zoo_program("gnn", source="written", layers=True, micro_batches=1)
def gnn(size: Size) -> ZooStep:
    """Message passing over a batch of molecules, and a prediction per molecule."""
    nodes, edges, graphs, dim, depth = pick(
        size, (37, 91, 5, 16, 2), (262144, 1048576, 8192, 1024, 12), (32768, 131072, 1024, 512, 4)
    )

    def init() -> Any:
        a, b, c, *keys = jax.random.split(jax.random.key(0), 2 * depth + 3)
        return {
            "node": dense_init(a, 7, dim),
            "edge": dense_init(b, 3, dim),
            "message": [mlp_init(k, 3 * dim, dim, dim) for k in keys[:depth]],
            "update": [mlp_init(k, 2 * dim, dim, dim) for k in keys[depth:]],
            "out": dense_init(c, dim, 1),
        }

    def loss(params: Any, graph: dict[str, jax.Array], target: jax.Array) -> jax.Array:
        senders, receivers = graph["senders"], graph["receivers"]
        h, e = graph["nodes"] @ params["node"], graph["edges"] @ params["edge"]
        for message, update in zip(params["message"], params["update"], strict=True):
            e = e + mlp(message, jnp.concatenate([h[senders], h[receivers], e], axis=-1))
            total = jax.ops.segment_sum(e, receivers, num_segments=nodes)
            h = h + mlp(update, jnp.concatenate([h, total], axis=-1))
        pooled = jax.ops.segment_sum(h, graph["graph"], num_segments=graphs)
        count = jax.ops.segment_sum(jnp.ones(nodes), graph["graph"], num_segments=graphs)
        predicted = pooled / jnp.maximum(count, 1)[:, None] @ params["out"]
        return jnp.mean((predicted[:, 0] - target) ** 2)

    def make_batch(i: int) -> tuple:
        graph = {
            "nodes": normal(i, nodes, 7),
            "edges": normal(i, edges, 3),
            "senders": integers(2 * i, nodes, edges),
            "receivers": integers(2 * i + 1, nodes, edges),
            "graph": jnp.sort(integers(i, graphs, nodes)),
        }
        return graph, normal(i, graphs)

    return trained(init, loss, make_batch)


@zoo_program("gat", source="written", layers=True, micro_batches=1)
def gat(size: Size) -> ZooStep:
    """Attention over neighbours: a softmax per receiver by `segment_max` and `segment_sum`; the
    loss is of the labelled nodes."""
    nodes, edges, width, heads, features, classes = pick(
        size,
        (37, 91, 11, 2, 8, 5),
        (1_048_576, 8_388_608, 128, 8, 64, 172),
        (131_072, 1_048_576, 128, 8, 64, 172),
    )
    depth = 2

    def init() -> Any:
        out_key, *keys = jax.random.split(jax.random.key(0), 2 * depth + 1)
        dim = heads * features
        layers = [
            {"w": dense_init(k, width if i == 0 else dim, dim), "a": dense_init(q, features, 2)}
            for i, (k, q) in enumerate(zip(keys[:depth], keys[depth:], strict=True))
        ]
        return {"layers": layers, "out": dense_init(out_key, dim, classes)}

    def loss(params: Any, graph: dict[str, jax.Array], labels: jax.Array) -> jax.Array:
        senders, receivers, h = graph["senders"], graph["receivers"], graph["nodes"]
        for w in params["layers"]:
            z = (h @ w["w"]).reshape(nodes, heads, features)
            score = jnp.einsum("nhf,fi->inh", z, w["a"])
            score = jax.nn.leaky_relu(score[0][senders] + score[1][receivers])
            top = jax.ops.segment_max(score, receivers, num_segments=nodes)
            weight = jnp.exp(score - jax.lax.stop_gradient(top)[receivers])
            total = jax.ops.segment_sum(weight, receivers, num_segments=nodes)
            message = z[senders] * (weight / total[receivers])[..., None]
            h = jax.nn.elu(jax.ops.segment_sum(message, receivers, num_segments=nodes))
            h = h.reshape(nodes, -1)
        logits = (h @ params["out"])[graph["labelled"]]
        return cross_entropy(logits, labels)

    def make_batch(i: int) -> tuple:
        labelled = max(nodes // 8, 9)
        graph = {
            "nodes": normal(i, nodes, width),
            "senders": integers(2 * i, nodes, edges),
            "receivers": integers(2 * i + 1, nodes, edges),
            "labelled": integers(i, nodes, labelled),
        }
        return graph, integers(i, classes, labelled)

    return trained(init, loss, make_batch)
