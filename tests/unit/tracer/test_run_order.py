"""When XLA runs what: updates, and gradients of parameters."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.graph import Graph, NodeKind
from autopar.rewrite.gradient_waits import await_gradients
from autopar.tracer.build import build_graph
from autopar.tracer.dataflow import Dataflow
from autopar.tracer.run_order import is_scatter_add
from autopar.tracer.trace_step import trace_step
from tests.unit.tracer.memory_graphs import array, graph_of, train


def test_an_update_frees_its_gradient_before_the_backward_pass_ends() -> None:
    def loss_of(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"])

    weights = {name: array(64, 64) for name in "abc"}
    graph = graph_of(train(loss_of), weights, array(64, 64))
    last = max(i for i, n in enumerate(graph.nodes) if n.region == "backward")
    gradients = [
        graph.liveness.times[i]
        for i, n in enumerate(graph.nodes)
        if n.region == "update" and n.name == "sub"
    ]
    assert len(gradients) == 3 and min(gradients) < last


@pytest.mark.parametrize("experts", [0, 4])
def test_gradients_of_parameters_come_late_where_collectives_are_hidden(experts: int) -> None:
    """On several devices, XLA runs the products that only the update needs in the second half of
    the backward pass, two for each that the pass itself needs, and reduces them at the end. On one
    device each runs where it stands."""
    num_layers = 6
    shape = (experts, 64, 64) if experts else (64, 64)
    name = "ragged_dot_general" if experts else "dot_general"

    def loss_of(w, x):
        for layer in w:
            counts = jnp.full(experts, 32 // max(experts, 1))
            x = jnp.tanh(jax.lax.ragged_dot(x, layer, counts) if experts else x @ layer)
        return jnp.sum(x)

    def times(overlaps: bool) -> tuple[list[int], list[int], int]:
        weights = [array(*shape)] * num_layers
        graph = graph_of(train(loss_of), weights, array(32, 64), overlaps=overlaps)
        backward = [i for i, n in enumerate(graph.nodes) if n.region == "backward"]
        late, reduced = [], []
        for index in backward:
            node, time = graph.nodes[index], graph.liveness.times[index]
            is_gradient = graph.values[node.results[0]].shape == shape
            if is_gradient and node.name == name:
                late.append(time)
            elif is_gradient and node.kind is NodeKind.FINISH:
                reduced.append(time)
        return late, reduced, max(backward)

    early, _, last = times(overlaps=False)
    late, reduced, _ = times(overlaps=True)
    assert len(early) == len(late) == num_layers and max(early) <= last
    assert late == sorted(late)
    # None runs before half of them could have, and then two at a time.
    assert late[0] >= early[num_layers // 2]
    assert late[num_layers // 2] >= early[3 * num_layers // 4]
    assert late[-1] > last
    assert len(reduced) == num_layers and all(time > last for time in reduced)


def test_sums_for_parameters_come_late_where_collectives_are_hidden() -> None:
    """So do the sums over rows that are gradients of scales; what they sum up is kept."""

    def loss_of(w, x):
        for scale, layer in w:
            x = jnp.tanh((x * scale) @ layer)
        return jnp.sum(x)

    def times(overlaps: bool) -> list[int]:
        weights = [(array(64), array(64, 64))] * 6
        graph = graph_of(train(loss_of), weights, array(32, 64), overlaps=overlaps)
        return [
            graph.liveness.times[index]
            for index, node in enumerate(graph.nodes)
            if node.name == "reduce_sum"
            and [graph.values[v].shape for v in (*node.operands, *node.results)]
            == [(32, 64), (64,)]
        ]

    early, late = times(overlaps=False), times(overlaps=True)
    assert len(early) == len(late) == 6
    assert all(one < other for one, other in zip(early, late, strict=True))
    assert late[0] >= early[2]


def test_gradients_in_a_loop_come_last_in_its_body() -> None:
    """Gradients that a loop over micro-batches adds up wait for the end of the body."""

    def step(w, x):
        def body(total, rows):
            def loss_of(w):
                return jnp.sum(jnp.tanh(jnp.tanh(rows @ w["a"]) @ w["b"]))

            return jax.tree.map(jnp.add, total, jax.grad(loss_of)(w)), None

        zeros = jax.tree.map(jnp.zeros_like, w)
        total, _ = jax.lax.scan(body, zeros, x)
        return jax.tree.map(lambda p, g: p - g, w, total)

    weights = {name: array(64, 64) for name in "ab"}
    graph = graph_of(step, weights, array(4, 16, 64), overlaps=True)
    inside = [i for i, n in enumerate(graph.nodes) if n.weight == 4]
    products = [i for i in inside if graph.nodes[i].name == "dot_general"]
    times = [graph.liveness.times[i] for i in products]
    assert max(times) < min(i for i, n in enumerate(graph.nodes) if n.region == "update")
    late = [t for i, t in zip(products, times, strict=True) if t > i]
    assert late and min(late) > max(t for i, t in zip(products, times, strict=True) if t == i)


def accumulated(weights, batch, copies_slices=True):
    """Gradients of a chain of layers, each added up over micro-batches where it is made."""

    def body(total, rows):
        inner = [rows if copies_slices else 2 * rows]
        for layer in weights:
            inner.append(jnp.tanh(inner[-1] @ layer))
        gradient, sums = jnp.cos(inner.pop()), []
        for layer, before, x in zip(weights[::-1], total[::-1], inner[::-1], strict=True):
            sums.insert(0, before + x.T @ gradient)
            gradient = (gradient @ layer.T) * (1 - x**2)
        return sums, jnp.sum(gradient)

    return jax.lax.scan(body, [jnp.zeros_like(w) for w in weights], batch)


def gradient_delays(graph: Graph) -> list[int]:
    """How much later than where they stand products of the shape of a parameter run."""
    products = [
        index
        for index, node in enumerate(graph.nodes)
        if node.name == "dot_general" and graph.values[node.results[0]].shape == (64, 64)
    ]
    return [graph.liveness.times[index] - index for index in products]


ACCUMULATED = [array(64, 64)] * 6, array(4, 32, 64)


def test_gradients_that_a_loop_adds_up_take_turns_in_the_second_half_of_its_body() -> None:
    graph = graph_of(accumulated, *ACCUMULATED, overlaps=True)
    delays = gradient_delays(graph)
    assert len(delays) == 6 and all(delays[:-1])
    assert delays[:3] == sorted(delays[:3], reverse=True)


@pytest.mark.parametrize("is_stage", [False, True])
def test_gradients_are_not_late_in_a_body_that_is_not_planned_for_overlap(is_stage: bool) -> None:
    """Nor in a stage of a pipeline, whose programs run single micro-batches, if the backward one
    sends nothing; nor where nothing is asynchronous, not even the copy of a micro-batch."""
    step = trace_step(lambda w, x: accumulated(w, x, copies_slices=is_stage), ACCUMULATED)
    graph = build_graph(replace(step, is_stage=is_stage), overlaps=True)
    if is_stage:
        assert max(gradient_delays(graph)) > 3
        assert graph.liveness.unhidden is not None
        graph = replace(graph, liveness=graph.liveness.unhidden)
    assert max(gradient_delays(graph)) <= 3  # until its own addition


def trained_by_tokens(weights, table, batch):
    """Gradients of a chain of layers, each added up over micro-batches of tokens where it is made;
    through both passes."""

    def body(total, tokens):
        x, pullbacks = table[tokens], []
        for layer in weights:
            x, pullback = jax.vjp(lambda w, x: jnp.tanh(x @ w), layer, x)
            pullbacks.append(pullback)
        gradient, sums = jnp.cos(x), []
        for before, pullback in zip(total[::-1], pullbacks[::-1], strict=True):
            of_layer, gradient = pullback(gradient)
            sums.insert(0, before + of_layer)
        return sums, jnp.sum(gradient)

    return jax.lax.scan(body, [jnp.zeros_like(w) for w in weights], batch)


def test_gradients_are_late_in_a_body_that_copies_no_slice_only_if_it_sends_something() -> None:
    """Kernels make the slices that they read, such as the tokens of a micro-batch."""
    weights, tokens = [array(64, 64)] * 6, array(4, 32, dtype=jnp.int32)
    graph = graph_of(trained_by_tokens, weights, array(100, 64), tokens, overlaps=True)
    assert max(gradient_delays(graph)) > 7
    assert graph.liveness.unhidden is not None
    own = replace(graph, liveness=graph.liveness.unhidden)
    assert max(gradient_delays(own)) <= 7  # until its own addition
    graph = graph_of(accumulated, *ACCUMULATED, overlaps=True)
    assert graph.liveness.unhidden is None  # products read its micro-batches


def test_zeros_are_made_when_a_late_scatter_adds_to_them() -> None:
    def loss_of(w, x):
        rows = w["table"][jnp.arange(32) * 7 % 64]
        for name in "abcdef":
            rows = jnp.tanh(rows @ w[name])
        return jnp.sum(rows * x)

    weights = {"table": array(64, 64)} | {name: array(64, 64) for name in "abcdef"}
    graph = graph_of(train(loss_of), weights, array(32, 64), overlaps=True)
    times = graph.liveness.times
    (scatter,) = [i for i, n in enumerate(graph.nodes) if is_scatter_add(n.name)]
    zeros = graph.producer[graph.nodes[scatter].operands[0]][0]
    assert times[scatter] > scatter and times[zeros] == times[scatter]


def test_gradients_that_a_loop_stacks_run_where_they_stand() -> None:
    """Each trip of a loop over layers hides their collectives under its own compute."""

    def loss_of(w, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]), None), x, w)
        return jnp.sum(x)

    weights = {name: array(3, 64, 64) for name in "ab"}
    graph = graph_of(train(loss_of), weights, array(32, 64), overlaps=True)
    assert gradient_delays(graph) == [0, 0]


def test_a_gradient_that_a_barrier_waits_for_alone_is_not_late() -> None:
    """XLA merges the reductions of several. A single one it begins early, to hide it."""

    def delays(num_products: int) -> list[int]:
        @jax.checkpoint
        def layer(x, w):
            for weights in w:
                x = jnp.tanh(x @ weights)
            return x

        def loss_of(w, x):
            for weights in w:
                x = layer(x, weights)
            return jnp.sum(x**2)

        layers = [[array(64, 64)] * num_products] * 3
        step = await_gradients(trace_step(train(loss_of), (layers, array(32, 64))))
        return gradient_delays(build_graph(step, overlaps=True))

    assert delays(1)[:-1] == [0, 0]
    assert any(delays(2)[:-2])


def test_what_a_barrier_waits_for_runs_before_it() -> None:
    """What late gradients are made of is gone when updates begin that wait behind the barrier."""

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"])

    def loss_of(w, x):
        for weights in w:
            x = layer(x, weights)
        return jnp.sum(x**2)

    layers = [{"a": array(64, 64), "b": array(64, 64)}] * 3
    step = await_gradients(trace_step(train(loss_of), (layers, array(32, 64))))
    graph = build_graph(step, overlaps=True)
    times = graph.liveness.times
    waited = [
        (graph.producer[value][0], index)
        for index, node in enumerate(graph.nodes)
        if node.name == "optimization_barrier" and node.region == "backward"
        for value in node.operands
        if graph.values[value].shape == (64, 64)
    ]
    late = [(made, index) for made, index in waited if times[made] > made]
    assert late
    assert all(times[made] < times[index] for made, index in waited)


def test_products_run_late_if_what_reads_them_waits_anyway() -> None:
    """The gradient of an attention's values is not needed before those of queries and keys, which
    wait for the scores' gradient; so the softmax is in memory beside both gradients."""

    def loss_of(w, x):
        q, k, v = jnp.split(x @ w["qkv"], 3, -1)
        return jnp.sum((jax.nn.softmax(q @ k.T) @ v) @ w["out"])

    weights = {"qkv": array(64, 3 * 64), "out": array(64, 64)}
    graph = graph_of(train(loss_of), weights, array(256, 64), overlaps=True)
    products = [
        (i, graph.liveness.times[i], sorted(graph.values[n.results[0]].shape))
        for i, n in enumerate(graph.nodes)
        if n.region == "backward" and n.name == "dot_general"
    ]
    ((_, of_scores, _),) = [p for p in products if p[2] == [256, 256]]
    # Gradients of the attention's output, then of values, queries and keys.
    _, *parts = [p for p in products if p[2] == [64, 256]]
    assert len(parts) == 3
    assert {time for _, time, _ in parts} == {max(index for index, _, _ in parts)}
    assert all(time > of_scores for _, time, _ in parts)
    assert min(index for index, _, _ in parts) < max(index for index, _, _ in parts)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_product_that_frees_what_a_layer_made_again_is_not_late(goes_on: bool) -> None:
    """A recomputed layer that goes on after its attention needs the softmax for that, and the
    gradient of the values frees it. One that ends there makes it for late gradients alone."""

    @jax.checkpoint
    def layer(x, w):
        q, k, v = jnp.split(x @ w["qkv"], 3, -1)
        x = (jax.nn.softmax(q @ k.T) @ v) @ w["out"]
        return jnp.sin(jnp.sin(x) @ w["next"]) if goes_on else x

    def loss_of(w, x):
        return jnp.sum(layer(layer(x, w[0]), w[1]) ** 2)

    weights = {"qkv": array(64, 3 * 64), "out": array(64, 64), "next": array(64, 64)}
    step = await_gradients(trace_step(train(loss_of), ([weights] * 2, array(256, 64))))
    graph = build_graph(step, overlaps=True)
    again = Dataflow(graph.nodes, graph.values).recomputed
    products = [i for i, node in enumerate(graph.nodes) if node.name == "dot_general"]
    softmaxes = {
        v
        for i in products
        for v in graph.nodes[i].operands
        if i in again and graph.values[v].shape == (256, 256)
    }
    delays = [
        graph.liveness.times[i] - i
        for i in products
        if i not in again and not softmaxes.isdisjoint(graph.nodes[i].operands)
    ]
    assert len(delays) == 2
    assert (max(delays) == 0) == goes_on
