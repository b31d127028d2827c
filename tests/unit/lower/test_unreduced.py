"""Equations bound lane by lane add up to the equation itself."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar import _jax
from autopar.ir.program_sharding import UnreducedAxes
from autopar.ir.spec import PARTIAL, WHOLE
from autopar.lower.unreduced import bind_unreduced, unreduced_layout, unreduced_zeros
from autopar.tracer.trace_step import trace_step

RNG = np.random.default_rng(0)


def array(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def mesh(*shape: int) -> Any:
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return _jax.fresh_mesh(devices, ("x", "y")[: len(shape)])


def last_equation(fn: Any, *args: Any) -> Any:
    return trace_step(fn, args).program.equations[-1]


def check(fn: Any, args: Any, lanes: UnreducedAxes, on: Any, sizes: tuple[int, ...]) -> None:
    """The lanes have the sizes of their axes and sum up to the whole."""
    equation = last_equation(fn, *args)
    (got,) = jax.jit(lambda *a: bind_unreduced(equation, lanes, a, on))(*args)
    want = fn(*args)
    assert got.shape == (*sizes, *want.shape)
    np.testing.assert_allclose(got.sum(tuple(range(len(sizes)))), want, rtol=1e-4, atol=1e-4)


def product(a: Any, b: Any) -> Any:
    return jax.lax.dot_general(a, b, (((0, 1), (0, 1)), ((), ())))


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        ((0,), (0, WHOLE)),
        ((1,), (WHOLE, 1)),
        ((0, 1), (0, 1)),
        ((0, 1), (0, 0)),
        ((1,), (0, 0)),  # the other axis splits the same dimension and stays
        ((0,), (0, 0)),
    ],
)
def test_products_over_two_dimensions(axes: tuple[int, ...], layout: tuple[int, ...]) -> None:
    args = (array(8, 4, 6), array(8, 4, 5))
    lanes = UnreducedAxes(axes, (layout, layout))
    check(product, args, lanes, mesh(2, 4), tuple((2, 4)[a] for a in axes))


def test_each_rank_reduces_its_own_rows() -> None:
    equation = last_equation(lambda x: jnp.sum(x, axis=0), x := array(8, 3))
    (got,) = bind_unreduced(equation, UnreducedAxes((0,), ((0,),)), [x], mesh(4))
    np.testing.assert_allclose(got, x.reshape(4, 2, 3).sum(1), rtol=1e-5)


def test_operands_with_lanes_are_taken_as_they_are() -> None:
    equation = last_equation(lambda a, b: a + b, array(3), array(3))
    a, b = array(4, 3), array(4, 3)
    partial = (PARTIAL,)
    (got,) = bind_unreduced(equation, UnreducedAxes((0,), (partial, partial)), [a, b], mesh(4))
    np.testing.assert_allclose(got, a + b)


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_gradient_of_a_filter_gathers_nothing(axes: tuple[int, ...]) -> None:
    images, grads = array(8, 6, 6, 3), array(8, 6, 6, 4)

    def fn(images: Any, grads: Any) -> Any:
        return jax.lax.conv_general_dilated(
            images, grads, (1, 1), ((1, 1), (1, 1)), dimension_numbers=("CHWN", "IHWO", "HWNC")
        )

    layout = (0, 0) if len(axes) == 2 else (0, WHOLE)
    lanes = UnreducedAxes(axes, (layout, layout))
    on = mesh(2, 2)
    check(fn, (images, grads), lanes, on, (2, 2)[: len(axes)])
    equation = last_equation(fn, images, grads)
    spec = jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec(("x", "y")[: len(axes)]))
    program = jax.jit(lambda *a: bind_unreduced(equation, lanes, a, on), in_shardings=(spec, spec))
    text = program.lower(images, grads).compile().as_text()
    assert text is not None and "all-gather" not in text and "all-reduce" not in text


@pytest.mark.parametrize(
    ("kernel", "strides", "padding", "dilation", "rows"),
    [
        (3, 1, (1, 1), 1, 16),
        (3, 1, (1, 1), 1, 4),
        (7, 1, (3, 3), 1, 8),  # reaches beyond the next rank
        (5, 1, (4, 0), 1, 16),  # causal
        (3, 2, (0, 1), 1, 16),
        (2, 2, (0, 0), 1, 16),
        (4, 4, (0, 0), 1, 16),
        (3, 1, (2, 2), 2, 16),
        (3, 2, (1, 1), 1, 16),
        (1, 1, (0, 0), 1, 16),
    ],
)
@pytest.mark.parametrize("layout", [(1, WHOLE), (1, 1), (0, 1), (1, 2), (2, 1)], ids=str)
def test_gradient_of_a_filter_has_its_neighbours_rows(
    kernel: int, strides: int, padding: Any, dilation: int, rows: int, layout: Any
) -> None:
    """Each rank left out what its windows read of other ranks' rows, in micro-batches alone."""
    images = array(4, rows, rows, 3)

    def forward(weights: Any, images: Any) -> Any:
        return jax.lax.conv_general_dilated(
            images,
            weights,
            (strides, strides),
            (padding, padding),
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    weights = array(kernel, kernel, 3, 4)
    grads = array(*forward(weights, images).shape)

    def gradient(images: Any, grads: Any) -> Any:
        (sums,) = jax.linear_transpose(lambda weights: forward(weights, images), weights)(grads)
        return sums

    axes = tuple(axis for axis, entry in enumerate(layout) if entry != WHOLE)
    lanes = UnreducedAxes(axes, (layout, layout))
    check(gradient, (images, grads), lanes, mesh(2, 2), (2, 2)[: len(axes)])


def test_scatter_into_zeros() -> None:
    ids, rows = RNG.integers(0, 5, size=(8,)), array(8, 3)
    zeros = jnp.zeros((5, 3))

    def fn(zeros: Any, ids: Any, rows: Any) -> Any:
        numbers = jax.lax.ScatterDimensionNumbers((1,), (0,), (0,))
        return jax.lax.scatter_add(zeros, ids[:, None], rows, numbers)

    equation = last_equation(fn, zeros, ids, rows)
    lanes = UnreducedAxes((0,), ((WHOLE,), (0,), (0,)))
    (got,) = bind_unreduced(equation, lanes, [zeros, ids[:, None], rows], mesh(4))
    np.testing.assert_allclose(got.sum(0), fn(zeros, ids, rows), rtol=1e-5)


def test_layouts_and_zeros_with_lanes() -> None:
    assert unreduced_layout((PARTIAL, 1)) == (0, 2)
    assert unreduced_layout((0, PARTIAL)) == (1, 0)
    assert unreduced_layout((PARTIAL, PARTIAL)) == (0, 1)
    assert unreduced_layout((WHOLE, 1)) == (WHOLE, 1)
    assert unreduced_zeros(jnp.zeros((3,)), (WHOLE, PARTIAL), mesh(2, 4)).shape == (4, 3)
    assert unreduced_zeros(0.0, (PARTIAL, PARTIAL), mesh(2, 4)).shape == (2, 4)
    kept = jnp.ones((3,))
    assert unreduced_zeros(kept, (WHOLE, 0), mesh(2, 4)) is kept
