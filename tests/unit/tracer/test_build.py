"""From programs to graphs: nodes of loops and branches, weights, USE, FINISH and MERGE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.cost.report import edge_weight
from autopar.ir.graph import Graph, Node, NodeKind, check_graph
from autopar.tracer.build import build_graph
from autopar.tracer.regions import BACKWARD, FORWARD, UPDATE
from autopar.tracer.trace_step import trace_step
from examples.models import build

X = np.ones((8, 16), np.float32)
W = np.ones((16, 16), np.float32)


def graph_of(fn: Any, *args: Any, **options: Any) -> Graph:
    graph = build_graph(trace_step(fn, args, **options))
    check_graph(graph)
    return graph


def nodes(graph: Graph, kind: NodeKind, name: str | None = None) -> list[Node]:
    return [n for n in graph.nodes if n.kind is kind and name in (None, n.name)]


def producer(graph: Graph, value: int) -> Node:
    return graph.nodes[graph.producer[value][0]]


def origin(graph: Graph, value: int) -> int:
    """The value that a chain of uses starts from."""
    node = producer(graph, value)
    return origin(graph, node.operands[0]) if node.kind is NodeKind.USE else value


def sgd_step(params: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        return jnp.mean(jnp.tanh(batch @ params["w"] + params["b"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


PARAMS = {"w": W, "b": np.ones(16, np.float32)}


# -- the step


def test_inputs_uses_and_paths() -> None:
    graph = graph_of(sgd_step, PARAMS, X)
    inputs = {graph.values[n.results[0]].path: n for n in nodes(graph, NodeKind.INPUT, "input")}
    assert set(inputs) == {"params['b']", "params['w']", "batch"}
    # Parameters have one shared use, the batch has none.
    used = {graph.values[n.operands[0]].path for n in nodes(graph, NodeKind.USE)}
    assert used == {"params['b']", "params['w']"}
    assert all(graph.values[n.results[0]].path is None for n in nodes(graph, NodeKind.USE))
    assert len(graph.state) == 2
    assert [graph.inputs[i] for i in graph.batch] == [inputs["batch"].results[0]]


def test_the_update_reads_parameters_where_they_are_kept() -> None:
    graph = graph_of(sgd_step, PARAMS, X)
    kept = set(graph.inputs)
    for node in nodes(graph, NodeKind.OP):
        reads_parameter = any(
            producer(graph, v).kind is NodeKind.USE
            or (v in kept and graph.values[v].path != "batch")
            for v in node.operands
        )
        if reads_parameter:
            reads_kept = any(v in kept and graph.values[v].path != "batch" for v in node.operands)
            assert reads_kept == (node.region == UPDATE), node


def test_products_are_finished() -> None:
    graph = graph_of(sgd_step, PARAMS, X)
    products = nodes(graph, NodeKind.OP, "dot_general")
    assert [n.region for n in products] == [FORWARD, BACKWARD]
    for product in products:
        (finish,) = [n for n in graph.nodes if product.results[0] in n.operands]
        assert finish.kind is NodeKind.FINISH
        assert finish.rule.operands == finish.rule.results
        assert (finish.weight, finish.region) == (product.weight, product.region)
        assert finish.equation == product.equation
        assert finish.flops == 0
    assert products[0].flops == 2 * 8 * 16 * 16
    assert products[0].is_heavy


def test_elementwise_ops_are_not_finished() -> None:
    graph = graph_of(lambda a, b: jnp.tanh(a) + b, X, X)
    assert not nodes(graph, NodeKind.FINISH)


def test_batch_factors_follow_the_batch() -> None:
    graph = graph_of(sgd_step, PARAMS, X)
    forward, backward = nodes(graph, NodeKind.OP, "dot_general")
    assert forward.batch_factor == forward.rule.results[0][0][0]
    assert backward.batch_factor in backward.rule.reduction
    update = [n for n in nodes(graph, NodeKind.OP) if n.region == UPDATE]
    assert all(n.batch_factor is None for n in update)


def test_gradients_are_deferred_and_activations_are_not() -> None:
    graph = graph_of(sgd_step, PARAMS, X)
    forward, backward = nodes(graph, NodeKind.OP, "dot_general")
    assert not graph.values[forward.operands[0]].deferred, "the batch"
    assert graph.values[backward.results[0]].deferred, "the gradient"


def test_touched_bytes() -> None:
    graph = graph_of(lambda a, b: jnp.tanh(a * 2 + 1) @ b, X, W)
    multiply, add, tanh, product = nodes(graph, NodeKind.OP)
    assert multiply.touched_bytes == (X.nbytes, 0.0), "reads its input; what it makes is fused"
    assert add.touched_bytes == (0.0, 0.0)
    assert tanh.touched_bytes == (0.0, X.nbytes)
    assert product.touched_bytes == (X.nbytes, W.nbytes, X.nbytes)


def test_slices_touch_what_they_take() -> None:
    def fn(table: Any, i: Any, rows: Any) -> Any:
        taken = lax.dynamic_slice(table, (i, 0), (2, 16))
        return taken, lax.dynamic_update_slice(table, rows, (i, 0))

    graph = graph_of(fn, W, 3, X[:2], batch_argnums=(2,))
    (take,) = nodes(graph, NodeKind.OP, "dynamic_slice")
    (put,) = nodes(graph, NodeKind.OP, "dynamic_update_slice")
    assert max(take.touched_bytes) == max(put.touched_bytes) == 2 * 16 * 4


@pytest.mark.parametrize(
    ("overlaps", "is_unrolled", "num_rows"), [(False, False, 1), (True, True, 1), (True, False, 3)]
)
def test_a_row_of_a_stack_is_read_alone_except_by_stages(
    overlaps: bool, is_unrolled: bool, num_rows: int
) -> None:
    step = trace_step(lambda a, stack: a @ stack[1], (X, np.stack([W, W, W])))
    step = replace(step, is_unrolled=is_unrolled)
    (take,) = nodes(build_graph(step, overlaps=overlaps), NodeKind.OP, "slice")
    assert take.touched_bytes[0] == num_rows * W.nbytes


def test_rows_that_are_written_into_an_array_touch_no_others() -> None:
    graph = graph_of(lambda x, rows, at: x.at[at].set(rows), X, X[:2], np.array([1, 3]))
    (write,) = [node for node in graph.nodes if node.name == "scatter"]
    assert max(write.touched_bytes) == X[:2].nbytes < X.nbytes


def test_literal_results_have_no_value() -> None:
    graph = graph_of(lambda a, b: (a @ b, 1.0), X, W)
    assert graph.outputs[1] is None


def test_ops_without_a_rule_are_counted() -> None:
    graph = graph_of(lambda a, b: [jnp.linalg.qr(b + i)[0] @ a.T for i in range(2)], X, W)
    (unruled,) = graph.unruled
    assert unruled.name == "qr"
    assert unruled.count == 2
    assert "test_build.py" in unruled.source


# -- loops


def rnn(x: Any, w: Any, xs: Any) -> Any:
    def body(carry: Any, x: Any) -> Any:
        carry = jnp.tanh(carry @ w + x)
        return carry, carry.sum(1)

    return lax.scan(body, x, xs)


def test_scan() -> None:
    graph = graph_of(rnn, X, W, np.stack([X] * 5))
    (product,) = nodes(graph, NodeKind.OP, "dot_general")
    assert product.weight == 5
    # The carry: what comes in, what the body makes, and what goes out all agree.
    (merge,) = nodes(graph, NodeKind.MERGE)
    assert merge.weight == 1
    assert origin(graph, merge.operands[0]) == graph.inputs[0]
    assert producer(graph, merge.operands[1]).name == "tanh"
    assert graph.outputs[0] == merge.results[0]
    assert product.operands[0] == merge.results[0]
    # What the loop only reads is laid out once, outside.
    use = producer(graph, product.operands[1])
    assert use.kind is NodeKind.USE
    assert use.weight == 1
    assert use.operands == (graph.inputs[1],)
    # Slices in, slices out.
    (take,) = nodes(graph, NodeKind.OP, "scan_slice")
    (put,) = nodes(graph, NodeKind.OP, "scan_stack")
    assert take.weight == put.weight == 5
    assert take.rule.operands[0] == ((), *take.rule.results[0])
    assert put.rule.results[0] == ((), *put.rule.operands[0])
    assert graph.outputs[1] == put.results[0]
    assert max(take.touched_bytes) == 0, "who reads them pays"
    size = graph.values[put.operands[0]].num_bytes
    assert put.touched_bytes == (size, 2 * size), "zeros, and a copy"


def test_parameters_in_a_loop_have_a_use_outside_and_one_inside() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            hidden, _ = lax.scan(lambda c, _: (jnp.tanh(c @ params), None), batch, None, length=3)
            return hidden.mean()

        return params - jax.grad(loss_fn)(params)

    graph = graph_of(step, W, X)
    (outside,) = [n for n in nodes(graph, NodeKind.USE) if n.operands[0] == graph.inputs[0]]
    inside = [n for n in nodes(graph, NodeKind.USE) if outside.results[0] in n.operands]
    assert inside, "the loops of the forward and backward pass"
    assert {n.weight for n in inside} == {1.0}


def test_nested_scans_multiply() -> None:
    def fn(x: Any, w: Any) -> Any:
        inner = lambda c, _: (jnp.tanh(c @ w), None)  # noqa: E731
        outer = lambda c, _: (lax.scan(inner, c, None, length=3)[0], None)  # noqa: E731
        return lax.scan(outer, x, None, length=4)[0]

    graph = graph_of(fn, X, W)
    (product,) = nodes(graph, NodeKind.OP, "dot_general")
    assert product.weight == 12
    assert sorted(n.weight for n in nodes(graph, NodeKind.MERGE)) == [1, 4]
    inside = producer(graph, product.operands[1])
    outside = producer(graph, inside.operands[0])
    assert (inside.kind, inside.weight) == (NodeKind.USE, 4)
    assert (outside.kind, outside.weight) == (NodeKind.USE, 1)


def test_while_loop() -> None:
    def fn(x: Any, w: Any) -> Any:
        limit = w.sum()
        return lax.while_loop(
            lambda c: (c[1] < 3) & (c[0].sum() < limit),
            lambda c: (jnp.tanh(c[0] @ w), c[1] + 1),
            (x, 0),
        )

    graph = graph_of(fn, X, W)
    carried = nodes(graph, NodeKind.MERGE, "carry")
    assert len(carried) == 2
    assert [len(n.operands) for n in carried] == [2, 1], "the count starts as a literal"
    (product,) = nodes(graph, NodeKind.OP, "dot_general")
    assert product.weight == 3, "no more trips, by the condition"
    condition = [
        n for n in nodes(graph, NodeKind.OP, "reduce_sum") if carried[0].results[0] in n.operands
    ]
    assert condition, "the condition reads the carry"
    assert graph.outputs == tuple(n.results[0] for n in carried)


def test_branches_are_equally_likely() -> None:
    """In a loop of six trips each of three branches runs twice on average; nested ones less."""

    def nested(x):
        return lax.cond(x[0, 0] > 1, lambda: jnp.cos(x), lambda: jnp.exp(x))

    def trip(x, i):
        return lax.switch(i % 3, (lambda x: jnp.tanh(x), lambda x: jnp.sin(x), nested), x), None

    graph = graph_of(lambda x: jnp.sqrt(lax.scan(trip, x, jnp.arange(6))[0]), X)
    node = {n.name: n for n in graph.nodes}
    runs = {name: node[name].weight for name in ("sqrt", "tanh", "sin", "cos", "exp")}
    assert runs == pytest.approx({"sqrt": 1, "tanh": 2, "sin": 2, "cos": 1, "exp": 1})
    assert {node[name].trips for name in ("tanh", "cos", "exp")} == {6}
    assert edge_weight(node["tanh"], node["sqrt"]) == pytest.approx(2)
    assert edge_weight(node["sqrt"], node["cos"]) == pytest.approx(1)


def test_cond_joins_its_branches() -> None:
    def fn(x: Any, w: Any) -> Any:
        return lax.cond(x[0, 0] > 0, lambda: (x @ w, 1.0), lambda: (jnp.sin(x), 2.0))

    graph = graph_of(fn, X, W)
    join, literals = nodes(graph, NodeKind.MERGE, "branch")
    made_by = {producer(graph, v).name for v in join.operands}
    assert made_by == {"sin", "finish"}
    assert literals.operands == ()
    assert graph.outputs == (join.results[0], literals.results[0])


def test_carry_that_is_a_literal_and_stack_that_is_constant() -> None:
    graph = graph_of(
        lambda xs, w: lax.scan(lambda c, x: (0.5, (x @ w * c, 1.0)), 2.0, xs), X[None], W
    )
    (merge,) = nodes(graph, NodeKind.MERGE)
    assert merge.operands == ()


def test_effects_have_no_node() -> None:
    def fn(x: Any, w: Any) -> Any:
        jax.debug.callback(lambda a: None, x)
        return x @ w

    graph = graph_of(fn, X, W)
    assert [n.name for n in nodes(graph, NodeKind.OP)] == ["dot_general"]


def test_barrier_ties_each_value_to_itself_alone() -> None:
    graph = graph_of(lambda a, b: lax.optimization_barrier((a, b)), X, W)
    barriers = nodes(graph, NodeKind.OP, "optimization_barrier")
    assert len(barriers) == 2
    assert [len(n.operands) for n in barriers] == [1, 1]


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-tiny-scan"])
def test_layers_in_a_loop_do_the_work_of_layers_in_a_row(name: str) -> None:
    example = build(name, num_layers=3)
    step = trace_step(example.train_step, (example.abstract_state(), example.abstract_batch()))
    graph = build_graph(step)
    check_graph(graph)
    heavy = sum(n.flops * n.weight for n in graph.nodes if n.is_heavy)
    assert heavy == example.flops_per_step()
    assert not graph.unruled
    assert {n.region for n in graph.nodes} == {FORWARD, BACKWARD, UPDATE}


def test_a_changed_node_is_what_replace_makes() -> None:
    graph = graph_of(sgd_step, PARAMS, X)
    (node, *_) = nodes(graph, NodeKind.OP, "dot_general")
    assert node.having(flops=2.0, region=UPDATE) == replace(node, flops=2.0, region=UPDATE)
    assert node.having() == node and node.flops != 2.0


def test_a_rule_is_checked_for_every_shape_it_is_used_with() -> None:
    graph = graph_of(sgd_step, PARAMS, X)
    *_, last = nodes(graph, NodeKind.OP, "sub")
    value = last.results[0]
    values = list(graph.values)
    values[value] = replace(values[value], shape=(*values[value].shape, 2))
    with pytest.raises(AssertionError):
        check_graph(replace(graph, values=tuple(values)))
