"""Transposes move to a product's smaller arrays; the largest stays as it is, and so do values."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.ir.program import Program
from autopar.ir.traced_step import TracedStep
from autopar.lower.annotate import annotated_function
from autopar.rewrite.product_orders import order_products
from autopar.sharding.assemble import unsharded
from autopar.tracer.trace_step import trace_step

BATCH, ROWS, HEADS, GROUPS, SIZE = 2, 32, 2, 3, 8
QUERY = (BATCH, ROWS, HEADS, GROUPS, SIZE)
KEY = (BATCH, ROWS, HEADS, SIZE)


def attention(query: Any, key: Any, value: Any) -> Any:
    """Grouped-query attention, with the groups of the scores before the rows."""
    scores = jnp.einsum("bqngd,bknd->bngqk", query, key)
    return jnp.einsum("bngqk,bknd->bqngd", jax.nn.softmax(scores), value)


def attention_of_heads(query: Any, key: Any, value: Any) -> Any:
    """As many heads of keys as of queries: XLA only swaps operands."""
    scores = jnp.einsum("bqnd,bknd->bnqk", query, key)
    return jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), value)


def in_a_scan(query: Any, key: Any, value: Any) -> Any:
    def layer(x: Any, scale: Any) -> Any:
        return attention(scale * x, key, value), None

    return lax.scan(layer, query, jnp.arange(1.0, 4.0) / 2)[0]  # larger: rounding grows


def gradient(model: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *arrays: (model(*arrays) ** 2).sum(), argnums=(0, 1, 2))


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]


def largest_transposed(program: Program) -> int:
    """Elements of the largest array that is transposed, at any depth."""
    transposes = (e for e in program.all_equations() if e.name == "transpose")
    return max((prod(program.avals[e.results[0]].shape) for e in transposes), default=0)


def check_values(step: TracedStep, function: Callable[..., Any], given: list[jax.Array]) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    run = jax.jit(annotated_function(step.program, unsharded(step.program), mesh))
    ours, reference = run(*given), jax.tree.leaves(jax.jit(function)(*given))
    for got, want in zip(ours, reference, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("model", [attention, in_a_scan])
def test_scores_of_grouped_queries_are_never_transposed(model: Callable[..., Any]) -> None:
    given, function = arrays(QUERY, KEY, KEY), gradient(model)
    step = trace_step(function, tuple(given))
    ordered = order_products(step)
    assert largest_transposed(step.program) == prod(QUERY) // SIZE * ROWS
    assert largest_transposed(ordered.program) == prod(QUERY)
    assert ordered.is_reordered
    check_values(ordered, function, given)


def test_whole_groups_are_left_to_xla() -> None:
    shape = (BATCH, ROWS, HEADS, SIZE)
    step = trace_step(gradient(attention_of_heads), tuple(arrays(shape, shape, shape)))
    assert order_products(step) is step


@pytest.mark.parametrize(
    ("product", "shapes"),
    [
        ("iabk,jk->iabj", ((2, 3, 4, 8), (5, 8))),  # in the product's own order
        ("abk,jk->bja", ((8, 8, 2), (8, 2))),  # the rows of two operands, mixed
        ("iak,ijk->aij", ((4, 8, 2), (4, 8, 2))),  # a batch dimension that is not the first
    ],
    ids=["natural", "mixed", "batch"],
)
def test_other_orders_stay(product: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    step = trace_step(lambda a, b: jnp.einsum(product, a, b), tuple(arrays(*shapes)))
    assert order_products(step) is step


def test_a_result_that_others_read_stays() -> None:
    def both(a: Any, b: Any) -> Any:
        product = jnp.einsum("abk,jk->abj", a, b)
        return product, product.transpose(1, 0, 2)

    step = trace_step(both, tuple(arrays((8, 8, 2), (8, 2))))
    assert order_products(step) is step


def test_contracted_dimensions_are_in_the_order_of_the_largest_operand() -> None:
    def model(a: Any, b: Any, small: Any) -> Any:
        large = jnp.tanh(lax.dot_general(a, b, (((2,), (1,)), ((), ()))))
        return lax.dot_general(large, small, (((1, 0), (0, 1)), ((), ())))

    given = arrays((8, 4, 2), (16, 2), (4, 8, 2))
    ordered = order_products(trace_step(model, tuple(given)))
    assert ordered.program.equations[-1].params["dimension_numbers"][0] == ((0, 1), (1, 0))
    check_values(ordered, model, given)


@pytest.mark.parametrize("reads", ["row", "output"])
def test_an_order_that_others_decide_too_stays(reads: str) -> None:
    """XLA finds an order in which all of these agree; a change of some would break it."""

    def model(query: Any, key: Any, value: Any) -> Any:
        scores = jnp.einsum("bqngd,bknd->bqngk", query, key).transpose(0, 2, 3, 1, 4)
        probs = jax.nn.softmax(scores)
        other = probs.transpose(0, 1, 3, 2, 4)
        other = other.sum(-1) if reads == "row" else other
        return jnp.einsum("bngqk,bknd->bqngd", probs, value), other

    step = trace_step(model, tuple(arrays(QUERY, KEY, KEY)))
    assert order_products(step) is step


def test_batch_dimensions_of_an_operand_stay() -> None:
    def product(large: Any, small: Any) -> Any:
        return lax.dot_general(large, small, (((3,), (2,)), ((2, 0), (0, 1))))

    given = arrays((3, 16, 2, 8), (2, 3, 8))
    assert order_products(step := trace_step(product, tuple(given))) is step


@pytest.mark.parametrize("seed", range(24))
def test_any_pair_of_products_keeps_its_values(seed: int) -> None:
    """Random ranks and orders of dimensions, in both passes."""
    function, given = random_pair(random.Random(seed))

    def both_passes(*arrays: Any) -> Any:
        argnums = tuple(range(len(arrays)))
        grads = jax.grad(lambda *a: (function(*a) ** 2).sum(), argnums=argnums)(*arrays)
        return function(*arrays), grads

    check_values(order_products(trace_step(both_passes, tuple(given))), both_passes, given)


def test_random_pairs_are_reordered() -> None:
    """Else the test above would compare programs with themselves."""
    pairs = (random_pair(random.Random(seed)) for seed in range(24))
    steps = (trace_step(function, tuple(given)) for function, given in pairs)
    assert sum(order_products(step).is_reordered for step in steps) >= 8


def random_pair(draw: random.Random) -> tuple[Callable[..., Any], list[jax.Array]]:
    """A product with a large result, and one that reads it, each with orders of its own."""
    names = iter("abcdefghijkl")
    batch = [next(names) for _ in range(draw.randint(0, 2))]
    left, right = ([next(names) for _ in range(draw.randint(1, 3))] for _ in range(2))
    inner, new = next(names), next(names)
    length = dict.fromkeys(batch, 2) | dict.fromkeys((inner, new), 2)
    length |= {n: draw.choice((4, 5)) for n in (*left, *right)}
    large = [*batch, *draw.sample([left, right], 2)[0]]
    large += [n for n in (*left, *right) if n not in large]
    for group in (left, right):  # within their groups
        draw.shuffle(group)
    contracted = draw.sample([*left, *right], draw.randint(1, 2))
    result = [n for n in (*batch, *left, *right) if n not in contracted] + [new]
    first, second = [*batch, *left, inner], [*batch, *right, inner]
    third = [*batch, *contracted, new]
    draw.shuffle(third)
    specs = ["".join(dims) for dims in (first, second, large, third, result)]

    def function(a: Any, b: Any, c: Any) -> Any:
        product = jnp.tanh(jnp.einsum(f"{specs[0]},{specs[1]}->{specs[2]}", a, b))
        return jnp.einsum(f"{specs[2]},{specs[3]}->{specs[4]}", product, c)

    return function, arrays(*(tuple(length[n] for n in dims) for dims in (first, second, third)))
