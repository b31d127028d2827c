"""Rules that users give: how their text is read, what is refused, what a kernel allows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import autopar
from autopar.tracer.rules import rules_of_equations
from autopar.tracer.trace_step import trace_step
from autopar.tracer.user_rules import parse_rule


def ones(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def host(*arrays: Any) -> Any:
    raise AssertionError("planning calls nothing")


def call(shapes: list[tuple[int, ...]], *results: tuple[int, ...]) -> Any:
    """The last equation of a step that calls `host`."""
    made = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results]
    args = tuple(ones(*shape) for shape in shapes)
    program = trace_step(lambda *args: jax.pure_callback(host, made, *args), args).program
    return program.equations[-1], program.avals


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    for name in ("host", "kernel", "pure_callback"):
        autopar.register_rule(name, None)


def fitted(equation: Any, avals: Any) -> Any:
    (ruled,) = rules_of_equations([equation], avals)
    return ruled


def test_text_is_read() -> None:
    rule = parse_rule("f", "(i j) k, , _ w0 -> i j . w0", "k", "w0")
    assert rule.operands == ((("i", "j"), ("k",)), (), ((), ("w0",)))
    assert rule.results == ((("i",), ("j",), (), ("w0",)),)
    assert (rule.reduction, rule.replicated) == ({"k"}, {"w0"})
    assert parse_rule("f", "-> i").operands == ()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("i j", {}, "one '->'"),
        ("i -> j -> k", {}, "one '->'"),
        (3, {}, "one '->'"),
        ("i ... -> i", {}, "'...' is no dimension"),
        ("i * -> i", {}, r"'\*' is no dimension"),
        ("() i -> i", {}, "no dimension"),
        ("(i j -> i j", {}, "parentheses"),
        ("i i -> i", {}, "'i' occurs twice"),
        ("i k -> i k", {"reduction": "k"}, "in no result"),
        ("i -> i k", {"reduction": "k"}, "in no result"),
        ("i k -> i", {"reduction": "j"}, "names 'j'"),
        ("i k -> i", {"replicated": 2}, "names 2"),
    ],
)
def test_text_that_cannot_be_meant(text: Any, options: Any, message: str) -> None:
    with pytest.raises(autopar.ArgumentError, match=message):
        autopar.register_rule("host", text, **options)


def test_a_name_is_needed() -> None:
    with pytest.raises(autopar.ArgumentError, match="name"):
        autopar.register_rule("", "i -> i")


def test_rule_of_an_equation() -> None:
    autopar.register_rule("host", "i k, k j -> i j", reduction="k", replicated="j")
    rule = fitted(*call([(8, 16), (16, 4)], (8, 4))).rule
    i, k, j = 0, 1, 2
    assert rule.operands == (((i,), (k,)), ((k,), (j,)))
    assert rule.results == (((i,), (j,)),)
    assert rule.sizes == (8, 16, 4)
    assert (rule.reduction, rule.fixed, rule.local) == ({k}, {j}, True)


def test_what_only_one_side_has_stays_whole() -> None:
    autopar.register_rule("host", "i a -> i b")
    assert fitted(*call([(8, 16)], (8, 4))).rule.fixed == {1, 2}


def test_products_and_sizes_of_one() -> None:
    autopar.register_rule("host", "(i j) k -> i j k")
    rule = fitted(*call([(24, 1)], (8, 3, 1))).rule
    assert rule.operands == (((0, 1), ()),)
    assert rule.results == (((0,), (1,), ()),)
    assert rule.sizes == (8, 3)


def test_rules_of_one_name_are_told_apart_by_their_dimensions() -> None:
    autopar.register_rule("host", "i -> i")
    autopar.register_rule("host", "b i -> b i")
    assert fitted(*call([(8,)], (8,))).rule.sizes == (8,)
    assert fitted(*call([(4, 8)], (4, 8))).rule.sizes == (4, 8)


def test_a_name_goes_before_its_primitive() -> None:
    autopar.register_rule("pure_callback", "i j -> i j")
    autopar.register_rule("host", "i j -> i j", replicated="i j")
    assert fitted(*call([(4, 8)], (4, 8))).rule.fixed == {0, 1}


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("i -> i", "does not fit 'host' at .*test_user_rules.py.*operands .*8, 16"),
        ("i j, -> i j", "does not fit"),
        ("i j -> j i", "is 16 in one place and 8 in another.*test_user_rules.py"),
        ("(i j) k -> (i j) k", "do not determine"),
    ],
)
def test_a_rule_that_does_not_fit_its_equation(rule: str, message: str) -> None:
    autopar.register_rule("host", rule)
    with pytest.raises(autopar.ArgumentError, match=message):
        fitted(*call([(8, 16)], (8, 16)))


def test_a_primitive_with_shapes_in_its_parameters_is_not_split() -> None:
    program = trace_step(lambda a: jax.lax.broadcast_in_dim(a, (8, 4), (0,)), (ones(8),)).program
    autopar.register_rule("broadcast_in_dim", "i -> i _")
    try:
        ruled = fitted(program.equations[-1], program.avals)
    finally:
        autopar.register_rule("broadcast_in_dim", None)
    assert 0 in ruled.rule.fixed
    assert "runs replicated; it cannot be split along i: on parts it" in ruled.warning


# -- Pallas kernels


def add(x: Any, w: Any, out: Any) -> None:
    out[...] = x[...] + w[...]


def numbered(x: Any, w: Any, out: Any) -> None:
    out[...] = x[...] + w[...] + pl.program_id(0)


def kernel(
    body: Callable[..., None] = add,
    rows: int = 2,
    x_index: Callable[..., Any] = lambda i, j: (i, j),
    out_index: Callable[..., Any] = lambda i, j: (i, j),
) -> Callable[..., Any]:
    return pl.pallas_call(
        body,
        out_shape=ones(8, 16),
        grid=(8 // rows, 2),
        in_specs=[pl.BlockSpec((rows, 8), x_index), pl.BlockSpec((8,), lambda i, j: (j,))],
        out_specs=pl.BlockSpec((rows, 8), out_index),
        interpret=True,
        name="kernel",
    )


def kernel_rule(fn: Callable[..., Any]) -> Any:
    autopar.register_rule("kernel", "i j, j -> i j")
    program = trace_step(fn, (ones(8, 16), ones(16))).program
    return fitted(program.equations[-1], program.avals)


def test_kernel_is_split_into_whole_blocks() -> None:
    ruled = kernel_rule(kernel(rows=2))
    rows, row, columns, column = 0, 1, 2, 3
    assert ruled.rule.sizes == (4, 2, 2, 8)
    assert ruled.rule.operands == (((rows, row), (columns, column)), ((columns, column),))
    assert ruled.rule.fixed == {row, column}
    assert not ruled.warning


def test_kernel_that_asks_for_its_place_is_not_split_along_it() -> None:
    ruled = kernel_rule(kernel(numbered))
    assert 0 in ruled.rule.fixed
    assert "is not split along i: the kernel asks for its place" in ruled.warning


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"x_index": lambda i, j: (0, j)}, "blocks do not run over"),
        ({"x_index": lambda i, j: (3 - i, j)}, "blocks do not run over"),
        ({"out_index": lambda i, j: (0, j)}, "blocks do not run over"),
    ],
    ids=["the same block", "computed", "accumulated"],
)
def test_kernel_whose_grid_is_more_than_an_index(index: Any, why: str) -> None:
    ruled = kernel_rule(kernel(**index))
    assert 0 in ruled.rule.fixed
    assert why in ruled.warning


def test_grid_that_moves_an_array_of_other_letters() -> None:
    # The second operand has one row of blocks for each of the first's, though the rule says not.
    fn = pl.pallas_call(
        add,
        out_shape=ones(8, 8),
        grid=(4,),
        in_specs=[pl.BlockSpec((2, 8), lambda i: (i, 0)), pl.BlockSpec((2, 8), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((2, 8), lambda i: (i, 0)),
        interpret=True,
        name="kernel",
    )
    autopar.register_rule("kernel", "i j, _ j -> i j")
    program = trace_step(fn, (ones(8, 8), ones(8, 8))).program
    ruled = fitted(program.equations[-1], program.avals)
    assert ruled.rule.fixed >= {0}
    assert "moves another block" in ruled.warning


def test_names_of_partial_functions() -> None:
    autopar.register_rule("host", "i -> i")
    fn = functools.partial(host, np.float32(1))
    step = trace_step(lambda a: jax.pure_callback(fn, ones(8), a), (ones(8),))
    assert fitted(step.program.equations[-1], step.program.avals).rule.sizes == (8,)
