"""Losses that do not depend on each other: XLA differentiates one before it computes the next."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autopar.ir.graph import Graph
from autopar.tracer.early_backward import early_backward
from tests.unit.tracer.memory_graphs import array, graph_of, train

NUM_LAYERS, ROWS, WIDTH = 6, 4096, 64
ONE = [array(WIDTH, WIDTH)] * NUM_LAYERS
TWO = {"coarse": ONE, "fine": ONE}


def network(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jnp.sin(x @ layer)
    return x


def coarse_and_fine(w: Any, x: jax.Array) -> jax.Array:
    """The second network reads what the first one says, but no gradient goes back."""
    coarse = network(w["coarse"], x)
    fine = network(w["fine"], x + jax.lax.stop_gradient(coarse))
    return jnp.sum(coarse**2) + jnp.sum(fine**2)


def one_after_another(w: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(network(w["fine"], network(w["coarse"], x)) ** 2)


def peak_rows(graph: Graph) -> int:
    """The largest number of arrays with the batch's rows that are in memory at once."""
    lives = [x for x in graph.liveness.lives if graph.values[x.value].shape == (ROWS, WIDTH)]
    return max(sum(x.start <= time <= x.end for x in lives) for time in range(len(graph.nodes)))


def test_a_second_loss_does_not_find_the_activations_of_the_first_in_memory() -> None:
    x = array(ROWS, WIDTH)
    alone = peak_rows(graph_of(train(lambda w, x: jnp.sum(network(w, x) ** 2)), ONE, x))
    assert peak_rows(graph_of(train(coarse_and_fine), TWO, x)) <= alone + 2
    assert peak_rows(graph_of(train(one_after_another), TWO, x)) >= 2 * alone - 4


def test_the_order_of_nodes_is_one_in_which_every_operand_comes_first() -> None:
    graph = graph_of(train(coarse_and_fine), TWO, array(ROWS, WIDTH))
    order = early_backward(graph.nodes, ())
    assert order is not None and sorted(order) == list(range(len(graph.nodes)))
    made: set[int] = set()
    for index in order:
        assert made.issuperset(graph.nodes[index].operands)
        made.update(graph.nodes[index].results)
    regions = [graph.nodes[index].region for index in order]
    assert "forward" in regions[regions.index("backward") :]


def test_a_loss_that_needs_the_other_keeps_the_order_of_the_program() -> None:
    graph = graph_of(train(one_after_another), TWO, array(ROWS, WIDTH))
    assert early_backward(graph.nodes, ()) is None


def test_a_loop_of_the_forward_pass_stays_in_one_piece() -> None:
    def loss_of(w: Any, x: jax.Array) -> jax.Array:
        coarse = network(w["coarse"], x)
        found = jax.lax.fori_loop(0, 8, lambda _, v: jnp.cos(v), jax.lax.stop_gradient(coarse))
        return jnp.sum(coarse**2) + jnp.sum(network(w["fine"], x + found) ** 2)

    x = array(ROWS, WIDTH)
    alone = peak_rows(graph_of(train(lambda w, x: jnp.sum(network(w, x) ** 2)), ONE, x))
    assert peak_rows(graph_of(train(loss_of), TWO, x)) <= alone + 3
