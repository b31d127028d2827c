"""Loops, branches, checkpoints, custom derivatives and random numbers in train steps: sharded,
equal to `jax.jit`, and split where the work is. `test_control_flow.py` has the plain forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import autopar
from tests.equivalence.constructs import assert_same, floats, run, run_by_batch, split_ways

X, W = floats(8, 16), floats(16, 16) / 4
STACK = floats(3, 16, 16) / 4
KEEP = jax.checkpoint_policies


def trained(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A train step: weights in, updated weights and the loss out."""

    def step(w: Any, x: Any) -> Any:
        loss, slope = jax.value_and_grad(lambda w: jnp.square(fn(w, x)).mean())(w)
        return w - 0.1 * slope, loss

    return step


def layer(w: Any, x: Any) -> Any:
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return jnp.sin(hidden @ w.T)


@jax.custom_jvp
def clipped(x: Any) -> Any:
    return jnp.clip(x, -1, 1)


@clipped.defjvp
def _clipped_jvp(primals: Any, tangents: Any) -> Any:
    return clipped(*primals), tangents[0] * 0.5


@jax.custom_vjp
def straight(x: Any) -> Any:
    return jnp.round(x)


straight.defvjp(lambda x: (straight(x), None), lambda _, slope: (slope,))


def scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda c, own: (jnp.tanh(c @ own), c.mean()), x, w)[0]


def branched(w: Any, x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda: layer(w, x), lambda: x @ w)


def switched(w: Any, x: Any) -> Any:
    branches = [lambda x: layer(w, x), lambda x: clipped(x @ w), lambda x: x * 2]
    return lax.switch((x.sum() > 0).astype(int) + 1, branches, x)


def iterated(w: Any, x: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w) + i, x)


def per_row(w: Any, x: Any) -> Any:
    """`vmap` of a scan, a cond (which becomes a select), a checkpoint and a custom derivative."""

    def one(row: Any) -> Any:
        row = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), row, None, length=2)[0]
        row = lax.cond(row[0] > 0, lambda r: r * 2, lambda r: r @ w, row)
        return straight(jax.checkpoint(lambda r: layer(w, r))(row)) + clipped(row)

    return jax.vmap(one)(x)


STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "checkpoint": jax.checkpoint(layer),
    "dots_saveable": jax.checkpoint(layer, policy=KEEP.dots_saveable),
    "nothing_saveable": jax.checkpoint(layer, policy=KEEP.nothing_saveable),
    "named": jax.checkpoint(layer, policy=KEEP.save_only_these_names("hidden")),
    "checkpoint in a scan": lambda w, x: lax.scan(
        jax.checkpoint(lambda c, _: (layer(w, c), None)), x, None, length=2
    )[0],
    "custom derivatives": lambda w, x: straight(x @ w) + clipped(x @ w),
    "custom derivative of a loop": lambda w, x: clipped(iterated(w, x)),
    "jit in jit": lambda w, x: jax.jit(jax.jit(layer))(w, jax.jit(jnp.sin)(x)),
    "cond": branched,
    "switch": switched,
    "fori_loop": iterated,
    "vmap of control flow": per_row,
}


@pytest.mark.representatives(
    "cond", "custom derivatives", "jit in jit", "checkpoint", "named", "dots_saveable"
)
@pytest.mark.parametrize("name", STEPS)
def test_train_step_equals_jit_and_its_products_are_split(name: str) -> None:
    fn = trained(STEPS[name])
    step = run(fn, W, X)
    assert not step.last_executable.plan.warnings
    products = [ways for op, ways in split_ways(step) if op == "dot_general"]
    assert products
    assert max(products) > 1


def test_scan_over_layers_in_a_train_step() -> None:
    fn = trained(scanned)
    step = run(fn, STACK, X)
    products = [ways for op, ways in split_ways(step) if op == "dot_general"]
    assert max(products) > 1


def test_loops_of_a_batch_that_end_at_different_times() -> None:
    def one(row: Any, limit: Any) -> Any:
        return lax.while_loop(
            lambda c: (c[1] < limit) & (c[0].sum() < 50),
            lambda c: (c[0] * 2 + 1, c[1] + 1),
            (row, 0),
        )

    step = run_by_batch(jax.vmap(one), X, np.arange(8, dtype=np.int32))
    # Whether any of them goes on is all that devices tell each other.
    assert {op.kind for op in step.last_executable.collectives()} <= {"all-reduce"}


def test_loop_of_a_batch_under_a_common_condition() -> None:
    def one(row: Any) -> Any:
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (row, 0))

    assert not run_by_batch(jax.vmap(one), X).last_executable.collectives()


# -- random numbers


def noise(key: Any, x: Any) -> Any:
    first, second = jax.random.split(key)
    kept = jax.random.bernoulli(first, 0.9, x.shape)
    drawn = jax.random.normal(second, x.shape) + jax.random.randint(first, x.shape, 0, 5)
    return jnp.where(kept, x, 0) + drawn.astype(x.dtype)


def largest_array(hlo: str) -> int:
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", hlo)
    return max(prod(int(n) for n in shape.split(",")) for shape in shapes)


IMPLEMENTATIONS = ["threefry2x32", "rbg", "unsafe_rbg"]


@pytest.mark.representatives(
    "threefry2x32-(0, 1)",
    slow=[f"unsafe_rbg-({x}, {y})" for x in (0, 1) for y in (0, 1)],
)
@pytest.mark.parametrize("spec", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_random_numbers_are_drawn_in_parts(implementation: str, spec: tuple[int, int]) -> None:
    rows = [None, None]
    for axis, dim in zip(("x", "y"), spec, strict=True):
        rows[dim] = axis if rows[dim] is None else (rows[dim], axis)
    method = autopar.ManualParallel((2, 4), ("x", "y"), in_specs=(None, PartitionSpec(*rows)))
    step = autopar.parallelize(noise, method=method)
    key, x = jax.random.key(3, impl=implementation), floats(64, 128)
    assert_same(step(key, x), jax.jit(noise)(key, x))
    assert largest_array(step.last_executable.hlo_text()) <= x.size // 8
    assert not step.last_executable.collectives()


@pytest.mark.ci
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_random_numbers_of_a_batch_of_keys(implementation: str) -> None:
    def fn(key: Any, x: Any) -> Any:
        return jax.vmap(noise)(jax.random.split(key, 8), x)

    run(fn, jax.random.key(3, impl=implementation), X)


@pytest.mark.representatives(slow=["unsafe_rbg"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_all_that_is_drawn_equals_jit(implementation: str) -> None:
    def fn(key: Any, x: Any) -> Any:
        keys = jax.random.split(key, 6)
        return (
            jax.random.bits(keys[0], (8, 6), "uint8"),
            jax.random.bits(keys[0], (24,), "uint16"),
            jax.random.truncated_normal(keys[1], -1, 1, x.shape, jnp.bfloat16),
            jax.random.categorical(keys[2], x),
            jax.random.permutation(keys[3], x),
            jax.random.exponential(keys[4], (3, 5)) + jax.random.gumbel(keys[5], (8, 3, 5)),
        )

    run(fn, jax.random.key(3, impl=implementation), X)
