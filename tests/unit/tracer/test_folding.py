"""What XLA makes inside another op, and what that frees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.unit.tracer.memory_graphs import array, graph_of, lives_by_op, train


@pytest.mark.parametrize("epilogue", ["add", "mul"])
def test_cublas_adds_to_a_product_and_multiplies_it_itself(epilogue: str) -> None:
    def fn(w, x, y):
        product = x @ w
        return jnp.sort(product + jnp.sort(y) if epilogue == "add" else 3 * product)

    graph = graph_of(fn, array(64, 32), array(32, 64), array(32, 32))
    lives = lives_by_op(graph)
    assert "dot_general" not in lives and len(lives[epilogue]) == 1
    if epilogue == "add":  # in place of the other addend
        assert all(end < lives["add"][0][0] for _, end, _ in lives["sort"][:1])


def test_what_else_reads_a_product_keeps_it_apart_from_its_sum() -> None:
    def fn(w, x, y):
        product = x @ w
        return jnp.sort(product + jnp.sort(y)), jnp.sort(product)

    graph = graph_of(fn, array(64, 32), array(32, 64), array(32, 32))
    lives = lives_by_op(graph)
    assert len(lives["dot_general"]) == len(lives["add"]) == 1


def test_of_two_products_that_are_added_the_first_waits_for_the_second() -> None:
    """So its operands are kept until then."""

    def fn(w, x):
        first, second = jnp.sort(x), jnp.sort(w)
        early = first @ second
        return jnp.sort(early.T + (jnp.sort(second) @ jnp.sort(first)).T)

    graph = graph_of(fn, array(64, 64), array(64, 64))
    lives = lives_by_op(graph)
    (add,) = [i for i, n in enumerate(graph.nodes) if n.name == "add"]
    assert [end >= add for _, end, _ in lives["sort"][:2]] == [True, True]
    assert len(lives["dot_general"]) == 1 and "transpose" not in lives


def test_a_scatter_into_zeros_is_made_in_what_it_is_added_to() -> None:
    """The gradient of picking the target's logits: XLA scatters into the gradient of the softmax,
    so that neither the zeros nor their sum with the picks take memory."""
    classes = 2**15

    def loss_of(w, x):
        logits = x @ w
        target = jnp.take_along_axis(logits, jnp.full((128, 1), 3), axis=-1)[:, 0]
        return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - target)

    graph = graph_of(train(loss_of), array(32, classes), array(128, 32))
    assert any(n.name == "scatter-add" for n in graph.nodes)
    large = {
        name
        for name, lives in lives_by_op(graph).items()
        for _, _, shape in lives
        if shape == (128, classes)
    }
    assert large == {"dot_general", "add_any"}


@pytest.mark.parametrize("contracted", [1, 2])
def test_a_product_over_one_element_is_a_multiplication(contracted: int) -> None:
    """Such as the gradient of a head with one output: it is fused into what reads it."""
    graph = graph_of(
        lambda g, w, x: jnp.sort(jnp.sort(x) * (g @ w)),
        array(64, contracted),
        array(contracted, 64),
        array(64, 64),
    )
    assert ("dot_general" in lives_by_op(graph)) == (contracted > 1)
