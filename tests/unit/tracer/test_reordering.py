"""Which transposes a product makes itself, and which are left to the kernels that read it."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from autopar.tracer.dataflow import Dataflow
from autopar.tracer.reordering import Reordering, is_reordering
from tests.unit.tracer.memory_graphs import array, graph_of


def reorders(order: tuple[int, ...]) -> bool:
    shape = (2, 3, 5, 7, 11)[: len(order)]
    graph = graph_of(lambda x: jnp.sort(jnp.transpose(x, order)), array(*shape))
    flow = Dataflow(graph.nodes, graph.values)
    (node,) = (node for node in graph.nodes if node.name == "transpose")
    return is_reordering(flow, node)


@pytest.mark.parametrize("order", [(0, 2, 1), (0, 1, 3, 2), (0, 2, 3, 1), (0, 1, 4, 2, 3)])
def test_a_product_swaps_its_two_groups_of_dimensions(order: tuple[int, ...]) -> None:
    assert not reorders(order)


@pytest.mark.parametrize("order", [(0, 1, 4, 3, 2), (0, 3, 2, 1), (0, 2, 1, 3)])
def test_any_other_order_is_made_by_kernels(order: tuple[int, ...]) -> None:
    assert reorders(order)


def test_two_products_in_one_order_are_not_copied() -> None:
    def fn(w, x):
        one, other = x @ w, jnp.sort(x) @ w
        return jnp.sort(one * jnp.tanh(other))

    graph = graph_of(fn, array(8, 8), array(2, 3, 8))
    assert not Reordering(Dataflow(graph.nodes, graph.values)).copied


@pytest.mark.parametrize(("is_turned", "num_orders"), [(True, 2), (False, 1)])
def test_zeros_and_dimensions_that_are_added_keep_the_order(
    is_turned: bool, num_orders: int
) -> None:
    """As in the gradient of a score that a loop over the second dimension picks from a grid of
    logits. Two products want it in the program's order, turned in two ways: it is written twice."""

    def fn(w, grid, score):
        score = jnp.sort(score)
        score = jnp.transpose(score, (1, 0, 2)) if is_turned else jnp.reshape(score, (2, 5, 3))
        gradient = jnp.exp(jnp.pad(score[..., None], ((0, 0), (0, 0), (0, 0), (0, 6))))
        return gradient @ w, jnp.einsum("btuv,btuw->vw", gradient, grid)

    graph = graph_of(fn, array(7, 4), array(2, 5, 3, 4), array(5, 2, 3))
    (written,) = (v for v in graph.liveness.lives if graph.values[v.value].shape == (2, 5, 3, 7))
    assert written.count == num_orders


@pytest.mark.parametrize(("overlaps", "num_orders"), [(False, 1), (True, 2)])
def test_a_second_operand_may_have_what_a_product_contracts_first(
    overlaps: bool, num_orders: int
) -> None:
    """XLA swaps the operands of a product to turn its result, so that a gradient that two products
    read is written once. On several devices the result is reduced first."""

    def fn(w, grid, score):
        score = jnp.transpose(jnp.sort(score), (1, 0, 2))
        gradient = jnp.exp(jnp.pad(score[..., None], ((0, 0), (0, 0), (0, 0), (0, 6))))
        return gradient @ w, jnp.einsum("btuv,btuw->vw", gradient, grid).T

    arrays = array(7, 4), array(2, 5, 3, 4), array(5, 2, 3)
    graph = graph_of(fn, *arrays, overlaps=overlaps)
    lives = [v for v in graph.liveness.lives if graph.values[v.value].shape == (2, 5, 3, 7)]
    assert sum(life.count for life in lives) == num_orders
