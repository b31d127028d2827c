from __future__ import annotations

from collections import Counter
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.graph import Graph, Node, NodeKind
from autopar.ir.mesh import LogicalMesh
from autopar.rewrite.accumulate import accumulate
from autopar.rewrite.unroll_scans import unroll_scans
from autopar.sharding.fold import MIN_REPEATS, fold_repeated_layers
from autopar.sharding.solve import solve_graph
from autopar.tracer.build import build_graph
from autopar.tracer.trace_step import trace_step


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def train_graph(loss_of, params, batch) -> Graph:
    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return build_graph(trace_step(step, (params, batch)))


def mlp_graph(num_layers: int, size: int = 64, batch_size: int = 16) -> Graph:
    """One product per layer: alternate layers may want opposite splits."""

    def loss_of(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    return train_graph(loss_of, [array(size, size)] * num_layers, array(batch_size, size))


def transformer_graph(num_layers: int) -> Graph:
    """An embedding, layers of attention and feed-forward, a head; six products per layer."""
    width, heads, vocabulary = 16, 2, 32

    def attention(x, layer):
        batch, length, _ = x.shape
        q, k, v = (
            (x @ layer[name]).reshape(batch, length, heads, width // heads) for name in "qkv"
        )
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ layer["o"]

    def loss_of(params, tokens):
        x = params["embedding"][tokens]
        for layer in params["layers"]:
            x = x + attention(x, layer)
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        logits = x @ params["embedding"].T
        return jax.nn.logsumexp(logits, axis=-1).mean()

    layer = {name: array(width, width) for name in "qkvo"}
    layer |= {"up": array(width, 4 * width), "down": array(4 * width, width)}
    params = {"embedding": array(vocabulary, width), "layers": [layer] * num_layers}
    return train_graph(loss_of, params, jax.ShapeDtypeStruct((4, 8), jnp.int32))


def forward_products(graph: Graph) -> list[int]:
    return [i for i, n in enumerate(graph.nodes) if n.is_heavy and n.region == "forward"]


def kind_of(graph: Graph, node: Node) -> tuple:
    shapes = tuple(graph.values[v].shape for v in (*node.operands, *node.results))
    return node.kind, node.name, node.rule, node.weight, node.region, shapes


def test_few_layers_are_not_folded() -> None:
    """Six layers of one product each are three pairs, fewer than it takes; each stays free."""
    graph = mlp_graph(6)
    assert fold_repeated_layers(graph) == list(range(len(graph.nodes)))


def test_layers_of_one_product_may_still_alternate() -> None:
    graph = mlp_graph(12)
    classes = fold_repeated_layers(graph)
    assert len(set(classes)) < len(graph.nodes)
    products = [classes[i] for i in forward_products(graph)]
    inner = products[1:-1]
    assert all(a != b for a, b in pairwise(inner))
    assert inner[2:] == inner[:-2]
    assert len(set(inner)) == 2


def test_alternation_costs_as_little_folded_as_unfolded() -> None:
    """Column-, then row-split kernels: a small batch makes splitting it useless."""
    mesh = LogicalMesh((4,), alpha=(1.0,), beta=(1.0,))
    graph = mlp_graph(12, size=64, batch_size=4)
    folded, unfolded = (solve_graph(graph, mesh, fold=f) for f in (True, False))
    layouts = [folded.strategies[i].operands[1] for i in forward_products(graph)]
    assert layouts[2] != layouts[3]
    assert folded.objective == pytest.approx(unfolded.objective, rel=1e-6)


@pytest.fixture(scope="module")
def transformers() -> dict[int, Graph]:
    return {depth: transformer_graph(depth) for depth in (8, 12, 16)}


def test_depth_does_not_add_decisions(transformers: dict[int, Graph]) -> None:
    num_classes = {d: len(set(fold_repeated_layers(g))) for d, g in transformers.items()}
    assert num_classes[16] == num_classes[12] == num_classes[8]
    assert num_classes[16] < len(transformers[16].nodes) / 4


def test_a_class_holds_nodes_of_one_kind(transformers: dict[int, Graph]) -> None:
    """One decision must be possible for all of them, so rules and shapes are the same."""
    graph = transformers[12]
    kinds: dict[int, set] = {}
    for node, owner in zip(graph.nodes, fold_repeated_layers(graph), strict=True):
        kinds.setdefault(owner, set()).add(kind_of(graph, node))
    assert all(len(own) == 1 for own in kinds.values())


def test_equal_parameters_of_equal_layers_are_tied(transformers: dict[int, Graph]) -> None:
    graph = transformers[12]
    classes = fold_repeated_layers(graph)
    by_path = {
        graph.values[n.results[0]].path: classes[i]
        for i, n in enumerate(graph.nodes)
        if n.kind is NodeKind.INPUT
    }
    for name in ("q", "up", "down"):
        own = Counter(by_path[f"params['layers'][{layer}]['{name}']"] for layer in range(12))
        assert own.most_common(1)[0][1] >= 12 - 2  # the first and last may differ
    assert by_path["params['layers'][5]['q']"] != by_path["params['layers'][5]['o']"]
    assert by_path["params['layers'][5]['up']"] != by_path["params['layers'][5]['down']"]


def test_too_few_repeats_are_left_alone() -> None:
    graph = transformer_graph(MIN_REPEATS - 2)
    assert fold_repeated_layers(graph) == list(range(len(graph.nodes)))


def test_a_graph_without_layers_is_left_alone() -> None:
    graph = build_graph(trace_step(lambda a, b: jnp.tanh(a @ b), (array(8, 8), array(8, 8))))
    assert fold_repeated_layers(graph) == list(range(len(graph.nodes)))


def accumulated_graph(num_layers: int) -> Graph:
    """Two products per layer in bfloat16, on micro-batches: the loop ends in a long row of
    conversions and additions, which repeats with a period of its own."""

    def step(params, batch):
        def loss_of(params):
            x = batch.astype(jnp.bfloat16)
            for up, down in params:
                x = x + jnp.tanh(x @ up.astype(jnp.bfloat16)) @ down.astype(jnp.bfloat16)
            return (x.astype(jnp.float32) ** 2).mean()

        grads = jax.grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = [(array(16, 64), array(64, 16))] * num_layers
    full, micro = (trace_step(step, (params, array(rows, 16))) for rows in (32, 8))
    return build_graph(accumulate(full, micro, 4))


@pytest.mark.ci
def test_classes_of_micro_batches_do_not_grow_with_depth() -> None:
    fewer, more = (len(set(fold_repeated_layers(accumulated_graph(n)))) for n in (12, 36))
    assert fewer == more


def test_layers_stacked_for_a_scan_are_one_layer_when_it_is_unrolled() -> None:
    """Each layer slices its parameters, and its gradients are stacked again: the number of
    decisions does not grow with depth."""

    def classes(depth: int) -> int:
        def loss_of(params, x):
            def layer(x, w):
                return x + jnp.tanh(x @ w["up"]) @ w["down"] * w["scale"], None

            return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

        def step(params, batch):
            loss, grads = jax.value_and_grad(loss_of)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        shapes = {"up": (64, 128), "down": (128, 64), "scale": (64,)}
        params = {name: array(depth, *shape) for name, shape in shapes.items()}
        traced = unroll_scans(trace_step(step, (params, array(16, 64))))
        return len(set(fold_repeated_layers(build_graph(traced))))

    assert classes(24) <= classes(8) + 8
