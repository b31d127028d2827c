"""Operators on arrays, sharded, equal `jax.jit`; the work is split, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.equivalence.constructs import (
    definite,
    floats,
    free_sizes,
    gathers,
    graph_of,
    integers,
    ops_named,
    run_by_batch,
    split_ways,
)

X = floats(8, 16)
IMAGES = floats(8, 8, 8, 4)
MATRICES = floats(8, 4, 4)
DEFINITE = definite(8, 4, 4)


def gradient(fn: Callable[..., Any], *which: int) -> Callable[..., Any]:
    """Value and gradient of a curved sum of what a function gives."""

    def loss(*args: Any) -> Any:
        return sum(jnp.sin(y).sum() for y in jax.tree.leaves(fn(*args)))

    return jax.value_and_grad(loss, argnums=which or (0,))


def conv(kernel_dims: str = "HWIO", **options: Any) -> Callable[[Any, Any], Any]:
    spatial = kernel_dims[:-2]
    dims = (f"N{spatial}C", kernel_dims, f"N{spatial}C")
    options = {"window_strides": (1,) * len(spatial), "padding": "SAME", **options}
    return lambda x, k: lax.conv_general_dilated(x, k, dimension_numbers=dims, **options)


def pool(init: float, op: Any, window: int, stride: int) -> Callable[[Any], Any]:
    def fn(x: Any) -> Any:
        return lax.reduce_window(
            x, init, op, (1, window, window, 1), (1, stride, stride, 1), "SAME"
        )

    return fn


def attention(**options: Any) -> Callable[..., Any]:
    def fn(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, **options)

    return gradient(fn, 0, 1, 2)


QUERIES, KEYS, VALUES = floats(8, 4, 4, 8), floats(8, 4, 2, 8), floats(8, 4, 2, 8)
MASK = np.arange(4)[:, None] >= np.arange(4) - 1
CONV = ("conv_general_dilated",)
DOT = ("dot_general",)

# What it is, with its arguments, and the primitives whose work must be split over all devices.
Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[str, ...]]
CASES: dict[str, Case] = {
    "sort": (jnp.sort, (X,), ("sort",)),
    "argsort": (jnp.argsort, (X,), ("sort",)),
    "gradient of sort": (gradient(jnp.sort), (X,), ("sort",)),
    "sort of several": (lambda a: lax.sort((a, a * 2), num_keys=1), (X,), ("sort",)),
    "top_k": (gradient(lambda a: lax.top_k(a, 3)[0]), (X,), ("top_k",)),
    "approx_max_k": (lambda a: lax.approx_max_k(a, 3), (X,), ("approx_top_k",)),
    "median and quantile": (
        lambda a: (jnp.median(a, axis=1), jnp.quantile(a, 0.3, axis=1)),
        (X,),
        ("sort",),
    ),
    "cumsum": (gradient(lambda a: jnp.cumsum(a, 1)), (X,), ("cumsum",)),
    "cumprod": (lambda a: jnp.cumprod(a, 1), (X,), ("cumprod",)),
    "cummax and cummin": (lambda a: (lax.cummax(a, 1), lax.cummin(a, 1)), (X,), ("cummax",)),
    "cumlogsumexp": (lambda a: lax.cumlogsumexp(a, 1), (X,), ("cumlogsumexp",)),
    "associative scan": (
        gradient(lambda a: lax.associative_scan(jnp.multiply, a, axis=1)),
        (X,),
        ("mul",),
    ),
    "fft": (lambda a: jnp.abs(jnp.fft.ifft(jnp.fft.fft(a) * 2)), (X,), ("fft",)),
    "rfft": (gradient(lambda a: jnp.fft.irfft(jnp.fft.rfft(a))), (X,), ("fft",)),
    "fft2": (lambda a: jnp.abs(jnp.fft.fft2(a)), (floats(8, 4, 4),), ("fft",)),
    "conv 1d": (
        gradient(conv("WIO"), 0, 1),
        (floats(8, 8, 4), floats(3, 4, 8)),
        CONV,
    ),
    "conv 2d": (gradient(conv(), 0, 1), (IMAGES, floats(3, 3, 4, 8)), CONV),
    "strided conv": (
        gradient(conv(window_strides=(2, 2)), 0, 1),
        (IMAGES, floats(3, 3, 4, 8)),
        CONV,
    ),
    "dilated conv": (
        gradient(conv(rhs_dilation=(2, 1)), 0, 1),
        (IMAGES, floats(3, 3, 4, 8)),
        CONV,
    ),
    "depthwise conv": (
        gradient(conv(feature_group_count=8), 0, 1),
        (floats(8, 8, 8, 8), floats(3, 3, 1, 8)),
        CONV,
    ),
    "grouped conv": (
        gradient(conv(feature_group_count=2), 0, 1),
        (floats(8, 8, 8, 4), floats(3, 3, 2, 8)),
        CONV,
    ),
    "transposed conv": (
        gradient(lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), 0, 1),
        (IMAGES, floats(3, 3, 4, 8)),
        CONV,
    ),
    "max pool": (gradient(pool(-np.inf, lax.max, 2, 2)), (IMAGES,), ("reduce_window_max",)),
    "average pool": (gradient(pool(0.0, lax.add, 3, 1)), (IMAGES,), ("reduce_window_sum",)),
    "resize": (lambda x: jax.image.resize(x, (8, 16, 16, 4), "bilinear"), (IMAGES,), DOT),
    "take": (lambda t, i: jnp.take(t, i, axis=0), (floats(16, 8), integers(16, 8, 3)), ("gather",)),
    "gradient of take": (
        gradient(lambda t, i: jnp.take(t, i, axis=0)),
        (floats(16, 8), integers(16, 8, 3)),
        (),
    ),
    "take along": (
        gradient(lambda a, i: jnp.take_along_axis(a, i, axis=1)),
        (X, integers(16, 8, 4)),
        ("gather",),
    ),
    "index update": (
        lambda a, i: (a.at[i].set(1.0), a.at[i].add(2.0), a.at[:, i].max(0.5)),
        (X, integers(8, 3)),
        ("scatter-add",),
    ),
    "index update by rows": (
        lambda a, i: a.at[jnp.arange(8)[:, None], i].multiply(2.0),
        (X, integers(16, 8, 2)),
        ("scatter-mul",),
    ),
    "segment sum": (
        gradient(lambda a, i: jax.ops.segment_sum(a, i, 4)),
        (X, integers(4, 8)),
        ("gather",),  # the sum itself has partial results
    ),
    "one_hot": (lambda i: jax.nn.one_hot(i, 16), (integers(16, 8, 3),), ("eq",)),
    "searchsorted": (jnp.searchsorted, (np.sort(floats(16)), floats(8, 8)), ()),
    "dynamic slice": (
        gradient(lambda a, i: lax.dynamic_slice_in_dim(a, i, 4, 1)),
        (X, np.int32(3)),
        ("dynamic_slice",),
    ),
    "cholesky": (gradient(jnp.linalg.cholesky), (DEFINITE,), ("cholesky",)),
    "qr": (jnp.linalg.qr, (MATRICES,), ("qr",)),
    "gradient of qr": (gradient(jnp.linalg.qr), (MATRICES,), ()),
    "svd": (gradient(lambda a: jnp.linalg.svd(a, compute_uv=False)), (MATRICES,), ("svd",)),
    "eigh": (lambda a: jnp.linalg.eigh(a)[0], (DEFINITE,), ("eigh",)),
    "solve": (gradient(jnp.linalg.solve, 0, 1), (DEFINITE, floats(8, 4, 2)), ("lu",)),
    "inverse and determinant": (
        lambda a: (jnp.linalg.inv(a), jnp.linalg.det(a)),
        (DEFINITE,),
        ("lu",),
    ),
    "triangular solve": (
        gradient(lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True), 0, 1),
        (DEFINITE, floats(8, 4, 2)),
        ("triangular_solve",),
    ),
    "conjugate gradient": (
        jax.vmap(lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, maxiter=3)[0]),
        (DEFINITE, floats(8, 4)),
        DOT,
    ),
    "causal attention": (attention(is_causal=True), (QUERIES, KEYS, VALUES), DOT),
    "attention with mask and bias": (
        attention(mask=MASK, bias=floats(1, 4, 4, 4), implementation="xla"),
        (QUERIES, KEYS, VALUES),
        DOT,
    ),
    "windowed attention": (attention(local_window_size=2), (QUERIES, KEYS, VALUES), DOT),
    "special functions": (
        lambda a: jax.scipy.special.gammainc(2.0, a) + jax.scipy.special.betainc(1.5, 2.0, a / 9),
        (np.abs(X),),
        ("igamma", "regularized_incomplete_beta"),
    ),
}


@pytest.mark.representatives(
    "causal attention",
    "cholesky",
    "conv 2d",
    "cumsum",
    "dynamic slice",
    "index update",
    "max pool",
    "rfft",
    "segment sum",
    "sort",
    "svd",
    "take",
    "top_k",
)
@pytest.mark.parametrize("name", CASES)
def test_operator_equals_jit_and_is_split(name: str) -> None:
    fn, args, split = CASES[name]
    step = run_by_batch(fn, *args)
    warnings = step.last_executable.plan.warnings
    assert not [warning for warning in warnings if "expected_trips" not in warning]
    ways: dict[str, int] = {}
    for op, parts in split_ways(step):
        ways[op] = max(ways.get(op, 1), parts)
    assert {op: ways[op] for op in split} == dict.fromkeys(split, 8)


# Of these, XLA's own partitioner would gather the operands.
@pytest.mark.representatives("top_k", "solve")
@pytest.mark.parametrize("name", ["top_k", "fft", "rfft", "solve", "special functions"])
def test_operator_that_is_bound_to_parts_gathers_nothing(name: str) -> None:
    fn, args, _ = CASES[name]
    assert not gathers(run_by_batch(fn, *args))


def test_ragged_dot() -> None:
    def fn(w: Any, x: Any, sizes: Any) -> Any:
        return lax.ragged_dot(x, w, sizes)

    args = (floats(4, 8, 8), floats(16, 8), np.array([4, 2, 6, 4], np.int32))
    step = run_by_batch(gradient(fn, 0, 1), *args)
    assert not step.last_executable.plan.warnings
    names = {n for n, _ in split_ways(step)}
    assert "ragged_dot_general" in names


def test_matrices_without_a_batch_are_factorised_whole() -> None:
    graph = graph_of(jnp.linalg.det, definite(8, 8))
    (lu,) = ops_named(graph, "lu")
    assert not free_sizes(lu)
