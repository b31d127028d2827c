"""Which carries of a loop only add up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.tracer.sums import loop_sums, zeros_made
from autopar.tracer.trace_step import trace_step

W = np.ones((4, 4), np.float32)
XS = np.ones((3, 8, 4), np.float32)


def carries(fn: Any) -> set[int]:
    """Positions of the carries of the one scan in fn that may hold partial sums."""
    program = trace_step(fn, (W, XS)).program
    zeros: set[int] = set()
    for equation in program.equations:
        zeros.update(zeros_made(equation, zeros))
    (scan,) = [e for e in program.equations if e.name == "scan"]
    return set(loop_sums(scan, zeros).carries)


def summing(term: Any, start: Any = jnp.zeros_like) -> Any:
    def fn(w: Any, xs: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c + term(w, x), None), start(w), xs)[0]

    return fn


@pytest.mark.parametrize(
    "term",
    [
        lambda w, x: x.T @ x,
        lambda w, x: -(x.T @ x).T,
        lambda w, x: x.T @ x + x.sum(0) * jnp.ones((4, 4)) * 0 + x.T @ x,
        lambda w, x: jnp.zeros((4, 4)).at[jnp.argmax(x, axis=1)].add(x),
        lambda w, x: (x.T.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16)).astype(jnp.float32),
    ],
    ids=["product", "turned", "with a broadcast", "scatter", "converted"],
)
def test_terms(term: Any, request: pytest.FixtureRequest) -> None:
    expected = set() if "broadcast" in request.node.name else {0}
    assert carries(summing(term)) == expected


def test_two_terms_added_one_after_the_other() -> None:
    def fn(w: Any, xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            return x.T @ x + (c + (x.T @ x).T), None

        return jax.lax.scan(body, jnp.zeros_like(w), xs)[0]

    assert carries(fn) == {0}


def test_a_start_that_is_not_zero_is_none() -> None:
    assert carries(summing(lambda w, x: x.T @ x, start=lambda w: w)) == set()
    assert carries(summing(lambda w, x: x.T @ x, start=jnp.ones_like)) == set()


def test_a_term_that_is_not_linear_is_none() -> None:
    assert carries(summing(lambda w, x: jnp.tanh(x.T @ x))) == set()


def test_a_scatter_onto_something_is_none() -> None:
    assert carries(summing(lambda w, x: w.at[jnp.argmax(x, axis=1)].add(x))) == set()


def test_a_carry_that_is_read_is_none() -> None:
    def fn(w: Any, xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            return c + x.T @ x, c.sum()

        return jax.lax.scan(body, jnp.zeros_like(w), xs)

    assert carries(fn) == set()


def test_a_term_that_is_read_elsewhere_is_none() -> None:
    def fn(w: Any, xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            product = x.T @ x
            return c + product, jnp.max(product)

        return jax.lax.scan(body, jnp.zeros_like(w), xs)

    assert carries(fn) == set()


def test_an_inner_loop_that_stacks_or_adds_up() -> None:
    def fn(w: Any, xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            def inner(total: Any, row: Any) -> Any:
                return total + jnp.outer(row, row) @ x.T @ x, x.T @ (x * row)

            total, stack = jax.lax.scan(inner, jnp.zeros_like(w), x)
            return (c[0] + total, c[1] + stack), None

        start = (jnp.zeros_like(w), jnp.zeros((8, 4, 4)))
        return jax.lax.scan(body, start, xs)[0]

    assert carries(fn) == {0, 1}
